"""The backward kernels of sm_90: their bodies on NumPy, what they take, and the GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from emulator import hopper

from taut_bench import testing
from taut_kernels.attention import reference
from taut_kernels.attention.prefill import hopper_backward as backward_hopper
from taut_kernels.attention.prefill import op as attention_op  # noqa: F401 (registers what is called below)
from taut_kernels.attention.prefill.call import Settings
from taut_kernels.attention.prefill.hopper_keys_kernel import key_gradients_hopper_kernel
from taut_kernels.attention.prefill.hopper_queries_kernel import query_gradients_hopper_kernel
from taut_kernels.launch import launcher


class OnNumPy:
    """Stands in for a jit kernel: runs it on NumPy."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            named = dict(zip(self.arg_names, arguments, strict=False)) | constants
            hopper.run(self.kernel, grid[0], named)

        return launch


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kernel in (
        ("_key_gradients", key_gradients_hopper_kernel),
        ("_query_gradients", query_gradients_hopper_kernel),
    ):
        monkeypatch.setattr(backward_hopper, name, launcher.Launcher(OnNumPy(kernel)))
    # Divides no number of tiles below: the last turn has programs without one.
    monkeypatch.setattr(launcher, "multiprocessors", lambda _: 7)


def draw(
    *shape: int, seed: int, dtype: torch.dtype = torch.float16, device: str = "cpu"
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(do: Any, q: Any, k: Any, v: Any, settings: Settings, used: tuple[int, int]) -> None:
    """Hold the gradients of the rows in use to the error budget, all of them poisoned before."""
    clean = [x.nan_to_num() for x in (do, q, k, v)]
    o, lse = reference.attention_ref(*clean[1:], *settings)
    delta = (o.float() * clean[0].float()).sum(-1).transpose(-1, -2).contiguous()
    with testing.nan_poison():
        found = backward_hopper.launch(do, q, k, v, lse, delta, settings)
    plain = reference.attention_backward_ref(*clean, o, lse, *settings)
    doubles = [x.double() for x in clean]
    gold_o, gold_lse = reference.attention_ref(*doubles[1:], *settings)
    gold = reference.attention_backward_ref(*doubles, gold_o, gold_lse, *settings)
    for ours, theirs, exact, rows in zip(found, plain, gold, (*used, used[1]), strict=True):
        part = slice(0, rows)
        testing.assert_within_budget(ours[part], exact[part], theirs[part])


def check_batch(
    count_q: int, count_k: int, dim: int, causal: bool, dtype: torch.dtype, device: str
) -> None:
    """Check a batch of two, heads before tokens in memory and a gap behind each head."""
    q, do = (
        draw(2, 4, count_q, dim + 8, seed=seed, dtype=dtype, device=device)
        .transpose(1, 2)[..., :dim]
        for seed in (1, 4)
    )  # fmt: skip
    k, v = (draw(2, count_k, 2, dim, seed=n, dtype=dtype, device=device) for n in (2, 3))
    check(do, q, k, v, Settings(None, None, count_q, count_k, causal, 0, 0.1), (2, 2))


def check_packed(causal: bool, dim: int, device: str) -> None:
    """Check an empty sequence, one without queries, one without keys, and NaN behind the last."""
    of_q, of_k = [70, 0, 150, 0, 40], [70, 0, 200, 30, 0]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
        for each in (of_q, of_k)
    )
    q, do, k, v = (
        draw(tokens, heads, dim, seed=seed, device=device)
        for seed, (tokens, heads) in enumerate(((270, 2), (270, 2), (310, 1), (310, 1)))
    )
    for x, rows in ((q, 260), (do, 260), (k, 300), (v, 300)):
        x[rows:] = float("nan")
    check(do, q, k, v, Settings(cu_q, cu_k, 150, 200, causal, 0, 0.1), (260, 300))


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize(
    ("count_q", "count_k", "dim", "causal", "dtype"),
    [
        (300, 300, 64, True, torch.float16),
        (257, 600, 64, True, torch.bfloat16),
        (700, 130, 64, True, torch.float16),  # queries that see no key, and tiles of them
        (20, 300, 64, True, torch.bfloat16),  # keys that no query sees
        (1, 700, 96, False, torch.float16),
        (300, 130, 128, False, torch.bfloat16),
    ],
)
def test_bodies_on_numpy_are_the_reference(
    count_q: int, count_k: int, dim: int, causal: bool, dtype: torch.dtype
) -> None:
    check_batch(count_q, count_k, dim, causal, dtype, "cpu")


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_on_numpy_do_not_see_each_other(causal: bool) -> None:
    check_packed(causal, 64, "cpu")


