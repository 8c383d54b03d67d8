"""An 8-bit KV cache: what attention sees of keys and values, its scales, how they are stored.

A cache holds keys after their rotation and values as they are, each divided by a scale and rounded
to FP8 (e4m3) or INT8. FP8's scales are stored: vLLM and transformers read ``k_scale`` and
``v_scale`` beside the attention's own weights. INT8's are made for every token and head as the
cache is written. Queries have none: transformers does not know it, and where vLLM multiplies in FP8
they are rounded as they are, which a float's range is wide enough for.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.initialize import is_attention_module
from torch import nn

from taut_deploy.compress.formats.protocol import LayerFormat, TautFormat
from taut_deploy.compress.quantize.float8 import FP8_MAX, round_fp8
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.recipe import KvCache

# (attention module, query, key, value [B, heads, T, D]) -> what attention computes with instead
_Seen = Callable[..., tuple[torch.Tensor, ...]]
_STRATEGIES = {"tensor": "tensor", "head": "attn_head"}
_LEAST_SCALE = 1e-8
_INT8_MAX = 127
# Of vLLM's own, for tokens of nothing but zeros.
_LEAST_INT8_SCALE = 1e-6


@dataclass(frozen=True)
class AttentionScales:
    """Scales of one attention module, each [1], or [heads, 1, 1] where every head has its own.

    Args:
        key: of keys.
        value: of values.
    """

    key: torch.Tensor
    value: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written, by name inside the attention module."""
        return {"k_scale": self.key, "v_scale": self.value}


def cache_arguments(settings: KvCache | None) -> QuantizationArgs | None:
    """``kv_cache_scheme`` of a checkpoint's ``quantization_config``; None where it has none.

    vLLM refuses one of integers: INT8 is asked for by the worker instead.
    """
    if settings is None or settings.dtype == "int8":
        return None
    return QuantizationArgs(
        num_bits=8,
        type="float",
        symmetric=True,
        strategy=_STRATEGIES[settings.strategy],
        dynamic=False,
    )


def require_suited(model: Any, formats: Iterable[LayerFormat], settings: KvCache) -> None:
    """Refuse models whose cache holds something else, or whose attention cannot be watched.

    Args:
        model: of transformers, its weights not needed.
        formats: of the layers.
        settings: of the recipe.

    Raises:
        RecipeError: says what stands against it.
    """
    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None) is not None:
        raise RecipeError(
            "kv_cache: this model caches one latent vector for keys and values (kv_lora_rank); "
            "leave 'kv_cache' out"
        )
    stored = settings.dtype == "fp8"
    if stored and any(isinstance(one, TautFormat) for one in formats):
        raise RecipeError(
            "kv_cache: goes with the formats of compressed-tensors alone, not with low-rank or "
            "codebook layers; leave 'kv_cache' out"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise RecipeError(
            f"kv_cache: the attention of {type(model).__name__} is not transformers' own, so its "
            "keys and values cannot be seen; leave 'kv_cache' out"
        )
    if stored and not any(map(is_attention_module, model.modules())):
        raise RecipeError(
            f"kv_cache: compressed-tensors finds no attention in {type(model).__name__} (k_proj, "
            "v_proj or qkv_proj) that scales could belong to; leave 'kv_cache' out"
        )


class BlockCache:
    """The KV cache of one decoder block: observed, then emulated and stored.

    Args:
        settings: of the recipe; None leaves attention alone and stores nothing.
        block: the module.
        prefix: its full name.
        dtype: the scales are stored in.
    """

    def __init__(
        self, settings: KvCache | None, block: nn.Module, prefix: str, dtype: torch.dtype
    ) -> None:
        self._settings = settings
        self._names = {module: name for name, module in block.named_modules()}
        self._prefix = prefix
        self._dtype = dtype
        self._lock = Lock()
        self._largest: dict[str, list[torch.Tensor]] = {}
        self.scales: dict[str, AttentionScales] = {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Take scales from every attention that the block computes in the meantime.

        Raises:
            ModelError: there was none, or keys or values are not finite.
        """
        if self._settings is None or self._settings.dtype == "int8":
            yield
            return
        with attention_through(self._account):
            yield
        if not self._largest:
            raise ModelError(f"{self._prefix}: kv_cache: no attention was seen in this block")
        for name, largest in self._largest.items():
            if not all(bool(part.isfinite().all()) for part in largest):
                raise ModelError(
                    f"{self._prefix}.{name}: its keys or values hold NaN or infinity; the model is "
                    "broken"
                )
            scales = (_scale(part, self._settings).to(self._dtype) for part in largest)
            self.scales[name] = AttentionScales(*scales)

    @contextmanager
    def emulated(self) -> Iterator[None]:
        """Let the block compute with keys and values as they come back from the cache."""
        with attention_through(self._through_cache):
            yield

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written, by full name."""
        return {
            f"{self._prefix}.{name}.{key}": value
            for name, found in self.scales.items()
            for key, value in found.tensors().items()
        }

    def _account(self, module: nn.Module, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        name = self._names.get(module)
        if name is None:  # of another block
            return states
        _, *kept = states  # not the queries
        now = [part.abs().amax((0, 2, 3)).float() for part in kept]
        with self._lock:  # batches go side by side
            before = self._largest.get(name, now)
            self._largest[name] = [torch.maximum(a, b) for a, b in zip(before, now, strict=True)]
        return states

    def _through_cache(self, module: nn.Module, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = states
        if self._settings is not None and self._settings.dtype == "int8":
            if module not in self._names:  # of another block
                return states
            return query, cached_int8(key), cached_int8(value)
        found = self.scales.get(self._names.get(module, ""))
        if found is None:
            return states
        return query, cached(key, found.key), cached(value, found.value)


def cached(states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Keys or values as they come back from an FP8 cache.

    Args:
        states: [B, heads, T, D] any float dtype, which the result has too.
        scale: [1] or [heads, 1, 1].
    """
    step = scale.to(states.device, torch.float32)
    return round_fp8(states.float() / step).mul_(step).to(states.dtype)


def cached_int8(states: torch.Tensor) -> torch.Tensor:
    """Keys or values as they come back from vLLM's ``int8_per_token_head`` cache.

    Args:
        states: [B, heads, T, D] any float dtype, which the result has too.
    """
    exact = states.float()
    step = (exact.abs().amax(-1, keepdim=True) / _INT8_MAX).clamp(min=_LEAST_INT8_SCALE)
    return (exact / step).round_().mul_(step).to(states.dtype)


@contextmanager
def attention_through(seen: _Seen) -> Iterator[None]:
    """Show ``seen`` what every attention is about to compute with, and take what it gives back.

    Args:
        seen: called with the attention module and query, key and value [B, heads, T, D]; returns
            those to compute with.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> Any:
        return original(module, *seen(module, query, key, value), *rest, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original


def _scale(largest: torch.Tensor, settings: KvCache) -> torch.Tensor:
    """Scale that puts ``largest`` [heads], with the margin, at the end of the range."""
    spanned = largest.reshape(-1, 1, 1) if settings.strategy == "head" else largest.amax()[None]
    return (spanned * (settings.margin / FP8_MAX)).clamp(min=_LEAST_SCALE)
