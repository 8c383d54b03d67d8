"""Products, cache write and decode attention that start early: what they touch before they wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import triton
from emulator import ptx_paths
from triton.backends.compiler import GPUTarget

from taut_bench.instruments import aot
from taut_bench.instruments.forms import attention, scaled_mm, w4a16
from taut_bench.instruments.recorder import KernelVariant

WEIGHTS = {"qweight_ptr", "scales_ptr", "zeros_ptr", "w_desc"}
READS = ("ld.", "cp.async.")
Touched = set[tuple[str, frozenset[str]]]


def _variants() -> Iterator[KernelVariant]:
    yield from w4a16.kernel_variants()
    yield from scaled_mm.kernel_variants()
    yield from attention.decode_variants()
    yield from attention.cache_write_variants()


def _name(variant: KernelVariant) -> str:
    name: str = variant.kernel._fn_name.rpartition(".")[2]
    return name


def _early_forms() -> list[KernelVariant]:
    """Return one form of each kernel that starts early, with zeros where it may."""
    found: dict[tuple[Any, ...], KernelVariant] = {}
    for variant in _variants():
        constants = variant.constants
        early = variant.options.get("launch_pdl") or constants.get("EARLY")
        if not early or variant.target != "sm_90":
            continue
        split = constants.get("SPLIT_K", 1) > 1 or constants.get("SPLIT", False)
        cut = constants.get("HAS_ZEROS", False), split, bool(constants.get("AHEAD", 0))
        found.setdefault((_name(variant), constants.get("BLOCK_B", 0), *cut), variant)
    every: dict[str, KernelVariant] = {}
    for (kernel, *_), variant in sorted(found.items(), key=lambda item: str(item[0])):
        every[kernel] = variant  # the last: as many operands as it may have
    return list(every.values())


EARLY_FORMS = _early_forms()


def _touched(variant: KernelVariant) -> tuple[Touched, bool]:
    """Return instructions with the arguments their addresses come from, and whether one may end."""
    target = GPUTarget("cuda", 90, 32)
    compiled: Any = triton.compile(aot.source_of(variant), target=target, options=variant.options)
    early = ptx_paths.before_the_wait(compiled.asm["ptx"])
    names: list[str] = []
    for name in variant.kernel.arg_names:
        if name in variant.descriptors:
            # A descriptor comes with a size and a stride of each axis.
            rank = variant.descriptors[name].partition("]")[0].count(",") + 1
            names += [name, *[""] * (2 * rank)]
        elif name not in variant.constants:
            names.append(name)
    memory = ("_ptr", "_desc")
    return {
        (op, frozenset(names[i] for i in of if i < len(names) and names[i].endswith(memory)))
        for op, of in early.touched
    }, early.ends


def test_every_kernel_that_starts_early_is_looked_at() -> None:
    kernels = {_name(variant) for variant in EARLY_FORMS}
    w4a16 = {"w4a16_decode_kernel", "w4a16_decode_ring_kernel", "reorder_kernel"}
    wgmma = {"w4a16_wgmma_kernel", "w4a16_wgmma_ring_kernel", "w4a16_wgmma_tma_kernel"}
    rings = {"scaled_mm_kernel", "scaled_mm_pairs_kernel", "fp8_block_pairs_kernel"}
    others = {"cache_write_kernel", "paged_decode_kernel"}
    assert kernels == w4a16 | wgmma | rings | others


@pytest.mark.parametrize("variant", EARLY_FORMS, ids=lambda variant: variant.label)
def test_before_the_wait_weights_alone_are_read(variant: KernelVariant) -> None:
    touched, ends = _touched(variant)
    if _name(variant) != "w4a16_wgmma_tma_kernel":  # of which some warps do nothing, and end
        assert not ends
    for op, of in touched:
        if op.startswith("prefetch."):
            # Into L2 alone: no value is read.
            assert of <= WEIGHTS | {"w_ptr", "w_scale_ptr"}
        else:
            assert op.startswith(READS)
            assert of, f"{op} of what?"
            assert of <= WEIGHTS
    if "qweight_ptr" in variant.pointers or "w_desc" in variant.descriptors:
        assert touched
