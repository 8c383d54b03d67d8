"""What transformers builds from a model's directory, and its refusals in one line.

The only place that loads a configuration or a tokenizer. Whether the directory's own Python code
may run is said every time: left open, transformers asks on standard input.
"""

from pathlib import Path
from typing import Any

from taut_deploy.documents import read_json_object
from taut_deploy.errors import ModelError
from taut_deploy.models.remote_code import why_code_is_needed


def load_config(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The directory's configuration as transformers' object.

    Raises:
        ModelError: transformers does not know the architecture or refuses a value, or the model
            needs code of its own.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    document = read_json_object(directory / "config.json", ModelError)
    _require_dtype(directory / "config.json", document)
    try:
        return AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise _refused(directory, error, _unsupported(directory, document, error)) from error
    except Exception as error:  # a configuration's arithmetic may raise anything, so may own code
        raise ModelError(_unsupported(directory, document, error)) from error


def declared_class(config: Any) -> Any | None:
    """The class that a configuration names first; None where transformers has none of that name."""
    import transformers

    declared = str((getattr(config, "architectures", None) or [""])[0])
    return getattr(transformers, declared, None)


def generating_class(config: Any) -> Any:
    """The class of transformers that builds, or loads, what generates text of this configuration.

    A model with a vision part is no causal LM to transformers' table; it is built by its own class.
    """
    import transformers

    general: Any = transformers.AutoModelForCausalLM
    own = declared_class(config)
    return general if own is None or type(config) in general._model_mapping else own


def loading_class(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The same for a directory.

    Raises:
        ModelError: of :func:`load_config`.
    """
    return generating_class(load_config(directory, trust_remote_code=trust_remote_code))


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The directory's tokenizer.

    Raises:
        ModelError: there is none that loads, or it needs code of its own.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizers raises a bare Exception for a file it refuses
        reason = f"{directory}: no usable tokenizer ({reason_of(error)}); fetch the model again"
        raise _refused(directory, error, reason) from error


def _require_dtype(path: Path, document: dict[str, Any]) -> None:
    import torch

    for key in ("dtype", "torch_dtype"):
        name = document.get(key)
        if name is None:
            continue
        found = getattr(torch, str(name).removeprefix("torch."), None)
        if not (isinstance(found, torch.dtype) and found.is_floating_point):
            raise ModelError(
                f"{path}: {key}: {str(name)[:40]!r} is no type of weights; write bfloat16, "
                "float16 or float32, as they are stored"
            )


def reason_of(error: BaseException, limit: int = 200) -> str:
    """What an exception says, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def refusal(directory: Path, error: BaseException, limit: int = 160) -> str:
    """What transformers says of a model's directory, on one line.

    A word that it looked up in vain is all that its KeyError says: where ``config.json`` has the
    word stands before it then.
    """
    return _place_of_word(directory / "config.json", error) + reason_of(error, limit)


def _place_of_word(file: Path, error: BaseException) -> str:
    if not isinstance(error, KeyError) or not error.args or not file.is_file():
        return ""
    settings = list(read_json_object(file, ModelError).items())
    for key, value in list(settings):
        if isinstance(value, dict):
            settings += [(f"{key}.{name}", one) for name, one in value.items()]
    return next((f"{key}: " for key, value in settings if value == error.args[0]), "")


def _unsupported(directory: Path, document: dict[str, Any], error: BaseException) -> str:
    file, family = directory / "config.json", document.get("model_type")
    if family is None:
        return f"{file}: model_type: names no architecture; give the one that the weights are of"
    return f"{file}: architecture {repr(family)[:80]} is not supported ({reason_of(error)})"


def _refused(directory: Path, error: BaseException, otherwise: str) -> ModelError:
    """The error to raise: transformers' advice to trust the code is not ours to repeat."""
    needed = why_code_is_needed(directory) if "trust_remote_code" in str(error) else None
    return ModelError(needed or otherwise)
