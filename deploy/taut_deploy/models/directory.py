"""What a model directory on disk must hold, and what it says about itself."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taut_deploy.documents import read_json, read_json_object
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.files import VOLATILE_FILES
from taut_deploy.models.pretrained import load_config, reason_of
from taut_deploy.recorded_hashes import RECORD

_KEPT_SUFFIXES = {".json", ".safetensors", ".model", ".txt", ".jinja"}
_OURS = VOLATILE_FILES | {"taut-model.json", "taut.json", RECORD}
_INDEX = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
# What families call the same size.
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
_LONGEST = ("max_position_embeddings", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM, read from its configuration.

    Args:
        architecture: first entry of ``architectures``.
        model_type: transformers' family name.
        num_layers: decoder blocks.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads.
        vocab_size: rows of the embedding.
        max_position_embeddings: longest context in tokens.
        quantization: scheme name found in the configuration, or None.
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    quantization: str | None

    def as_json(self) -> dict[str, object]:
        """The shape as plain data."""
        return asdict(self)


def require_model_directory(directory: Path) -> None:
    """Check that configuration, tokenizer and every shard are there, and nowhere else.

    Raises:
        ModelError: naming the missing file, or the link that leaves the directory.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    require_contained(directory)
    read_config(directory)
    for shard in weight_files(directory):
        if not shard.is_file():
            raise ModelError(
                f"{shard}: this shard is named in {_INDEX} but missing; fetch the model again"
            )
    if not any(
        (directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        raise ModelError(
            f"{directory}: no tokenizer file (tokenizer.json, tokenizer.model or vocab.json)"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's ``config.json``.

    Raises:
        ModelError: if it is missing or not a JSON object.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"{directory}: no config.json, so this is not a Hugging Face model")
    return read_json_object(path, ModelError)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors shards a directory declares, in order; declared ones may be missing.

    Raises:
        ModelError: if it declares none, its index is damaged, or a shard lies elsewhere.
    """
    index = directory / _INDEX
    if index.is_file():
        shards = [directory / name for name in sorted(set(read_index(directory).values()))]
        _require_no_others(directory, shards)
        return shards
    single = directory / "model.safetensors"
    if single.is_file():
        _require_inside(single, directory)
        _require_no_others(directory, [single])
        return [single]
    raise ModelError(
        f"{directory}: no model.safetensors and no {_INDEX}; only safetensors weights are read, "
        "and 'taut model fetch DIRECTORY' rewrites pytorch_model.bin"
    )


def _require_no_others(directory: Path, declared: list[Path]) -> None:
    """Refuse a second set of weights: which one is read differs between readers."""
    others = sorted(set(directory.glob("model*.safetensors")) - set(declared))
    if others:
        raise ModelError(
            f"{others[0]}: weights beside those of {declared[0].name} that no index names; remove "
            "what is not the model's"
        )


def declared_shards(directory: Path) -> dict[str, str]:
    """The shard of every tensor that the index names; empty where there is no index.

    Raises:
        ModelError: see :func:`read_index`.
    """
    return read_index(directory) if (directory / _INDEX).is_file() else {}


def read_index(directory: Path) -> dict[str, str]:
    """The shard of every tensor, from a directory's index.

    Raises:
        ModelError: it is damaged, or names a shard that is not a safetensors file of the directory.
    """
    index = directory / _INDEX
    try:
        weight_map = read_json(index, ModelError)["weight_map"]
        names = set(weight_map.values())
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{index}: no JSON object with a 'weight_map'; fetch it again") from error
    for name in names:
        plain = isinstance(name, str) and _SHARD_NAME.fullmatch(name)
        if not plain:
            raise ModelError(
                f"{index}: weight_map: {str(name)[:80]!r} is not a .safetensors file of this "
                "directory; fetch the model again"
            )
        _require_inside(directory / name, directory)
    return dict(weight_map)


def require_contained(directory: Path) -> None:
    """Check that no file of the model is a link to, or named at, a place outside its directory.

    Raises:
        ModelError: naming the link, or the shard in the index.
    """
    declared_shards(directory)
    for path in model_files(directory):
        _require_inside(path, directory)


def _require_inside(path: Path, directory: Path) -> None:
    if not path.is_symlink():
        return
    here = directory.resolve()
    allowed = [here]
    if here.parent.name == "snapshots":  # the hub client's cache keeps the bytes beside them
        allowed.append(here.parent.parent / "blobs")
    target = path.resolve()
    if not any(target.is_relative_to(place) for place in allowed):
        raise ModelError(
            f"{path}: a link to {target}, outside the model's directory; put the file itself there"
        )


def model_files(directory: Path) -> list[Path]:
    """Files that make up the model, ours excluded, in a stable order."""
    files = (
        path for path in directory.iterdir() if path.is_file() and path.suffix in _KEPT_SUFFIXES
    )
    return sorted(path for path in files if path.name not in _OURS)


def read_shape(directory: Path, *, trust_remote_code: bool = False) -> ModelShape:
    """Sizes of the model in ``directory``.

    Args:
        directory: of the model.
        trust_remote_code: let the model's own Python code run.

    Raises:
        ModelError: if transformers does not know the architecture, or the configuration
            lacks a size or contradicts itself.
    """
    raw = read_config(directory)
    config = load_config(directory, trust_remote_code=trust_remote_code)
    try:
        return _shape_of(raw, config)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        family = repr(raw.get("model_type"))[:80]
        raise ModelError(
            f"{directory / 'config.json'}: architecture {family} is not supported "
            f"({reason_of(error)})"
        ) from error


def require_within_context(longest: int, length: int, asked_by: str) -> None:
    """Refuse sequences that are longer than a model reads.

    Args:
        longest: context of the model in tokens; 0 where it does not say.
        length: tokens of a sequence.
        asked_by: the field that asks for them.

    Raises:
        RecipeError: they are.
    """
    if 0 < longest < length:
        raise RecipeError(
            f"{asked_by}: {length} is more than the {longest} tokens of the model's context "
            "(max_position_embeddings); lower it"
        )


def _shape_of(raw: dict[str, Any], config: Any) -> ModelShape:
    """Sizes by transformers' configuration, of the text part where there are several.

    Raises:
        ValueError, TypeError, AttributeError: a size is missing or no number.
    """
    architectures = raw.get("architectures") or ["unknown"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise TypeError("architectures is not a list of names")
    text = config.get_text_config()
    if not hasattr(text, "num_attention_heads"):
        raise ValueError("its blocks hold no attention; take a decoder of text that has it")
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    kv_heads = 1 if getattr(text, "multi_query", False) else _first(text, _KV_HEADS) or heads
    return ModelShape(
        architecture=architectures[0],
        model_type=config.model_type,
        num_layers=int(text.num_hidden_layers),
        hidden_size=hidden,
        intermediate_size=_first(text, _INTERMEDIATE) or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=int(text.vocab_size),
        max_position_embeddings=_first(text, _LONGEST) or 0,
        quantization=_quantization_of(raw),
    )


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of several settings that a configuration has; the largest where blocks differ."""
    found = (getattr(config, name, None) for name in names)
    value = next((value for value in found if value is not None), None)
    if isinstance(value, list | tuple):
        value = max(value)
    return None if value is None else int(value)


def _quantization_of(config: dict[str, Any]) -> str | None:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method = str(quantization.get("quant_method", "unknown"))
    return f"{method}/{quantization['format']}" if "format" in quantization else method