@pytest.mark.parametrize(
    ("dim", "gap", "served"), [(128, 0, True), (128, 1, False), (64, 0, False)]
)
def test_takes_heads_of_128_and_gradients_that_tma_reads(
    dim: int, gap: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "is_hopper", lambda _: True)
    q = torch.zeros(2, 8, 2, dim, dtype=torch.float16)
    do = torch.zeros(2, 8, 2, dim + gap, dtype=torch.float16)[..., :dim]
    settings = Settings(None, None, 512, 8, True, 0, 1.0)
    assert backward_hopper.serves(do, q, q, q, settings) == served


def test_takes_no_call_without_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "is_hopper", lambda _: True)
    q = torch.zeros(512, 2, 128, dtype=torch.float16)
    bounds = torch.tensor([0, 512], dtype=torch.int32)
    served = Settings(bounds, bounds, 512, 512, True, 0, 1.0)
    assert backward_hopper.serves(q, q, q, q, served)
    assert not backward_hopper.serves(q, q, q, q, served._replace(max_k=0))
    nothing = served._replace(cu_q=bounds[:1], cu_k=bounds[:1])
    assert not backward_hopper.serves(q, q, q, q, nothing)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_programs_of_many_tiles_give_the_bits_of_one_tile_each(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, do = (
        draw(2, 700, heads, 128, seed=seed, dtype=torch.bfloat16, device="cuda")
        for seed, heads in enumerate((8, 4, 4, 8))
    )
    settings = (None, None, 700, 700, causal, 0, 0.1)
    found = []
    for programs in (1000, 5, 2):
        monkeypatch.setattr(launcher, "multiprocessors", lambda _, count=programs: count)
        o, lse = torch.ops.taut.attention(q, k, v, *settings)
        gradients = torch.ops.taut.attention_backward(do, q, k, v, o, lse, *settings)
        found.append((o, lse, *gradients))
    for few in found[1:]:
        for ours, wanted in zip(few, found[0], strict=True):
            assert torch.equal(ours, wanted)


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [96, 128])
@pytest.mark.parametrize(("count_q", "count_k"), [(300, 300), (257, 1000), (700, 130), (20, 300)])
def test_gpu_runs_the_backward_kernels(count_q: int, count_k: int, dim: int, causal: bool) -> None:
    check_batch(count_q, count_k, dim, causal, torch.bfloat16, "cuda")
    check_packed(causal, dim, "cuda")


@pytest.mark.gpu(capability=(9, 0))
def test_gpu_graph_replays_on_new_inputs() -> None:
    """Descriptors hold addresses: a replay reads what lies there by then."""
    shapes = ((8, 0), (2, 1), (2, 2), (8, 3))
    q, k, v, do = (
        draw(2, 600, heads, 128, seed=seed, dtype=torch.bfloat16, device="cuda")
        for heads, seed in shapes
    )
    settings = (None, None, 600, 600, True, 0, 0.1)

    def both_passes() -> tuple[torch.Tensor, ...]:
        o, lse = torch.ops.taut.attention(q, k, v, *settings)
        return o, lse, *torch.ops.taut.attention_backward(do, q, k, v, o, lse, *settings)

    both_passes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both_passes()
    for x in (q, k, v, do):
        x.copy_(x.flip(1).clone())
    graph.replay()
    for ours, wanted in zip(found, both_passes(), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device, or none")
def test_gpu_runs_where_its_inputs_are() -> None:
    results = []
    for device in ("cuda:0", "cuda:1", "cuda:1"):
        q, k, v, do = (
            draw(1, 600, 4, 128, seed=seed, dtype=torch.bfloat16, device=device)
            for seed in range(4)
        )
        settings = (None, None, 600, 600, True, 0, 0.1)
        o, lse = torch.ops.taut.attention(q, k, v, *settings)
        gradients = torch.ops.taut.attention_backward(do, q, k, v, o, lse, *settings)
        results.append([x.cpu() for x in (o, lse, *gradients)])
    assert torch.cuda.current_device() == 0
    for other in results[1:]:
        for ours, wanted in zip(other, results[0], strict=True):
            assert torch.equal(ours, wanted)
