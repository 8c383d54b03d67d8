"""An architecture without its weights, to be filled by whoever has them."""

import copy
from typing import Any

import torch

from taut_deploy.errors import ModelError


def empty_model(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The causal LM of a configuration: parameters on the meta device, plain layers, no dropout.

    Buffers, which no file holds, are computed.

    Args:
        config: transformers' configuration; a ``quantization_config`` in it is left out.
        dtype: of the weights to come.
        trust_remote_code: let the model's own Python code run.

    Raises:
        ModelError: transformers refuses the configuration.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    for key, value in list(vars(plain).items()):
        if "drop" in key and isinstance(value, float):
            setattr(plain, key, 0.0)
    try:
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(
                plain,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelError(f"config.json: transformers refuses the model ({reason})") from error
    model.tie_weights()
    return model
