"""GGUF to a bf16 Hugging Face directory.

transformers reads and dequantises GGUF but refuses to save the result (it still counts as
"quantized with gguf"), so the weights are copied into a fresh model of the same configuration,
which is then saved. It also fills absent tensors with random numbers and leaves unknown ones out:
both are looked for first (:mod:`taut_deploy.models.gguf_tensors`).
"""

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

from taut_deploy.errors import ModelError
from taut_deploy.files import require_free_space, safetensors_disk_errors
from taut_deploy.models.gguf_header import GgufHeader, read_header
from taut_deploy.models.gguf_parts import join_parts, parts_of, stem_of
from taut_deploy.models.gguf_reading import read_once

_READ_ERRORS = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ArithmeticError,
    NotImplementedError,
    RuntimeError,
    OSError,
    struct.error,
)
_BYTES_OF_BF16 = 2
# Numbers of things in the metadata that transformers makes modules or buffers of.
_MAX_COUNT = 65_536


def convert_gguf(source: Path, destination: Path) -> None:
    """Dequantise ``source`` and write config, tokenizer and safetensors into ``destination``.

    Args:
        source: a ``.gguf`` file of an architecture transformers can read, or any part of one that
            is split, beside its other parts.
        destination: an existing directory.

    Raises:
        ModelError: the file is no GGUF, cut short or lacks a part, its architecture is not known,
            or tensors are missing, unknown, of other shapes or not finite.
        OutputError: the disk has too little room.
        OSError: the disk is full all the same.
    """
    parts = parts_of(source)
    if len(parts) == 1:
        _convert(source, destination)
        return
    with tempfile.TemporaryDirectory(dir=destination) as work:
        whole = Path(work) / f"{stem_of(source)}.gguf"
        join_parts(parts, whole)
        _convert(whole, destination)


@read_once()
def _convert(source: Path, destination: Path) -> None:
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Here: every command finds models, and most of them need no tensor library for it.
    from taut_deploy.models.gguf_tensors import require_all_tensors, require_finite, require_shapes

    header = read_header(source)
    _require_plausible(source, header)
    require_free_space(
        destination, _BYTES_OF_BF16 * header.elements, "set TAUT_HOME to another disk"
    )
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        config = AutoConfig.from_pretrained(**where, trust_remote_code=False)
        shapes = require_all_tensors(source, header, config)
    except (*_READ_ERRORS, StrictDataclassError) as error:
        raise _unreadable(source, error) from error
    # Before the weights, which take minutes.
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
    except Exception as error:  # tokenizers raises a bare Exception for a vocabulary it refuses
        raise _unreadable(source, error) from error
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            **where,
            trust_remote_code=False,
            config=config,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except (*_READ_ERRORS, StrictDataclassError) as error:
        raise _unreadable(source, error) from error
    _require_loaded(source, info)
    require_shapes(source, loaded.state_dict(), shapes)
    require_finite(source, loaded.state_dict())
    with safetensors_disk_errors():
        _save(loaded, tokenizer, destination)
    _require_json(source, destination)


def _save(loaded: Any, tokenizer: Any, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = loaded.config
    config.quantization_config = None
    del config.quantization_config
    config._name_or_path = ""
    with torch.device("meta"):  # it takes the weights over: neither storage nor random numbers
        fresh = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _require_plausible(source: Path, header: GgufHeader) -> None:
    """Refuse what would be half a model, or would make transformers build without end.

    Raises:
        ModelError: naming the metadata key.
    """
    if not header.architecture:
        raise ModelError(f"{source}: no general.architecture in its metadata; not a model")
    for key, value in header.metadata.items():
        counts = key.startswith(f"{header.architecture}.") and key.endswith("_count")
        too_many = counts and type(value) is int and not 0 <= value <= _MAX_COUNT
        if too_many or (isinstance(value, float) and value - value != 0):
            raise ModelError(f"{source}: {key} is {value}; the file is damaged")
    blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    declared = header.metadata.get(f"{header.architecture}.block_count")
    if declared != len(blocks):
        raise ModelError(
            f"{source}: {header.architecture}.block_count is {declared}, the file holds tensors of "
            f"{len(blocks)} blocks; fetch the whole file"
        )


def _require_loaded(source: Path, info: dict[str, Any]) -> None:
    """Refuse tensors that transformers made up or left out, whatever its name for the reason."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(key if isinstance(key, str) else key[0] for key in info.get(problem) or ())
        if names:
            raise ModelError(
                f"{source}: {len(names)} {problem.split('_')[0]} tensors, the first is {names[0]}"
            )


def _require_json(source: Path, destination: Path) -> None:
    for path in destination.glob("*.json"):
        try:
            json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except ValueError as error:
            raise _unreadable(source, error) from error


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"its metadata holds {constant}")


def _unreadable(source: Path, error: Exception) -> ModelError:
    if isinstance(error, ModelError):
        return error
    reason = " ".join((str(error) or type(error).__name__).split())
    return ModelError(f"{source}: not a GGUF that transformers can read: {reason[:300]}")
