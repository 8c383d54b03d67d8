"""The norms' backward pass with rows in shared memory: tile, what it takes, NumPy, GPU.

Layouts and barriers are Triton's to compile (test_aot.py) and a GPU's to run (marker `gpu`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulator import rows as emulator_rows

from taut_bench import testing
from taut_kernels.launch import launcher
from taut_kernels.norm import ring as norm_ring
from taut_kernels.norm import train_launch as norm_launch
from taut_kernels.norm.layer_norm import layer_norm_backward_ref
from taut_kernels.norm.ring_kernel import norm_backward_ring_kernel
from taut_kernels.norm.rms_norm_train import rms_norm_backward_ref
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tile_options import last_arguments
from taut_kernels.rowwise.training_tiles import NormRingTile

FORMS = ("rms_norm", "add_rms_norm", "layer_norm")
HELD = NormRingTile(8, 0, held=True)
SHARED = NormRingTile(8, 1, held=False)
EPSILON = 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_warps": 4}, "num_warps must be 8, 16 or 32, got 4"),
        ({"late": -1}, r"late must lie in 0\.\.16, got -1"),
    ],
)
def test_tile_refuses_what_the_kernel_cannot_do(change: dict[str, int], message: str) -> None:
    fields: dict[str, Any] = {"num_warps": 16, "late": 0, "held": True}
    with pytest.raises(ValueError, match=message):
        NormRingTile(**fields | change)


def test_tile_knows_what_fits() -> None:
    held, shared = NormRingTile(16, 0, held=True), NormRingTile(16, 0, held=False)
    # A row of 16384 columns is 32 KB a tensor; the weight takes as much, or twice that.
    assert [held.holds_two_rows(16384, 3, size) for size in (0, 2, 4)] == [True] * 3
    assert [shared.holds_two_rows(16384, 3, size) for size in (0, 2, 4)] == [True, True, False]
    assert shared.holds_two_rows(16384, 2, 4)
    # A part of a chunk takes as much as a whole one.
    assert held.holds_two_rows(16400, 2, 2)
    assert not held.holds_two_rows(16400, 3, 2)
    assert [str(tile) for tile in (shared, HELD)] == ["ring/16w/l0", "ring/8w/l0/held"]


Operands = tuple[torch.Tensor, torch.Tensor, Any, Any, Any, torch.Tensor]


def draw(
    form: str, M: int, N: int, weight: torch.dtype | None = torch.bfloat16, device: str = "cpu"
) -> Operands:
    """Draw x, dy, added, weight, mean and rstd; statistics are those of x."""
    generator = torch.Generator().manual_seed(M + N)

    def rows() -> torch.Tensor:
        return torch.randn(M, N, generator=generator).bfloat16().to(device)

    # Neither of variance 1 nor independent: a factor or a term that is left out has to show.
    x = 3 * rows() + 1
    dy = rows() + x / 2
    added = rows() if form == "add_rms_norm" else None
    scale = None
    if weight is not None:
        scale = (torch.randn(N, generator=generator) * 0.2 + 1).to(device, weight)
    return with_statistics(form, x, dy, added, scale)


def with_statistics(
    form: str, x: torch.Tensor, dy: torch.Tensor, added: Any, weight: Any
) -> Operands:
    """Complete operands by the rows' mean and 1 / standard deviation."""
    wide = x.float()
    mean = wide.mean(dim=1) if form == "layer_norm" else None
    wide = wide if mean is None else wide - mean[:, None]
    rstd = torch.rsqrt(wide.square().mean(dim=1) + EPSILON)
    return x, dy, added, weight, mean, rstd


def reference(operands: Operands) -> tuple[torch.Tensor, ...]:
    """Return dx, dw and, of LayerNorm, db."""
    x, dy, added, weight, mean, rstd = operands
    if mean is None:
        return rms_norm_backward_ref(dy, added, x, weight, rstd, True)
    return layer_norm_backward_ref(dy, x, weight, mean, rstd, True, True)


def double(operands: Operands) -> Operands:
    x, dy, added, weight, mean, rstd = (None if one is None else one.double() for one in operands)
    assert x is not None
    assert dy is not None
    assert rstd is not None
    return x, dy, added, weight, mean, rstd


def assert_right(found: tuple[Any, ...], operands: Operands) -> None:
    """Hold gradients to the budget of the references."""
    _, dy, _, weight, _, rstd = operands
    g = dy.float() if weight is None else dy.float() * weight.float()
    term = (g * rstd[:, None]).abs().max().item()
    gold, plain = reference(double(operands)), reference(operands)
    pairs = zip(found, gold, plain, strict=False)
    for i, (one, wanted, rounded) in enumerate(pairs):
        testing.assert_within_budget(one, wanted, rounded, *((term,) if i == 0 else ()))
    assert len([one for one in found if one is not None]) == len(gold)


