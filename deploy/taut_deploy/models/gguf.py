"""GGUF to a bf16 Hugging Face directory.

transformers reads and dequantises GGUF but refuses to save the result (it still counts as
"quantized with gguf"), so the weights are copied into a fresh model of the same configuration,
which is then saved.
"""

import struct
from pathlib import Path

from taut_deploy.errors import ModelError


def convert_gguf(source: Path, destination: Path) -> None:
    """Dequantise ``source`` and write config, tokenizer and safetensors into ``destination``.

    Args:
        source: a ``.gguf`` file of an architecture transformers can read.
        destination: an existing, empty directory.

    Raises:
        ModelError: if the file is no GGUF, is cut short, or its architecture is not known.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _require_gguf(source)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except (ValueError, KeyError, IndexError, RuntimeError, OSError, struct.error) as error:
        raise _unreadable(source, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # tokenizers raises a bare Exception for a vocabulary it refuses
        raise _unreadable(source, error) from error
    config = loaded.config
    config.quantization_config = None
    del config.quantization_config
    config._name_or_path = ""
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _unreadable(source: Path, error: Exception) -> ModelError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ModelError(f"{source}: not a GGUF that transformers can read: {reason}")


def _require_gguf(source: Path) -> None:
    if not source.is_file():
        raise ModelError(f"{source}: no such file")
    with source.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise ModelError(f"{source}: not a GGUF file (its first bytes are not 'GGUF')")
