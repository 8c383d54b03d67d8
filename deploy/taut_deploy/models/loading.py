"""The one place that lets transformers read a model directory.

Everywhere the same answers: nothing from the network, no pickles, and no code of the model's own
unless the user trusts it (:mod:`taut_deploy.models.remote_code`).
"""

from pathlib import Path
from typing import Any

from taut_deploy.errors import ModelError
from taut_deploy.models.remote_code import is_trusted, require_no_code


def load_config(directory: Path) -> Any:
    """transformers' configuration of a model directory.

    Raises:
        ModelError: transformers does not know it, or it contradicts itself.
    """
    from transformers import AutoConfig

    require_no_code(directory)
    try:
        return AutoConfig.from_pretrained(
            directory, trust_remote_code=is_trusted(directory), local_files_only=True
        )
    except Exception as error:  # a configuration class raises whatever its arithmetic meets
        raise ModelError(
            f"{directory / 'config.json'}: not a configuration that transformers can read "
            f"({reason_of(error)})"
        ) from error


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory.

    Raises:
        ModelError: there is none that loads.
    """
    from transformers import AutoTokenizer

    require_no_code(directory)
    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=is_trusted(directory), local_files_only=True
        )
    except Exception as error:  # tokenizers raises a bare Exception for a file it refuses
        raise ModelError(f"{directory}: no usable tokenizer: {reason_of(error)}") from error


def load_causal_lm(directory: Path, **options: Any) -> Any:
    """A causal LM with its weights; raises what transformers raises.

    Args:
        directory: of the model.
        options: for ``from_pretrained``.

    Raises:
        ModelError: it would take code of the model's own.
    """
    from transformers import AutoModelForCausalLM

    require_no_code(directory)
    return AutoModelForCausalLM.from_pretrained(
        directory,
        trust_remote_code=is_trusted(directory),
        local_files_only=True,
        use_safetensors=True,
        **options,
    )


def reason_of(error: BaseException, limit: int = 200) -> str:
    """An exception's message on one line of at most ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
