"""`taut::w4a16_gemm` on awkward values: zeros, outliers, extreme weights, subnormal scales.

The kernels in Gluon run on NumPy, every kernel behind the op on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from emulator import gluon
from emulator import wgmma as emulator_wgmma

from taut_bench import testing
from taut_kernels.gemm.w4a16 import decode_ring as w4a16_decode_ring
from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import op as w4a16  # noqa: F401 (registers what is called below)
from taut_kernels.gemm.w4a16 import ring as w4a16_wgmma_ring
from taut_kernels.gemm.w4a16 import tma as w4a16_wgmma_tma
from taut_kernels.gemm.w4a16.decode_ring_kernel import w4a16_decode_ring_kernel
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.ring_kernel import w4a16_wgmma_ring_kernel
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.tma_kernel import w4a16_wgmma_tma_kernel
from taut_kernels.launch import launcher

Edit = Callable[[testing.W4A16Case], testing.W4A16Case]


def _activations(change: Callable[[torch.Tensor], object]) -> Edit:
    def edit(case: testing.W4A16Case) -> testing.W4A16Case:
        change(case.x)
        return case

    return edit


def _extreme_weights(case: testing.W4A16Case) -> testing.W4A16Case:
    """Weights furthest from their zero points, in both directions: 15 steps."""
    values, zeros = torch.full_like(case.values, -8), None
    values[1::2] = 7
    if case.zeros is not None:
        zeros = torch.full_like(case.zeros, 7)
        zeros[1::2] = -8
    return dataclasses.replace(
        case,
        values=values,
        zeros=zeros,
        weight_packed=formats.pack_weight(values),
        weight_zero_point=None if zeros is None else formats.pack_zero_point(zeros),
    )


def _smallest_activations(case: testing.W4A16Case) -> testing.W4A16Case:
    case.x.fill_(torch.finfo(case.x.dtype).smallest_normal / 4)
    return case


def _subnormal_scales(case: testing.W4A16Case) -> testing.W4A16Case:
    case.weight_scale.fill_(torch.finfo(case.weight_scale.dtype).smallest_normal / 4)
    return case


ZEROS = {
    "zeros": _activations(lambda x: x.zero_()),
    "minus zeros": _activations(lambda x: x.fill_(-0.0)),
}
EDITS = ZEROS | {
    "one column of outliers": _activations(lambda x: x[:, 5].fill_(20000.0)),
    "one token of outliers": _activations(lambda x: x[0].mul_(3000.0)),
    "smallest activations": _smallest_activations,
    "extreme weights": _extreme_weights,
    "subnormal scales": _subnormal_scales,
}
RINGS = {
    "decode ring": RingTile(1, 4, 2, 3, 4),
    "wgmma ring": WgmmaRingTile(32, 2, 1, 4, 2, 4, parts=4, running=1),
    "wgmma by TMA": WgmmaRingTile(32, 1, 2, 2, 3, 4, parts=2, running=2, tma=True),
}


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = gluon.OnNumPy(
        w4a16_decode_ring_kernel, lambda body, grid, named: gluon.run(body, grid[:2], named)
    )
    wgmma = gluon.OnNumPy(w4a16_wgmma_ring_kernel, emulator_wgmma.run)
    fed = gluon.OnNumPy(w4a16_wgmma_tma_kernel, emulator_wgmma.run_fed)
    monkeypatch.setattr(w4a16_decode_ring, "_KERNEL", launcher.Launcher(ring))
    monkeypatch.setattr(w4a16_wgmma_ring, "_KERNEL", launcher.Launcher(wgmma))
    monkeypatch.setattr(w4a16_wgmma_tma, "_KERNEL", launcher.Launcher(fed))


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("tile", RINGS)
def test_rings_on_numpy(tile: str, edit: str) -> None:
    dtype = torch.float16
    case = EDITS[edit](testing.make_w4a16_case(19, 144, 576, 64, dtype=dtype, asymmetric=True))
    operands = case.operands()
    with testing.nan_poison():
        actual = w4a16_launch.launch(RINGS[tile], *operands)
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert edit not in ZEROS or not actual.any()
    assert not operands[5].any(), "arrivals must be 0 again"


TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("M", TOKENS)
def test_gpu_every_regime(M: int, asymmetric: bool, edit: str) -> None:
    case = EDITS[edit](
        testing.make_w4a16_case(
            M, 4096, 4096, 128, dtype=torch.float16, asymmetric=asymmetric, device="cuda"
        )
    )
    with testing.nan_poison():
        actual = torch.ops.taut.w4a16_gemm(*case.operands())
    testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
    assert edit not in ZEROS or not actual.any()


@pytest.mark.gpu
@pytest.mark.parametrize("M", TOKENS)
def test_gpu_every_regime_in_bf16(M: int) -> None:
    for asymmetric in (False, True):
        drawn = testing.make_w4a16_case(
            M, 4096, 4096, 128, dtype=torch.bfloat16, asymmetric=asymmetric, device="cuda"
        )
        for edit, change in EDITS.items():
            x, weight_scale = drawn.x.clone(), drawn.weight_scale.clone()
            case = change(dataclasses.replace(drawn, x=x, weight_scale=weight_scale))
            with testing.nan_poison():
                actual = torch.ops.taut.w4a16_gemm(*case.operands())
            testing.assert_within_budget(actual, case.gold(), case.rounded_reference())
            assert actual.any() == (edit not in ZEROS), edit
