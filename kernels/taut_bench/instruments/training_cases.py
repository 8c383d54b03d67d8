"""The fused training ops by name, with inputs drawn for given sizes; each can run its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from taut_kernels.activation.swiglu import silu, swiglu, swiglu_packed
from taut_kernels.loss.softmax import softmax
from taut_kernels.norm.layer_norm import layer_norm
from taut_kernels.norm.rms_norm_train import add_rms_norm_train, rms_norm_train
from taut_kernels.rope.train import rope_train

Sizes = Mapping[str, int]
_EPSILON = 1e-5
_POSITIONS = 8192
_GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def _rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> Any:
    if residual is None:
        return rms_norm_train(x, weight, epsilon=_EPSILON)
    return add_rms_norm_train(x, residual, weight, epsilon=_EPSILON)


def _swiglu(gate: Tensor, up: Tensor, gpt_oss: bool) -> Tensor:
    return swiglu(gate, up, **_GPT_OSS) if gpt_oss else swiglu(gate, up)


def _swiglu_packed(x: Tensor, gpt_oss: bool) -> Tensor:
    return swiglu_packed(x, **_GPT_OSS, interleaved=True) if gpt_oss else swiglu_packed(x)


CALLS: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "layer_norm": partial(layer_norm, epsilon=_EPSILON),
    "rms_norm_train": _rms_norm,
    "silu": silu,
    "swiglu": _swiglu,
    "swiglu_packed": _swiglu_packed,
    "rope_train": rope_train,
}
"""Name → the public function."""


def _leaf(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def rows(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw x [M, N], a leaf with gradient."""
    return (_leaf((sizes["M"], sizes["N"]), dtype, device),)


def rows_and_parameters(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw x [M, N], weight and bias [N], leaves."""
    parameters = (_leaf((sizes["N"],), dtype, device) for _ in range(2))
    return *rows(sizes, dtype, device), *parameters


def rows_weight_residual(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw x [M, N] and weight [N], leaves, and a residual [M, N] or None."""
    x, weight, _ = rows_and_parameters(sizes, dtype, device)
    residual = _leaf((sizes["M"], sizes["N"]), dtype, device) if sizes["residual"] else None
    return x, weight, residual


def gate_and_up(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw gate and up [M, N], leaves, and whether the form is that of gpt-oss."""
    gate, up = (_leaf((sizes["M"], sizes["N"]), dtype, device) for _ in range(2))
    return gate, up, bool(sizes["gpt_oss"])


def packed(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw x [M, 2N], a leaf, and whether the form is that of gpt-oss."""
    return _leaf((sizes["M"], 2 * sizes["N"]), dtype, device), bool(sizes["gpt_oss"])


def positions_and_angles(
    sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Draw positions [M] and the table of angles of RoPE."""
    T, D = sizes["M"], sizes["D"]
    angles = torch.arange(_POSITIONS * (D // 2)).view(_POSITIONS, -1) * 1e-3
    cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(device, dtype)
    generator = torch.Generator().manual_seed(T)
    return torch.randint(0, _POSITIONS, (T,), generator=generator).to(device), cache


def heads_and_angles(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw positions [M], q and k [M, heads, D], leaves, and the table of angles."""
    positions, cache = positions_and_angles(sizes, dtype, device)
    T, D = sizes["M"], sizes["D"]
    q, k = (_leaf((T, sizes[heads], D), dtype, device) for heads in ("Hq", "Hk"))
    return positions, q, k, cache


_NORM = {"M": 1024, "N": 4096}
_GATED = {"M": 1024, "N": 14336, "gpt_oss": 0}
Make = Callable[[Sizes, torch.dtype, torch.device], tuple[Any, ...]]
CASES: dict[str, tuple[dict[str, int], Make]] = {
    "softmax": (_NORM, rows),
    "layer_norm": (_NORM, rows_and_parameters),
    "rms_norm_train": (_NORM | {"residual": 0}, rows_weight_residual),
    "silu": ({"M": 1024, "N": 14336}, rows),
    "swiglu": (_GATED, gate_and_up),
    "swiglu_packed": (_GATED, packed),
    "rope_train": ({"M": 1024, "Hq": 32, "Hk": 8, "D": 128}, heads_and_angles),
}
"""Name → every size it knows, with its default, and what draws its operands."""