def run_on_numpy(
    operands: Operands, tile: NormRingTile, programs: int, *, with_parameters: bool = True
) -> tuple[Any, ...]:
    """Run the kernel's body; return dx and the sums of the parts of dw and db."""
    x = operands[0]
    M, N = x.shape
    dx = torch.full((M, N), float("nan"), dtype=x.dtype)
    centred = operands[4] is not None
    parts = [
        torch.full((programs, N), float("nan")) if with_parameters and wanted else None
        for wanted in (True, centred)
    ]
    names = norm_backward_ring_kernel.arg_names
    numbers = (M, N, N, N)
    constants = norm_ring.launch_constants(tile, operands)
    emulator_rows.run(
        norm_backward_ring_kernel,
        programs,
        dict(zip(names, (*operands, dx, *parts, *numbers), strict=False)),
        last_arguments(norm_backward_ring_kernel, constants),
    )
    like = x if operands[3] is None else operands[3]
    return dx, *(None if part is None else part.sum(dim=0).to(like.dtype) for part in parts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tile", "M", "N", "programs"),
    [
        (HELD, 7, 4096, 2),  # chunks come out even, programs have unequal rows
        (HELD, 1, 2064, 1),  # fewer rows than the ring has
        (HELD, 3, 6160, 3),  # a program of one row
        (SHARED, 7, 4112, 2),  # the late chunk is a part of one
        (SHARED, 9, 2064, 1),  # places come round four times
        (NormRingTile(16, 2, held=True), 4, 12304, 2),  # the residual's tile
        (NormRingTile(8, 2, held=True), 5, 6160, 2),  # half of a row is asked for late
        (NormRingTile(8, 1, held=True), 5, 8192, 2),  # three chunks early
        (NormRingTile(8, 9, held=False), 5, 4096, 1),  # the whole row is asked for late
    ],
)
def test_kernel_on_numpy_matches_reference(
    form: str, tile: NormRingTile, M: int, N: int, programs: int
) -> None:
    operands = draw(form, M, N)
    assert_right(run_on_numpy(operands, tile, programs), operands)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [HELD, SHARED])
@pytest.mark.parametrize("weight", [torch.float32, None])
def test_other_weights(form: str, tile: NormRingTile, weight: torch.dtype | None) -> None:
    operands = draw(form, 3, 2064, weight)
    assert_right(run_on_numpy(operands, tile, 2), operands)


