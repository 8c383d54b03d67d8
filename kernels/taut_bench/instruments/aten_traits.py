"""What the counters have to know about single operations of ATen that their schema does not say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


OVERWRITES = _aten(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ "
    "cauchy_"
)
"""In place, without reading what was there."""
ALLOCATES = _aten("empty empty_strided empty_like new_empty new_empty_strided resize_")
"""Neither read nor write."""
READS_SHAPE_ONLY = _aten(
    "ones_like zeros_like full_like rand_like randn_like randint_like new_zeros new_ones new_full"
)
LOOKUPS = _aten("embedding index_select index gather take _unsafe_index take_along_dim")
"""Read as much of their first operand as they return, and the others whole."""
SCATTERS = _aten("index_put_ scatter_ scatter_add_ index_add_ index_copy_ index_fill_")
"""Write as much as their last operand holds."""
ROWWISE = _aten(
    "_softmax _log_softmax native_layer_norm native_group_norm _softmax_backward_data "
    "_log_softmax_backward_data native_layer_norm_backward _fused_rms_norm "
    "_fused_rms_norm_backward native_batch_norm"
)
"""Softmax and norms that ATen runs as one operation."""
ROWWISE_FLOPS = 5
"""An element, in round figures: maximum or mean, difference, function, sum, product."""
REDUCTIONS = _aten("sum mean amax amin max min norm var")
"""Where torch does not tag them yet (before 2.12)."""
COPIES = _aten("_to_copy copy_ clone fill_ zero_")
"""Tagged as pointwise, but they compute nothing."""


def _attention(args: tuple[Any, ...]) -> int:
    q, k, v = args[:3]
    batch_heads = q.shape[0] * q.shape[1]
    return int(2 * batch_heads * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3]))


def _attention_backward(args: tuple[Any, ...]) -> int:
    # Scores again, then the gradients of v, of the scores, of q and of k.
    q, k, v = args[1:4]
    batch_heads = q.shape[0] * q.shape[1]
    return int(2 * batch_heads * q.shape[2] * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3]))


def _product(args: tuple[Any, ...]) -> int:
    a, b = args[:2]
    return int(2 * a.numel() * (b.shape[1] if b.dim() == 2 else 1))


_SDPA = "aten::_scaled_dot_product_"
FLOPS: dict[str, Callable[[tuple[Any, ...]], int]] = {
    # torch's own formulas refuse fewer heads of keys than of queries.
    f"{_SDPA}flash_attention": _attention,
    f"{_SDPA}efficient_attention": _attention,
    f"{_SDPA}cudnn_attention": _attention,
    f"{_SDPA}flash_attention_backward": _attention_backward,
    f"{_SDPA}efficient_attention_backward": _attention_backward,
    f"{_SDPA}cudnn_attention_backward": _attention_backward,
    f"{_SDPA}flash_attention_for_cpu": _attention,
    f"{_SDPA}flash_attention_for_cpu_backward": _attention_backward,
    "aten::_int_mm": _product,
    "aten::mv": _product,
    "aten::dot": lambda args: int(2 * args[0].numel()),
    "aten::vdot": lambda args: int(2 * args[0].numel()),
    "aten::_weight_int4pack_mm_for_cpu": lambda args: int(2 * args[0].numel() * args[1].shape[0]),
}
"""FLOPs from the positional arguments, where torch's table has no formula or a narrower one."""
