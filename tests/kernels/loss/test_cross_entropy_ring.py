"""The cross entropy that holds rows on chip: tile, what it takes, arithmetic on NumPy, GPU.

Layouts and barriers are Triton's to compile (test_aot.py) and a GPU's to run (marker `gpu`).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
from emulator import rows as emulator_rows
from triton.backends.compiler import GPUTarget

from taut_bench import testing
from taut_bench.instruments import aot
from taut_bench.instruments.forms import loss as loss_forms
from taut_kernels.launch import launcher
from taut_kernels.loss import cross_entropy_ring, row_softmax
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.loss.cross_entropy_ring_kernel import cross_entropy_ring_kernel
from taut_kernels.loss.row_softmax import Objective
from taut_kernels.loss.softmax import softmax
from taut_kernels.loss.tiles import RingTile

ALONE = RingTile(1, 1, 8, 12, 0, 1)
WITH_LAG = RingTile(1, 1, 8, 14, 2, 1)
SHARED = RingTile(2, 1, 8, 12, 2, 1)
FOUR = RingTile(4, 2, 8, 8, 2, 1)
Z_LOSS = 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": 3}, r"parts must be one of \(1, 2, 4, 8\), got 3"),
        ({"units": 3}, "units must be one of"),
        ({"num_warps": 4}, "num_warps must be one of"),
        ({"per_sm": 3}, "per_sm must be one of"),
        ({"slots": 7}, "slots must be even and at least 4, got 7"),
        ({"lag": 1}, "lag must be even and at least 0, got 1"),
        ({"slots": 30}, "slots take 247808 bytes a multiprocessor, there are 233472"),
        ({"per_sm": 2}, "slots take 462848 bytes a multiprocessor"),
    ],
)
def test_tile_refuses_what_the_kernel_cannot_do(change: dict[str, int], message: str) -> None:
    fields: dict[str, Any] = {
        "parts": 2,
        "units": 1,
        "num_warps": 16,
        "slots": 28,
        "lag": 4,
        "per_sm": 1,
    }
    with pytest.raises(ValueError, match=message):
        RingTile(**fields | change)


def test_tile_counts_its_chunks() -> None:
    tile = RingTile(2, 1, 16, 28, 4, 1)
    assert tile.chunk_bytes == 8192
    # 128256 columns are 31.3 chunks, 16 a part; 27 slots are left of the one that is refilled.
    assert (tile.chunks(128256), tile.ahead(128256)) == (16, 7)
    assert [tile.chunks(V) for V in (8, 16384, 16392, 32768)] == [2, 2, 4, 4]
    with pytest.raises(ValueError, match=r"does not hold rows of 256000 columns"):
        cross_entropy_ring.launch_constants(tile, 256000, batched=False)


def run_on_numpy(
    logits: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    tile: RingTile,
    groups: int,
    *,
    grad: torch.Tensor | None = None,
    sequence: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the kernel's body; return losses, lse and gradient, which takes the logits' place."""
    V, M = logits.shape[-1], target.numel()
    grad = logits if grad is None else grad
    losses, lse = torch.full((M,), float("nan")), torch.full((M,), float("nan"))
    T = sequence or M
    pointers: dict[str, Any] = {
        "logits_ptr": logits,
        "grad_ptr": grad,
        "target_ptr": target,
        "scale_ptr": scale,
    }
    pointers |= {"loss_ptr": losses, "lse_ptr": lse}
    cells = torch.zeros(M * tile.parts, dtype=torch.int64)
    emulator_rows.run(
        cross_entropy_ring_kernel,
        tile.parts * min(groups, M),
        pointers
        | {"cells_ptr": cells if tile.parts > 1 else None, "M": M, "T": T}
        | {"stride_b": T * V, "stride_t": V, "stride_gb": T * V, "stride_gt": V}
        | {"ignore_index": -100, "z_loss": Z_LOSS},
        cross_entropy_ring.launch_constants(tile, V, batched=sequence is not None),
    )
    return losses, lse, grad


