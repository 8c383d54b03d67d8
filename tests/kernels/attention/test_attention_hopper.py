"""The forward kernel of sm_90: its body on NumPy, what it takes, and the GPU."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from emulator import hopper

from taut_bench import testing
from taut_kernels.attention import reference as attention_reference
from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import padded_dim
from taut_kernels.attention.prefill import hopper as prefill_hopper
from taut_kernels.attention.prefill.call import Settings
from taut_kernels.attention.prefill.hopper_kernel import attention_hopper_kernel
from taut_kernels.attention.prefill.op import attention
from taut_kernels.attention.tile import HopperTile
from taut_kernels.launch import launcher
from tuning.attention_candidates import hopper_candidates

HALVES = partial(torch.zeros, dtype=torch.float16)
SMALL, LARGE = HopperTile(64, 3), HopperTile(128, 2)


class OnNumPy:
    """Stands in for the jit kernel: runs it on NumPy."""

    arg_names = attention_hopper_kernel.arg_names

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            named = dict(zip(self.arg_names, arguments, strict=False)) | constants
            hopper.run(attention_hopper_kernel, grid[0], named)

        return launch


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_hopper, "_forward", launcher.Launcher(OnNumPy()))
    # Divides no number of tiles below: the last turn has programs without one.
    monkeypatch.setattr(launcher, "multiprocessors", lambda _: 7)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(tile: HopperTile, q: Any, k: Any, v: Any, settings: Settings) -> None:
    """Hold the kernel to the error budget, with every output poisoned before."""
    with testing.nan_poison():
        o = launcher.empty(q.shape, dtype=q.dtype, device=q.device)
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        lse = launcher.empty(shape, dtype=torch.float32, device=q.device)
        prefill_hopper.launch(tile, q, k, v, o, lse, settings)
    q, k, v = (x.nan_to_num() for x in (q, k, v))
    reference, _ = attention_reference.attention_ref(q, k, v, *settings)
    gold, gold_lse = attention_reference.attention_ref(
        q.double(), k.double(), v.double(), *settings
    )
    testing.assert_within_budget(o, gold, reference)
    assert torch.allclose(lse.double(), gold_lse, atol=1e-3)


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize(
    ("tile", "count_q", "count_k", "dim", "causal", "dtype"),
    [
        (SMALL, 300, 300, 64, True, torch.float16),
        (LARGE, 257, 600, 64, True, torch.bfloat16),
        (LARGE, 128, 256, 128, True, torch.float16),
        (SMALL, 700, 130, 64, True, torch.bfloat16),  # queries that see no key, and tiles of them
        (HopperTile(64, 2), 20, 300, 64, True, torch.float16),
        (LARGE, 1, 700, 96, False, torch.bfloat16),
        (HopperTile(64, 4), 300, 130, 64, False, torch.float16),
        (HopperTile(64, 2), 129, 65, 256, False, torch.bfloat16),
    ],
)
def test_body_on_numpy_is_the_reference(
    tile: HopperTile, count_q: int, count_k: int, dim: int, causal: bool, dtype: torch.dtype
) -> None:
    # Heads before tokens in memory, and a gap behind each head.
    q = draw(2, 4, count_q, dim + 8, seed=1, dtype=dtype).transpose(1, 2)[..., :dim]
    k, v = (draw(2, count_k, 2, dim, seed=seed, dtype=dtype) for seed in (2, 3))
    check(tile, q, k, v, Settings(None, None, count_q, count_k, causal, 0, 0.1))


def check_packed(tile: HopperTile, causal: bool, dim: int, device: str) -> None:
    """Check an empty sequence, one without queries, one without keys, and NaN behind the last."""
    of_q, of_k = [70, 0, 150, 0, 40], [70, 0, 200, 30, 0]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
        for each in (of_q, of_k)
    )
    q, k, v = (
        draw(tokens, heads, dim, seed=heads).to(device)
        for tokens, heads in ((260, 2), (310, 1), (310, 1))
    )
    k[300:], v[300:] = float("nan"), float("nan")
    check(tile, q, k, v, Settings(cu_q, cu_k, 150, 200, causal, 0, 0.1))


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [SMALL, LARGE])
def test_packed_sequences_on_numpy_do_not_see_each_other(tile: HopperTile, causal: bool) -> None:
    check_packed(tile, causal, 64, "cpu")


def test_a_barrier_nobody_completes_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "PATIENCE", 0.05)
    barrier = hopper.Barriers(1).index(0)
    hopper._initialise(barrier, 2)
    barrier.arrive(1)
    with pytest.raises(RuntimeError, match="deadlock"):
        barrier.wait(0)
    barrier.arrive(1)
    barrier.wait(0)


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"window": 5}, False),
        ({"max_q": 511}, False),
        ({"q": HALVES(2, 0, 4, 64)}, False),
        ({"k": HALVES(1, 8, 2, 64).expand(2, 8, 2, 64)}, False),
        ({"v": HALVES(2, 8, 2, 66)[..., :64]}, False),
        ({"v": HALVES(2, 8, 2, 72)[..., :64]}, True),
        ({"q": HALVES(2 * 8 * 2 * 64 + 1)[1:].view(2, 8, 2, 64)}, False),
    ],
)
def test_takes_what_tma_reads(
    change: dict[str, Any], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {name: HALVES(2, 8, 2, 64) for name in "qkv"} | change
    queries, window = arguments.pop("max_q", 512), arguments.pop("window", 0)
    settings = Settings(None, None, queries, 8, True, window, 1.0)
    assert not prefill_hopper.serves(**arguments, settings=settings)
    monkeypatch.setattr(launcher, "is_hopper", lambda _: True)
    assert prefill_hopper.serves(**arguments, settings=settings) == served


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", list(hopper_candidates()), ids=str)
def test_gpu_runs_every_candidate(tile: HopperTile, causal: bool) -> None:
    check_packed(tile, causal, 128, "cuda")
    q = draw(3, 5, 1000, 128, seed=1, dtype=torch.bfloat16).cuda().transpose(1, 2)
    k, v = (draw(3, 1111, 5, 128, seed=n, dtype=torch.bfloat16).cuda() for n in (2, 3))
    check(tile, q, k, v, Settings(None, None, 1000, 1111, causal, 0, 0.1))


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_gpu_runs_the_other_dimensions_packed(dim: int) -> None:
    check_packed(attention_tiles.forward_hopper(None, padded_dim(dim)), True, dim, "cuda")


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_gpu_computes_what_tma_cannot_read_with_the_plain_kernel(dim: int, causal: bool) -> None:
    q, k, v = (
        draw(2, 600, 2, dim + 1, seed=n, dtype=torch.bfloat16).cuda()[..., :dim] for n in (1, 2, 3)
    )
    settings = Settings(None, None, 600, 600, causal, 0, 0.1)
    assert not prefill_hopper.serves(q, k, v, settings)
    o, lse = torch.ops.taut.attention(q, k, v, *settings)
    reference, _ = attention_reference.attention_ref(q, k, v, *settings)
    gold, gold_lse = attention_reference.attention_ref(
        q.double(), k.double(), v.double(), *settings
    )
    testing.assert_within_budget(o, gold, reference)
    assert torch.allclose(lse.double(), gold_lse, atol=1e-3)


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_long_sequences_repeat_their_bits() -> None:
    q, k, v = (draw(1, 4096, h, 128, seed=h, dtype=torch.bfloat16).cuda() for h in (8, 2, 2))
    first = attention(q, k, v)
    for _ in range(20):
        for found, wanted in zip(attention(q, k, v), first, strict=True):
            assert torch.equal(found, wanted)