def test_weight_gradient_is_left_out_where_nobody_wants_it() -> None:
    operands = draw("layer_norm", 5, 2064)
    dx, dw, db = run_on_numpy(operands, SHARED, 2, with_parameters=False)
    assert dw is None
    assert db is None
    assert torch.equal(dx, run_on_numpy(operands, SHARED, 2)[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [HELD, SHARED])
def test_adversarial_values(form: str, tile: NormRingTile) -> None:
    x, dy, added, weight, _, _ = draw(form, 7, 2064)
    x[0], x[1], x[2] = 0.0, 3.0, 1e-20
    x[3, 700] = 2e3
    dy[4], dy[5] = 0.0, 100.0
    dy[6, 2063] = 1e3
    operands = with_statistics(form, x, dy, added, weight)
    assert_right(run_on_numpy(operands, tile, 2), operands)


def refused(operands: Operands, hopper: pytest.MonkeyPatch) -> str | None:
    hopper.setattr(launcher, "is_hopper", lambda _: True)
    reason = norm_ring.why_not_supported(operands)
    assert reason is None or norm_ring.choose(operands) is None
    return reason


def test_ring_takes_rows_of_16_bits_that_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = draw("add_rms_norm", 16, 16384)
    x, dy, added, *others = operands
    assert "compute capability 9.0" in (norm_ring.why_not_supported(operands) or "")
    assert refused(operands, monkeypatch) is None
    assert norm_ring.choose(operands) is not None
    wide = (x.float(), dy, added, *others)
    assert "of one 16-bit type" in (refused(wide, monkeypatch) or "")
    assert "of one 16-bit type" in (refused((x, dy.half(), added, *others), monkeypatch) or "")
    shifted = torch.zeros(16, 16392, dtype=torch.bfloat16)
    assert "multiples of 16" in (
        refused((x, shifted[:, :16384], added, *others), monkeypatch) or ""
    )
    shifted = torch.zeros(16, 16400, dtype=torch.bfloat16)
    assert refused((x, shifted[:, 16:], added, *others), monkeypatch) is None
    assert "aligned" in (refused((x, shifted[:, 8:-8], added, *others), monkeypatch) or "") or (
        shifted[:, 8:].data_ptr() % 16 == 0
    )


def rule(form: str, N: int, rows: int) -> NormRingTile | None:
    centred, added = form == "layer_norm", form == "add_rms_norm"
    return training_tiles.norm_ring(N, rows, centred=centred, added=added)


def test_ring_is_for_long_rows() -> None:
    for form in FORMS:
        assert [rule(form, N, 62) for N in (8192, 16400, 16376)] == [None] * 3
        assert rule(form, 8208, 62) is not None
    with pytest.raises(ValueError, match="does not hold two rows of 32768 columns"):
        norm_ring.launch_constants(HELD, draw("rms_norm", 1, 32768))


@pytest.mark.parametrize("form", FORMS)
def test_few_rows_go_through_the_ring_only_where_that_was_faster(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "is_hopper", lambda _: True)
    # A CPU counts as two multiprocessors.
    few, many = (norm_ring.choose(draw(form, M, 8208)) for M in (15, 16))
    assert few == rule(form, 8208, 7)
    assert (few is not None) == (form == "rms_norm")
    assert many == rule(form, 8208, 8)
    assert many not in (None, few)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_two_of_the_longest_rows_fit(form: str, weight: torch.dtype) -> None:
    for rows in (0, 8):
        if (tile := rule(form, 16384, rows)) is not None:
            norm_ring.launch_constants(tile, draw(form, 1, 16384, weight))


@pytest.mark.parametrize("form", FORMS)
def test_launcher_gives_the_kernel_what_it_takes(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the whole call, with the kernel's body on NumPy in the launcher's place."""

    def launch(
        _key: Any, grid: Any, pointers: Any, numbers: Any, constants: Any, strides: Any
    ) -> None:
        assert strides == numbers[1:]
        named, options = constants()
        assert options["num_warps"] == named["WARPS"]
        arguments = (*pointers, *numbers)
        names = norm_backward_ring_kernel.arg_names
        assert len(arguments) + len(named) == len(names)
        emulator_rows.run(
            norm_backward_ring_kernel, grid[0], dict(zip(names, arguments, strict=False)), named
        )

    def column_sums(parts: Any, wants: Any) -> tuple[Any, ...]:
        pairs = zip(parts, wants, strict=True)
        return tuple(None if part is None else part.sum(dim=0).to(kind) for part, kind in pairs)

    monkeypatch.setattr(norm_ring, "_launcher", launch)
    monkeypatch.setattr(norm_launch, "column_sums", column_sums)
    monkeypatch.setattr(launcher, "is_hopper", lambda _: True)
    operands = draw(form, 17, 8208)
    x, dy, added, weight, mean, rstd = operands
    wants = (weight.dtype, None if mean is None else weight.dtype)
    with testing.nan_poison():
        found = norm_launch.backward(dy, added, x, weight, mean, rstd, wants)
    assert_right(found, operands)


def on_gpu(operands: Operands, tile: NormRingTile | None = None) -> tuple[Any, ...]:
    x, dy, added, weight, mean, rstd = operands
    kind = x.dtype if weight is None else weight.dtype
    wants = (kind, None if mean is None else kind)
    return norm_launch.backward(dy, added, x, weight, mean, rstd, wants, tile)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize(("form", "rows"), [("rms_norm", 0), *((form, 8) for form in FORMS)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "N"), [(1, 16384), (300, 16384), (140, 12304), (63, 8208)])
def test_gpu_matches_reference(form: str, rows: int, M: int, N: int, dtype: torch.dtype) -> None:
    for weight in (dtype, torch.float32, None):
        drawn = draw(form, M, N, weight, device="cuda")
        x, dy, added = (None if one is None else one.to(dtype) for one in drawn[:3])
        operands = with_statistics(form, x, dy, added, drawn[3])  # type: ignore[arg-type]
        tile = rule(form, N, rows)
        with testing.nan_poison():
            found = on_gpu(operands, tile)
        assert_right(found, operands)
        for _ in range(3):
            for one, again in zip(found, on_gpu(operands, tile), strict=True):
                assert one is None or torch.equal(one, again)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "tile",
    [
        NormRingTile(16, 3, held=True),
        NormRingTile(16, 0, held=True),
        NormRingTile(32, 1, held=True),
        NormRingTile(8, 4, held=True),
    ],
)
def test_gpu_every_kind_of_tile(form: str, tile: NormRingTile) -> None:
    operands = draw(form, 300, 12304, device="cuda")
    assert_right(on_gpu(operands, tile), operands)


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_rows_far_apart() -> None:
    memory = torch.empty(2**31 + 2**15, dtype=torch.bfloat16, device="cuda")
    x, dy = draw("rms_norm", 3, 16384, device="cuda")[:2]
    far = memory.as_strided((3, 16384), (2**30, 1))
    far.copy_(x)
    operands = with_statistics("rms_norm", far, dy, None, None)
    assert norm_ring.choose(operands) is not None
    found = on_gpu(operands)
    for one, wanted in zip(found, on_gpu((x, *operands[1:])), strict=True):
        assert one is None or torch.equal(one, wanted)