def assert_equals_reference(
    found: tuple[torch.Tensor, ...],
    logits: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    z_loss: float = Z_LOSS,
) -> None:
    """Hold losses, lse and gradient to the budget; NaN where the reference has it."""
    objective = Objective(z_loss=z_loss)
    gold_grad = torch.empty_like(logits, dtype=torch.float64)
    gold = row_softmax.cross_entropy_ref(
        logits.double(), target, objective, scale.double(), gold_grad
    )
    plain_grad = torch.empty_like(logits)
    plain = row_softmax.cross_entropy_ref(logits, target, objective, scale, plain_grad)
    size = max(1.0, logits.float().nan_to_num(0, 0, 0).abs().max().item())
    for actual, wanted, rounded in zip(
        found, (*gold, gold_grad), (*plain, plain_grad), strict=True
    ):
        assert torch.equal(actual.isnan(), wanted.isnan())
        clean = [x.double().nan_to_num(0, 0, 0) for x in (actual, wanted, rounded)]
        largest = clean[1].abs().max().item()
        rounding = torch.finfo(actual.dtype).eps * largest + 4e-7 * size * max(1.0, largest)
        budget = 2 * (testing.max_error(clean[2], clean[1]) + rounding)
        assert testing.max_error(clean[0], clean[1]) <= budget


def draw(M: int, V: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(M * V)
    logits = (torch.randn(M, V, generator=generator) * 3).bfloat16()
    target = torch.randint(0, V, (M,), generator=generator)
    scale = torch.rand(M, generator=generator) - 0.3  # a row's factor may be negative
    return logits.to(device), target.to(device), scale.to(device)


@pytest.mark.parametrize(
    ("tile", "M", "V", "groups"),
    [
        (ALONE, 5, 12000, 2),  # a partial last chunk
        (ALONE, 3, 16384, 1),  # chunks come out even
        (WITH_LAG, 7, 12000, 3),  # groups with unequal rows
        (WITH_LAG, 1, 2056, 2),  # one row, less than a chunk and a half
        (SHARED, 6, 24008, 2),  # a row is a multiple of 8 alone
        (SHARED, 5, 9000, 1),  # the second part holds a fraction of the first one's
        (SHARED, 2, 8192, 2),  # the second part holds nothing
        (FOUR, 3, 32000, 1),
        (FOUR, 2, 4096, 2),
    ],
)
def test_kernel_on_numpy_matches_reference(tile: RingTile, M: int, V: int, groups: int) -> None:
    logits, target, scale = draw(M, V)
    target[0] = V - 1
    if M > 1:
        target[1] = 0
    found = run_on_numpy(logits.clone(), target, scale, tile, groups)
    assert_equals_reference(found, logits, target, scale)


@pytest.mark.parametrize("tile", [WITH_LAG, SHARED])
def test_ignored_rows_are_zero_and_impossible_targets_nan(tile: RingTile) -> None:
    logits, target, scale = draw(9, 12000)
    target[1], target[4], target[8] = -100, -100, -100
    target[3], target[5] = 12000, -7
    # What is not read cannot matter.
    logits[4] = float("nan")
    found = run_on_numpy(logits.clone(), target, scale, tile, 2)
    assert found[0].isnan().nonzero().flatten().tolist() == [3, 5]
    assert not found[2][[1, 4, 8]].any()
    logits[4] = 0.0
    assert_equals_reference(found, logits, target, scale)


@pytest.mark.parametrize("tile", [WITH_LAG, SHARED])
def test_adversarial_values(tile: RingTile) -> None:
    logits, target, scale = draw(7, 12000)
    logits[0] = float("-inf")
    logits[0, 5000], target[0] = 2.0, 5000
    logits[1] = 0.0
    logits[2] *= 1e4
    logits[3, :8192] = float("-inf")
    target[3] = 9000
    logits[4, 11999] = 1e18
    logits[5, 7] = float("nan")
    logits[6] = -1e18
    found = run_on_numpy(logits.clone(), target, scale, tile, 3)
    assert_equals_reference(found, logits, target, scale)


def test_batches_of_sequences_out_of_place() -> None:
    # [B, T, V] with a token a sequence more than is used: rows lie T + 1 apart between batches.
    logits, target, scale = draw(8, 12000)
    whole = logits.view(2, 4, 12000)
    M, T, V = 6, 3, 12000
    rows = whole[:, :-1]
    grad = torch.full((M * V,), float("nan"), dtype=torch.bfloat16)
    losses, lse = torch.full((M,), float("nan")), torch.full((M,), float("nan"))
    arguments: dict[str, Any] = {
        "logits_ptr": whole,
        "target_ptr": target[:M].clone(),
        "cells_ptr": None,
    }
    arguments |= {"scale_ptr": scale[:M].clone(), "loss_ptr": losses, "lse_ptr": lse}
    arguments |= {"grad_ptr": grad, "M": M, "T": T, "stride_b": 4 * V, "stride_t": V}
    arguments |= {"stride_gb": T * V, "stride_gt": V, "ignore_index": -100, "z_loss": Z_LOSS}
    before = whole.clone()
    emulator_rows.run(
        cross_entropy_ring_kernel,
        2,
        arguments,
        cross_entropy_ring.launch_constants(WITH_LAG, V, batched=True),
    )
    assert torch.equal(whole, before)
    found = (losses, lse, grad.view(M, V))
    assert_equals_reference(found, rows.reshape(M, V), target[:M], scale[:M])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [ALONE, WITH_LAG, SHARED])
