"""Scales of an 8-bit KV cache: what attention sees of keys and values, and how that is stored.

A cache holds keys after their rotation and values as they are, each divided by a scale and rounded
to FP8 (e4m3); queries have a scale too, for kernels that multiply in FP8. vLLM reads the scales
beside the attention's own weights: ``k_scale``, ``v_scale`` and ``q_scale``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from taut_deploy.compress.quantize.float8 import FP8_MAX, round_fp8
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.recipe import KvCache

# (attention module, query, key, value [B, heads, T, D]) -> what attention computes with instead
_Seen = Callable[..., tuple[torch.Tensor, ...]]
_STRATEGIES = {"tensor": "tensor", "head": "attn_head"}
_LEAST_SCALE = 1e-8


@dataclass(frozen=True)
class AttentionScales:
    """Scales of one attention module, each [1], or [heads, 1, 1] where every head has its own.

    Args:
        query: of queries.
        key: of keys.
        value: of values.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written, by name inside the attention module."""
        return {"q_scale": self.query, "k_scale": self.key, "v_scale": self.value}


def cache_arguments(settings: KvCache | None) -> QuantizationArgs | None:
    """``kv_cache_scheme`` of a checkpoint's ``quantization_config``; None where it has none."""
    if settings is None:
        return None
    return QuantizationArgs(
        num_bits=8,
        type="float",
        symmetric=True,
        strategy=_STRATEGIES[settings.strategy],
        dynamic=False,
    )


def require_suited(model: Any) -> None:
    """Refuse models whose cache holds something else, or whose attention cannot be watched.

    Args:
        model: of transformers, its weights not needed.

    Raises:
        RecipeError: says what stands against it.
    """
    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None) is not None:
        raise RecipeError(
            "kv_cache: this model caches one latent vector for keys and values (kv_lora_rank); "
            "leave 'kv_cache' out"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise RecipeError(
            f"kv_cache: the attention of {type(model).__name__} is not transformers' own, so its "
            "keys and values cannot be seen; leave 'kv_cache' out"
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
        self._largest: dict[str, list[torch.Tensor]] = {}
        self.scales: dict[str, AttentionScales] = {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Take scales from every attention that the block computes in the meantime.

        Raises:
            ModelError: there was none, or keys or values are not finite.
        """
        if self._settings is None:
            yield
            return
        with _attention_through(self._account):
            yield
        if not self._largest:
            raise ModelError(f"{self._prefix}: kv_cache: no attention was seen in this block")
        for name, largest in self._largest.items():
            if not all(bool(part.isfinite().all()) for part in largest):
                raise ModelError(
                    f"{self._prefix}.{name}: its queries, keys or values hold NaN or infinity; the "
                    "model is broken"
                )
            scales = (_scale(part, self._settings).to(self._dtype) for part in largest)
            self.scales[name] = AttentionScales(*scales)

    @contextmanager
    def emulated(self) -> Iterator[None]:
        """Let the block compute with keys and values as they come back from the cache."""
        with _attention_through(self._through_cache):
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
        now = [part.abs().amax((0, 2, 3)).float() for part in states]
        before = self._largest.get(name, now)
        self._largest[name] = [torch.maximum(a, b) for a, b in zip(before, now, strict=True)]
        return states

    def _through_cache(self, module: nn.Module, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = states
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


@contextmanager
def _attention_through(seen: _Seen) -> Iterator[None]:
    """Show ``seen`` what every attention is about to compute with, and take what it gives back."""
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
