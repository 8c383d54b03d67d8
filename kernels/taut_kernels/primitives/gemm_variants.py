"""Forms of the product's rungs compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from taut_kernels.launch.variant import KernelVariant
from taut_kernels.primitives import gemm_tiles
from taut_kernels.primitives.gemm_direct_kernel import gemm_direct_kernel
from taut_kernels.primitives.gemm_specialized_kernel import gemm_specialized_kernel
from taut_kernels.primitives.gemm_tiled_kernel import gemm_tiled_kernel
from taut_kernels.primitives.gemm_tiles import GemmTile
from taut_kernels.primitives.gemm_tma_kernel import gemm_tma_kernel
from taut_kernels.primitives.gemm_tuned_kernel import add_splits_kernel, gemm_tuned_kernel

_STRIDES = ("stride_am", "stride_ak", "stride_bk", "stride_bn")
_SIZES = ("M", "N", "K")
_ADD_BLOCK = 1024
_RULE_SHAPES = ((4096, 4096, 4096), (256, 4096, 4096), (64, 4096, 4096), (1, 4096, 14336))


def _blocks(tile: GemmTile) -> dict[str, int]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}


def _options(tile: GemmTile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _by_pointers(even: bool | None, tile: GemmTile) -> KernelVariant:
    """Describe V1 (``even`` None) or V2, rows of a and columns of ``weight.t()`` contiguous."""
    constants: dict[str, object] = {"stride_ak": 1, "stride_bk": 1, **_blocks(tile)}
    if even is not None:
        constants |= dict.fromkeys(("EVEN_M", "EVEN_N", "EVEN_K"), even)
        constants |= {"GROUP_M": tile.group_m}
    label = "matmul v1" if even is None else f"matmul v2{'' if even else ' masked'}"
    return KernelVariant(
        label=label,
        kernel=gemm_direct_kernel if even is None else gemm_tiled_kernel,
        tile=tile,
        pointers=dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "bf16"),
        integers=(*_SIZES, "stride_am", "stride_bn"),
        divisible_by_16=("K", "N", "stride_am", "stride_bn"),
        constants=constants,
        options=_options(tile),
    )


def _descriptors(tile: GemmTile, b_transposed: bool, parts: int | None) -> dict[str, str]:
    m, n, k = tile.block_m, tile.block_n, tile.block_k
    b = [n, k] if b_transposed else [k, n]
    blocks = {"a_desc": [m, k], "b_desc": b}
    if parts is not None:
        blocks["c_desc"] = [m, n // parts]
    return {name: f"bf16{block}" for name, block in blocks.items()}


def tma_variant(tile: GemmTile, *, b_transposed: bool) -> KernelVariant:
    """Describe V3."""
    constants = {"A_TRANSPOSED": False, "B_TRANSPOSED": b_transposed, "STORE_TMA": True}
    return KernelVariant(
        label=f"matmul v3{' b.t()' if b_transposed else ''}",
        kernel=gemm_tma_kernel,
        tile=tile,
        pointers={"c_ptr": "bf16"},
        integers=_SIZES,
        divisible_by_16=_SIZES,
        constants=constants | {"GROUP_M": tile.group_m} | _blocks(tile),
        descriptors=_descriptors(tile, b_transposed, 2),
        options=_options(tile),
        targets=("sm_90",),
    )


def tuned_variant(tile: GemmTile, *, b_transposed: bool, epilogue: bool = False) -> KernelVariant:
    """Describe V4, with or without bias and SiLU."""
    if tile.specialize:
        return _specialized_variant(tile, b_transposed=b_transposed, epilogue=epilogue)
    split, has_bias = tile.split_k > 1, epilogue and tile.split_k == 1
    constants: dict[str, object] = {"A_TRANSPOSED": False, "B_TRANSPOSED": b_transposed}
    store_tma = tile.store_tma and not split
    constants |= {"STORE_TMA": store_tma, "HAS_BIAS": has_bias}
    constants |= {"ACTIVATION": "silu" if has_bias else "none", "SPLIT_K": tile.split_k}
    constants |= {"PERSISTENT": tile.persistent, "FLATTEN": tile.flatten}
    constants |= {"PARTS": tile.parts, "GROUP_M": tile.group_m}
    constants |= {} if has_bias else {"bias_ptr": None}
    constants |= {} if store_tma else {"c_desc": None}
    marks = f"{' b.t()' if b_transposed else ''}{' bias silu' if has_bias else ''}"
    return KernelVariant(
        label=f"matmul v4{marks}",
        kernel=gemm_tuned_kernel,
        tile=tile,
        pointers={"c_ptr": "fp32" if split else "bf16"}
        | ({"bias_ptr": "bf16"} if has_bias else {}),
        integers=_SIZES,
        divisible_by_16=("N", "K"),
        constants=constants | _blocks(tile),
        descriptors=_descriptors(tile, b_transposed, tile.parts if store_tma else None),
        options=_options(tile),
        targets=("sm_90",),
    )


def _specialized_variant(tile: GemmTile, *, b_transposed: bool, epilogue: bool) -> KernelVariant:
    constants: dict[str, object] = {"A_TRANSPOSED": False, "B_TRANSPOSED": b_transposed}
    constants |= {"STORE_TMA": tile.store_tma, "HAS_BIAS": epilogue, "GROUP_M": tile.group_m}
    constants |= {"ACTIVATION": "silu" if epilogue else "none"}
    constants |= {} if epilogue else {"bias_ptr": None}
    names = ("a_ptr", "b_ptr", "c_ptr", "bias_ptr") if epilogue else ("a_ptr", "b_ptr", "c_ptr")
    return KernelVariant(
        label=f"matmul v4 specialised{' b.t()' if b_transposed else ''}",
        kernel=gemm_specialized_kernel,
        tile=tile,
        pointers=dict.fromkeys(names, "bf16"),
        integers=(*_SIZES, "stride_a", "stride_b"),
        divisible_by_16=("N", "stride_a", "stride_b"),
        constants=constants | _blocks(tile),
        options=_options(tile),
        targets=("sm_90",),
    )


def _add_splits() -> KernelVariant:
    constants = {"HAS_BIAS": True, "ACTIVATION": "gelu", "SPLIT_K": 4, "BLOCK": _ADD_BLOCK}
    return KernelVariant(
        label="matmul add_splits",
        kernel=add_splits_kernel,
        tile=_ADD_BLOCK,
        pointers={"partial_ptr": "fp32", "bias_ptr": "bf16", "c_ptr": "bf16"},
        integers=("size", "N"),
        divisible_by_16=("size", "N"),
        constants=constants,
        options={"num_warps": 4},
    )


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield V1 to V3, V4's tiles of the rule and of every card's table, and the sum of shares."""
    yield _by_pointers(None, gemm_tiles.DIRECT)
    yield _by_pointers(True, gemm_tiles.TILED)
    yield _by_pointers(False, gemm_tiles.TILED)
    yield tma_variant(gemm_tiles.PIPELINED, b_transposed=True)
    tiles = {gemm_tiles.rule(*shape): None for shape in _RULE_SHAPES}
    for table in gemm_tiles.tables().values():
        tiles |= dict.fromkeys(tile for rows in table.buckets.values() for _, tile in rows)
    # A form of the kernel is one for any number of splits above 1.
    for tile in dict.fromkeys(replace(tile, split_k=min(tile.split_k, 2)) for tile in tiles):
        yield tuned_variant(tile, b_transposed=True)
    yield tuned_variant(gemm_tiles.rule(*_RULE_SHAPES[0]), b_transposed=False, epilogue=True)
    yield _add_splits()