def test_softmax_is_the_gradient_without_a_target(tile: RingTile, dtype: torch.dtype) -> None:
    x = draw(7, 12000)[0].to(dtype)
    x[1, :6000] = float("-inf")
    x[2] = float("-inf")
    # Rows that a mask covers, which fp32 cannot multiply by log2 e, and one large number.
    largest = torch.finfo(dtype).max
    x[3], x[5], x[6, 100] = max(-1e9, -largest), -largest, largest
    x[4, 11] = float("inf")
    y = torch.full_like(x, 7.0)
    pointers: dict[str, Any] = {"logits_ptr": x, "grad_ptr": y}
    pointers |= dict.fromkeys(("target_ptr", "scale_ptr", "loss_ptr", "lse_ptr"))
    cells = torch.zeros(7 * tile.parts, dtype=torch.int64) if tile.parts > 1 else None
    numbers = {"M": 7, "T": 7, "stride_b": 0, "stride_t": 12000, "stride_gb": 0}
    numbers |= {"stride_gt": 12000, "ignore_index": -1, "z_loss": 0}
    emulator_rows.run(
        cross_entropy_ring_kernel,
        tile.parts * 3,
        pointers | {"cells_ptr": cells} | numbers,
        cross_entropy_ring.launch_constants(tile, 12000, batched=False),
    )
    gold = x.double().softmax(1)
    assert y.isnan().all(1).nonzero().flatten().tolist() == [2, 4]
    assert torch.equal(y.isnan(), gold.isnan())
    # Each row by its own largest: masked ones are even, 1/N everywhere.
    error = (y.double() - gold).nan_to_num().abs().amax(1)
    assert (error <= 2**-8 * gold.nan_to_num(1.0).amax(1)).all()


def test_loop_over_rows_carries_every_row_its_own_target() -> None:
    # Triton takes a variable for constant in a loop whose first pass gives it the value it comes in
    # with; NumPy's run of the same Python does not show it.
    variant = next(v for v in loss_forms.kernel_variants() if "ring bf16 V=128256" in v.label)
    compiled: Any = triton.compile(
        aot.source_of(variant), target=GPUTarget("cuda", 90, 32), options=variant.options
    )
    rows = re.search(r"scf\.for [^\n]*iter_args\(([^)]*)\) -> \(([^)]*)\)", compiled.asm["ttgir"])
    assert rows is not None
    # int64: targets of the row to be asked for, of this row and of the one before.
    assert rows[2].split(", ").count("i64") == 3, rows[1]


def reason(
    logits: torch.Tensor, *, backward_only: bool = False, gradient: bool = True, **options: bool
) -> str | None:
    grad = torch.empty(logits.shape, dtype=logits.dtype) if gradient else None
    known = {"smoothed": False, "softcapped": False} | options
    return cross_entropy_ring.why_not_supported(logits, grad, given=backward_only, **known)


