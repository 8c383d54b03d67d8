"""A dense model, whole in memory: what is cut smaller, and what teaches."""

from pathlib import Path
from typing import Any

from taut_deploy.compress.job import compute_dtype, stored_dtype
from taut_deploy.errors import ModelError


def load_dense(directory: Path, device: str, *, trust_remote_code: bool) -> Any:
    """The model of a directory, ready to run, nothing in it trained.

    Raises:
        ModelError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    import taut_deploy.hf  # noqa: F401  registers quant_method taut

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=compute_dtype(stored_dtype(directory), device),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelError(f"{directory}: cannot be loaded ({reason})") from error
    return model.to(device).eval().requires_grad_(False)
