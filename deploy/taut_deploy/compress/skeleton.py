"""An architecture without its weights, to be filled by whoever has them."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from taut_deploy.errors import ModelError
from taut_deploy.models.pretrained import declared_class, generating_class, refusal

_LARGE = 1 << 18
"""Numbers of a tensor that no buffer has."""


def empty_model(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The causal LM of a configuration: parameters on the meta device, plain layers, no dropout.

    Buffers, which no file holds, are computed.

    Args:
        config: transformers' configuration; a ``quantization_config`` in it is left out.
        dtype: of the weights to come.
        trust_remote_code: let the model's own Python code run.

    Raises:
        ModelError: it is no causal LM, or transformers refuses the configuration.
    """
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    for part in (plain, plain.get_text_config()):  # one and the same where there is only text
        for key, value in list(vars(part).items()):
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    build, options = _builder(plain, trust_remote_code=trust_remote_code)
    try:
        model = _build(build, plain, {"dtype": dtype, **options})
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise ModelError(
            f"{_file(plain)}: transformers refuses the model ({refusal(_directory(plain), error)})"
        ) from error
    model.tie_weights()
    return model


def no_causal_lm(config: Any, why: str) -> ModelError:
    """The refusal of what is no decoder of text."""
    return ModelError(
        f"{_file(config)}: model_type {config.model_type!r} is no causal LM that can be compressed "
        f"({why}); take a decoder of text"
    )


def _file(config: Any) -> Path:
    return _directory(config) / "config.json"


def _directory(config: Any) -> Path:
    return Path(getattr(config, "_name_or_path", ""))


def _builder(config: Any, *, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """What makes a model of the configuration, and its own arguments.

    Raises:
        ModelError: the architecture does not generate text.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise no_causal_lm(config, "it is an encoder and a decoder")
    own = declared_class(config)
    if own is not None and not (hasattr(own, "can_generate") and own.can_generate()):
        raise no_causal_lm(config, f"{config.architectures[0]} does not generate text")
    built_by = generating_class(config)
    if built_by is own:
        return own._from_config, {}
    return built_by.from_config, {"trust_remote_code": trust_remote_code}


class _LargeOnMeta(TorchFunctionMode):
    """Makes large empty tensors without memory.

    accelerate has each weight made before it moves it to the meta device: never touched, but room
    for a whole model is reserved, since what is made between two weights lies where one was.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None and _elements(args) >= _LARGE:
            options["device"] = "meta"
        found: torch.Tensor = func(*args, **options)
        return found


def _elements(sizes: tuple[Any, ...]) -> int:
    """Of a tensor that is asked for by its sizes, apart or as one sequence."""
    listed = sizes[0] if sizes and isinstance(sizes[0], list | tuple) else sizes
    return math.prod(listed) if all(isinstance(one, int) for one in listed) else 0


def _build(build: Any, config: Any, options: dict[str, Any]) -> Any:
    from accelerate import init_empty_weights

    with (
        init_empty_weights(include_buffers=False),
        _LargeOnMeta(),
        # Of sizes of 0, whose refusal is a line by itself.
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        try:
            # sdpa needs no mask tensor for unpadded text, which keeps recorded calls small.
            return build(config, attn_implementation="sdpa", **options)
        except ValueError as error:
            if "scaled_dot_product" not in str(error):
                raise
            return build(config, attn_implementation="eager", **options)