def test_says_why_it_does_not_take_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(4, 32000, dtype=torch.bfloat16)
    assert reason(logits) == "the ring needs the shared memory of compute capability 9.0"
    monkeypatch.setattr(launcher, "is_hopper", lambda device: True)
    assert reason(logits) is None
    assert reason(torch.zeros(2, 3, 32000, dtype=torch.bfloat16)[:, :-1]) is None
    for found, words in (
        (reason(logits, gradient=False), "one pass"),
        (reason(logits, backward_only=True), "one pass"),
        (reason(logits, smoothed=True), "label smoothing"),
        (reason(logits, softcapped=True), "soft caps"),
        (reason(logits.float()), "must be bfloat16, got torch.float32"),
        (reason(logits[:, :1024]), "1024 columns are too short"),
        (reason(logits[:, :31008]), None),
        (reason(logits[:, 4:31012]), "16-byte aligned"),
        (reason(torch.zeros(4, 32008, dtype=torch.bfloat16)[:, :32000]), "16-byte aligned"),
        (reason(logits.t().contiguous().t()), "rows must be contiguous"),
    ):
        assert found is None if words is None else words in (found or "")


@pytest.mark.parametrize(
    ("M", "V", "parts"),
    [
        (1584, 32000, 1),
        (1583, 32000, None),
        (1056, 50304, 1),
        (1055, 50304, None),
        (528, 128256, 2),
        (527, 128256, None),
        (132, 256000, 4),
        (131, 256000, None),
        (8192, 10**7, None),
    ],
)
def test_few_rows_and_endless_ones_are_the_other_kernels(
    M: int, V: int, parts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "multiprocessors", lambda device: 132)
    tile = cross_entropy_ring.choose(torch.empty(M, V, dtype=torch.bfloat16, device="meta"))
    assert (tile and tile.parts) == parts


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.zeros(24, 65536, dtype=torch.bfloat16), True),
        (torch.zeros(24, 65536, dtype=torch.float16), True),
        (torch.zeros(24, 65536), False),
        (torch.zeros(24, 65552, dtype=torch.float16)[:, 4:65540], False),
        (torch.zeros(1, 65536, dtype=torch.bfloat16), False),
        (torch.zeros(24, 16384, dtype=torch.bfloat16), False),
        (torch.zeros(24, 16384, dtype=torch.float16), False),
        (torch.zeros(24, 24576, dtype=torch.bfloat16), True),
        (torch.zeros(24, 32768, dtype=torch.bfloat16), False),
        (torch.zeros(24, 32768, dtype=torch.float16), True),
        (torch.zeros(24, 49152, dtype=torch.bfloat16), True),
    ],
)
def test_softmax_takes_long_rows_of_16_bits(
    x: torch.Tensor, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cross_entropy_ring.choose_softmax(x) is None
    monkeypatch.setattr(launcher, "is_hopper", lambda device: True)
    assert (cross_entropy_ring.choose_softmax(x) is not None) == taken


def test_launch_takes_the_ring_where_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target, scale = draw(24, 16384)  # twelve rows for each of two multiprocessors
    taken: list[tuple[int, ...]] = []

    def ring(tile: RingTile, z: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append((tile.parts, *z.shape))
        return scale, scale

    def blocks(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return target, target

    monkeypatch.setattr(launcher, "is_hopper", lambda device: True)
    monkeypatch.setattr(cross_entropy_ring, "launch", ring)
    monkeypatch.setattr(row_softmax, "_launch_blocks", blocks)
    for objective, rows, expected in (
        (Objective(z_loss=0.1), logits, scale),
        (Objective(label_smoothing=0.1), logits, target),
        (Objective(softcap=5.0), logits, target),
        (Objective(), logits[:, :8192], target),
        (Objective(), logits[:23], target),
    ):
        found, _ = row_softmax.launch(rows, target, objective, scale, torch.empty_like(rows))
        assert found is expected
    assert taken == [(1, 24, 16384)]


def on_gpu(
    tile: RingTile, logits: torch.Tensor, target: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad = logits.clone()
    losses, lse = cross_entropy_ring.launch(tile, grad, target, scale, grad, -100, Z_LOSS)
    return losses, lse, grad


GPU_TILES = [
    (32000, RingTile(1, 1, 16, 28, 0, 1)),
    (32000, RingTile(1, 2, 8, 14, 2, 2)),
    (128256, RingTile(2, 1, 16, 28, 4, 1)),
    (128256, RingTile(4, 2, 8, 14, 2, 2)),
    (256000, RingTile(4, 2, 16, 14, 2, 1)),
]


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("M", [1, 7, 301])
@pytest.mark.parametrize(("V", "tile"), GPU_TILES)
def test_gpu_kernel_matches_reference(V: int, tile: RingTile, M: int) -> None:
    logits, target, scale = draw(M, V, "cuda")
    if M > 1:
        target[1], target[2], target[3], target[4] = -100, V, V - 1, 0
    with testing.nan_poison():
        found = on_gpu(tile, logits, target, scale)
    assert_equals_reference(found, logits, target, scale)
    # The same bits from run to run, and out of place.
    grad = torch.full_like(logits, float("nan"))
    again = cross_entropy_ring.launch(tile, logits, target, scale, grad, -100, Z_LOSS)
    for first, second in zip(found, (*again, grad), strict=True):
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("V", [32000, 128256, 256000])
def test_gpu_agrees_with_the_kernel_that_reads_twice(V: int) -> None:
    logits, target, scale = draw(300, V, "cuda")
    target[::5] = -100
    tile = tiles_loss.ring(launcher.gpu_name(logits.device), V)
    assert tile is not None
    ring, blocks = logits.clone(), logits.clone()
    objective = Objective()
    found = row_softmax.launch(ring, target, objective, scale, ring, tile=tile)
    block = tiles_loss.lookup(None, "cross_entropy", V)
    wanted = row_softmax.launch(blocks, target, objective, scale, blocks, tile=block)
    for actual, expected in zip(found, wanted, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(ring.float(), blocks.float(), rtol=2**-7, atol=1e-12)


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_batches_of_sequences_and_a_captured_graph() -> None:
    logits, target, scale = draw(1026, 32000, "cuda")
    whole = logits.view(2, 513, 32000)
    rows, labels, scale = whole[:, :-1], target[:1024].clone(), scale[:1024].clone()
    tile = RingTile(2, 1, 16, 28, 4, 1)
    grad = torch.empty(1024, 32000, dtype=torch.bfloat16, device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return cross_entropy_ring.launch(tile, rows, labels, scale, grad, -100, Z_LOSS)

    losses, lse = call()
    assert_equals_reference((losses, lse, grad), rows.reshape(1024, 32000), labels, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    first = grad.clone()
    for _ in range(3):
        grad.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(grad, first)
        assert torch.equal(captured[0], losses)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("M", "N"), [(1589, 24576), (1056, 49152), (1056, 65536), (600, 131072), (264, 262144)]
)
def test_gpu_softmax_of_long_rows(M: int, N: int, dtype: torch.dtype) -> None:
    x = draw(M, N, "cuda")[0].to(dtype)
    x[3, 9], x[4] = float("inf"), float("-inf")
    assert cross_entropy_ring.choose_softmax(x) is not None
    y = softmax(x)
    gold, plain = x.double().softmax(1), x.softmax(1)
    assert torch.equal(y.isnan(), gold.isnan())
    clean = [z.double().nan_to_num() for z in (y, gold, plain)]
    rounding = torch.finfo(dtype).eps * clean[1].max().item()
    budget = 2 * (testing.max_error(clean[2], clean[1]) + rounding)
    assert testing.max_error(clean[0], clean[1]) <= budget


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "N"), [(1584, 24576), (1584, 32768), (1056, 65536), (264, 262144)])
def test_gpu_softmax_of_masked_rows_is_even(M: int, N: int, dtype: torch.dtype) -> None:
    x = draw(M, N, "cuda")[0].to(dtype)
    lowest = torch.finfo(dtype).min
    x[5], x[6] = lowest, max(-1e9, lowest)
    even = softmax(x)[5:7].double() * N
    assert (even - 1).abs().max() <= 2**-8
