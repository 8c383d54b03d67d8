"""Arguments of the primitives' ops, drawn for given sizes; ``version`` is a ladder's rung."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from taut_bench.instruments.errors import InstrumentError
from taut_kernels.primitives import convolution, gemm, pooling, reduction, transposition
from taut_kernels.primitives.conv2d_tiles import VERSIONS as CONV2D_VERSIONS
from taut_kernels.primitives.gemm_tiles import VERSIONS as GEMM_VERSIONS
from taut_kernels.primitives.reduce_tiles import VERSIONS as REDUCE_VERSIONS
from taut_kernels.primitives.transpose_tiles import VERSIONS as TRANSPOSE_VERSIONS

Sizes = Mapping[str, int]
# Importing an op's module registers it.
_REGISTERING = (convolution, gemm, pooling, reduction, transposition)


def _draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _rung(sizes: Sizes, known: tuple[str, ...]) -> str:
    version = f"v{sizes['version']}"
    if version not in known:
        numbers = ", ".join(name.removeprefix("v") for name in known)
        raise InstrumentError(f"--shape version={sizes['version']}: the rungs are {numbers}")
    return version


def matmul(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw a [M, K] and b [K, N], the transpose of a layer's weight; a bias [N] where it is 1."""
    M, N, K = sizes["M"], sizes["N"], sizes["K"]
    version = _rung(sizes, GEMM_VERSIONS)
    if sizes["bias"] and version != "v4":
        raise InstrumentError(f"--shape bias=1: needs version=4, got {sizes['version']}")
    if version in ("v3", "v4"):
        gemm.check_copy_engine(version, device, "v2")
    bias = _draw((N,), dtype, device) if sizes["bias"] else None
    return _draw((M, K), dtype, device), _draw((N, K), dtype, device).t(), bias, "none", version


def transpose(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw x [M, N]."""
    version = _rung(sizes, TRANSPOSE_VERSIONS)
    if version == "v5":
        gemm.check_copy_engine(version, device, "v4")
    return _draw((sizes["M"], sizes["N"]), dtype, device), version


def _image(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    shape = (sizes["B"], sizes["C"], sizes["side"], sizes["side"])
    return _draw(shape, dtype, device).to(memory_format=torch.channels_last)


def conv2d(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw an image [B, C, side, side] and weights [N, C, 3, 3], channels_last, padding 1."""
    x = _image(sizes, dtype, device)
    weight = _draw((sizes["N"], sizes["C"], 3, 3), dtype, device)
    weight = weight.to(memory_format=torch.channels_last)
    sizes_of_window = ((1, 1), (1, 1), (1, 1))
    version = "v1" if sizes["C"] % 8 or sizes["N"] % 8 else "v2"
    if sizes["version"]:
        asked = _rung(sizes, CONV2D_VERSIONS)
        if asked == "v2" != version:
            raise InstrumentError("--shape version=2: C and N must be multiples of 8")
        version = asked
    if version == "v2":
        gemm.check_copy_engine(version, device, "v1")
    return x, weight, None, *sizes_of_window, version


def max_pool2d(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw an image [B, C, side, side], channels_last; windows of 3, stride 2, padding 1."""
    return _image(sizes, dtype, device), (3, 3), (2, 2), (1, 1)


def avg_pool2d(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw an image [B, C, side, side], channels_last; windows of 2, stride 2."""
    return _image(sizes, dtype, device), (2, 2), (2, 2), (0, 0), True


def reduce(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw x [M, N], summed along N."""
    version = _rung(sizes, REDUCE_VERSIONS)
    return _draw((sizes["M"], sizes["N"]), dtype, device), "sum", 1, False, version
