"""Run by test_attention.py with TRITON_INTERPRET=1: jit kernels on CPU tensors, fp16.

In its own process, since Triton reads the variable when it is imported.
"""

import itertools
import sys
from unittest import mock

import torch

from taut_bench import testing
from taut_bench.testing import assert_within_budget
from taut_kernels.attention import reference as attention_reference
from taut_kernels.attention.prefill import op as prefill
from taut_kernels.attention.tile import AttentionTile
from taut_kernels.launch import launcher

TILES = (AttentionTile(16, 16, 4, 1), AttentionTile(32, 16, 4, 1), AttentionTile(16, 32, 4, 1))
# Tq, Tk: one query; a whole block; rests in both; more keys; more queries than keys.
LENGTHS = [(1, 1), (1, 37), (32, 32), (37, 37), (20, 53), (40, 17)]
# causal, window
MASKS = [(False, 0), (True, 0), (True, 1), (True, 9), (True, 40)]


def draw(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def strided(x):
    """The same values with heads before tokens in memory and a gap behind each head."""
    tokens = x.dim() - 3
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), float("nan"), dtype=x.dtype)
    wide = wide.transpose(tokens, tokens + 1).contiguous().transpose(tokens, tokens + 1)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def check(q, k, v, cu_q, cu_k, max_q, max_k, causal, window, tile):
    scale = 0.7 * q.shape[-1] ** -0.5
    settings = prefill.Settings(cu_q, cu_k, max_q, max_k, causal, window, scale)
    with testing.nan_poison():
        o = torch.full_like(q, float("nan")).contiguous()
        lse = torch.full(prefill._lse_shape(q), float("nan"))
        prefill.launch_forward(tile, q, k, v, o, lse, settings)
    reference, reference_lse = attention_reference.attention_ref(q, k, v, *settings)
    doubles = (q.double(), k.double(), v.double())
    gold, gold_lse = attention_reference.attention_ref(*doubles, *settings)
    assert_within_budget(o, gold, reference)
    unseen = gold_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), unseen)
    assert torch.allclose(lse[~unseen].double(), gold_lse[~unseen], atol=1e-3), "lse"
    assert (lse - reference_lse)[~unseen].abs().max().item() < 1e-3 if (~unseen).any() else True

    do = strided(draw(q.shape, 11))
    # On sm_90 backward's programs begin in another order.
    hopper = mock.patch.object(launcher, "is_hopper", lambda _: max_q % 2 == 0)
    with testing.nan_poison(), hopper:
        ours = prefill.launch_backward(tile, tile, do, q, k, v, reference, reference_lse, settings)
    args = (do, q, k, v, reference, reference_lse)
    theirs = attention_reference.attention_backward_ref(*args, *settings)
    # Where a query sees one key, its gradient and the key's are differences of equal terms.
    terms = scale * (do.double() * gold).sum(-1).abs().max() * max(q.abs().max(), k.abs().max())
    gold = attention_reference.attention_backward_ref(
        do.double(), *doubles, gold, gold_lse, *settings
    )
    for found, expected, right, cancelled in zip(
        ours, theirs, gold, (terms, terms, 0), strict=True
    ):
        assert_within_budget(found, right, expected, float(cancelled))


def batches():
    count = 0
    for (lengths, masks), tile in zip(
        itertools.product(LENGTHS, MASKS), itertools.cycle(TILES), strict=False
    ):
        (tq, tk), (causal, window) = lengths, masks
        heads, heads_k, dim = ((4, 2, 64), (2, 2, 96), (3, 1, 64))[count % 3]
        q = strided(draw((2, tq, heads, dim), 1))
        k, v = strided(draw((2, tk, heads_k, dim), 2)), strided(draw((2, tk, heads_k, dim), 3))
        check(q, k, v, None, None, tq, tk, causal, window, tile)
        count += 1
    return count


def packed():
    count = 0
    # An empty sequence, one without queries, one without keys.
    counts = [([5, 0, 33, 0, 7], [5, 0, 40, 9, 0]), ([17], [17]), ([1, 1, 1], [50, 16, 3])]
    for (of_q, of_k), (causal, window) in itertools.product(counts, MASKS):
        cu_q, cu_k = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32)
            for each in (of_q, of_k)
        )
        q = strided(draw((sum(of_q), 4, 64), 1))
        k, v = strided(draw((sum(of_k), 2, 64), 2)), strided(draw((sum(of_k), 2, 64), 3))
        check(q, k, v, cu_q, cu_k, max(of_q), max(of_k), causal, window, TILES[count % 3])
        count += 1
    return count


def wide_heads():
    for dim in (128, 256):
        q, k, v = draw((1, 20, 2, dim), 1), draw((1, 20, 1, dim), 2), draw((1, 20, 1, dim), 3)
        check(q, k, v, None, None, 20, 20, True, 0, TILES[0])
    return 2


def large_scores():
    """Scores far beyond what exp can hold."""
    q, k, v = draw((1, 40, 2, 64), 1) * 40, draw((1, 40, 2, 64), 2) * 40, draw((1, 40, 2, 64), 3)
    o, lse = torch.empty_like(q), torch.empty(1, 2, 40)
    settings = prefill.Settings(None, None, 40, 40, True, 0, 1.0)
    prefill.launch_forward(TILES[0], q, k, v, o, lse, settings)
    gold, gold_lse = attention_reference.attention_ref(
        q.double(), k.double(), v.double(), *settings
    )
    reference, _ = attention_reference.attention_ref(q, k, v, *settings)
    assert_within_budget(o, gold, reference)
    assert torch.allclose(lse.double(), gold_lse, rtol=1e-5)
    return 1


def registered():
    """What the dispatcher calls on a card: the ops' arguments as they come, tiles by the rule."""
    q, k, v = draw((1, 20, 2, 64), 1), draw((1, 33, 1, 64), 2), draw((1, 33, 1, 64), 3)
    settings = (None, None, 20, 33, True, 8, 0.1)
    with testing.nan_poison():
        o, lse = prefill._launch_attention(q, k, v, *settings)
        # A gradient expanded from a scalar.
        do = torch.ones((), dtype=q.dtype).expand(q.shape)
        found = prefill._launch_attention_backward(do, q, k, v, o, lse, *settings)
    reference, reference_lse = attention_reference.attention_ref(q, k, v, *settings)
    doubles = (q.double(), k.double(), v.double())
    gold, gold_lse = attention_reference.attention_ref(*doubles, *settings)
    assert_within_budget(o, gold, reference)
    args = (do, q, k, v, reference, reference_lse)
    theirs = attention_reference.attention_backward_ref(*args, *settings)
    exact = attention_reference.attention_backward_ref(
        do.double(), *doubles, gold, gold_lse, *settings
    )
    for ours, expected, right in zip(found, theirs, exact, strict=True):
        assert_within_budget(ours, right, expected)
    return 1


def main(names):
    torch.set_num_threads(2)
    for name in names:
        print(name, globals()[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
