"""Codebooks against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_inputs import correlated

from taut_deploy.compress.quantize import gptq
from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.compress.share import codebook
from taut_deploy.compress.share.codebook import CodebookSpec, _refit_book, quantize_weight
from taut_deploy.compress.share.kmeans import weighted_kmeans
from taut_deploy.compress.share.learned import BookSpec


def problem(n: int = 16, k: int = 64, tokens: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    x = correlated(tokens, k)
    return weight, x.T @ x / tokens


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((difference @ hessian) * difference).sum())


def test_weighted_means_come_near_the_best_of_all_partitions():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(14, generator=generator).sort().values
    costs = torch.rand(14, generator=generator) + 0.1

    def cost_of(book: torch.Tensor) -> float:
        distance = (values[:, None] - book[None]).square().min(1).values
        return float((costs * distance).sum())

    def means(cuts: tuple[int, ...]) -> torch.Tensor:
        edges = [0, *cuts, 14]
        parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        return torch.stack([(costs[p] * values[p]).sum() / costs[p].sum() for p in parts])

    best = min(cost_of(means(cuts)) for cuts in itertools.combinations(range(1, 14), 3))
    weighted, equal = weighted_kmeans(
        values.expand(2, -1), torch.stack([costs, torch.ones(14)]), entries=4
    )
    assert cost_of(weighted) <= 1.3 * best
    assert cost_of(equal) > cost_of(weighted), "costs must matter"


def test_blocks_of_rows_get_the_books_they_get_alone():
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(6, 200, generator=generator) * torch.arange(1, 7)[:, None]
    costs = torch.rand(6, 200, generator=generator)
    together = weighted_kmeans(values, costs, entries=8)
    alone = [
        weighted_kmeans(v[None], c[None], entries=8)[0] for v, c in zip(values, costs, strict=True)
    ]
    assert torch.equal(together, torch.stack(alone))


def test_values_of_no_cost_and_fewer_values_than_entries_leave_finite_rising_books():
    for values in (torch.zeros(2, 16), torch.tensor([[1.0, -1.0, 0.5]])):
        for costs in (torch.zeros_like(values), torch.ones_like(values)):
            book = weighted_kmeans(values, costs, entries=8)
            assert bool(book.isfinite().all())
            assert bool((book.diff(dim=1) >= 0).all())


@pytest.mark.parametrize(("n", "shared"), [(16, 8), (136, 34)])
def test_a_refitted_book_is_where_the_error_has_no_slope(n, shared):
    weight, hessian = problem(n)
    spec = CodebookSpec(8, 32, shared, torch.float32)
    coded = quantize_weight(weight, hessian, gptq.feedback_of(hessian), spec, refits=0)
    book = _refit_book(weight, hessian, coded).double().requires_grad_()
    rows = book.repeat_interleave(shared, 0)
    dense = rows.gather(1, coded.codes.long()).view(n, 2, 32) * coded.scale.double()[..., None]
    difference = dense.view(n, 64) - weight.double()
    error = ((difference @ hessian.double()) * difference).sum()
    (slope,) = torch.autograd.grad(error, book)
    assert float(slope.abs().max()) < 1e-2 * float((weight @ hessian).abs().sum())
    assert float(error.detach()) <= output_error(coded.dequantize() - weight, hessian) * (1 + 1e-4)


@pytest.mark.parametrize("rows", [None, 4])
def test_sixteen_entries_beat_sixteen_even_steps_of_the_same_groups(rows):
    # Weights of many small and few large values, as trained ones are.
    weight, hessian = problem()
    weight = weight * weight.abs()
    spec = CodebookSpec(16, 64, rows, torch.bfloat16)
    coded = quantize_weight(weight, hessian, gptq.feedback_of(hessian), spec)
    even = gptq.quantize_weight(
        weight, gptq.feedback_of(hessian), GridSpec(4, 64, True, torch.bfloat16)
    )
    assert output_error(coded.dequantize() - weight, hessian) < output_error(
        even.dequantize() - weight, hessian
    )
    assert int(coded.codes.max()) < 16
    assert bool((coded.book.diff(dim=1) >= 0).all())
    assert coded.book.shape == (1 if rows is None else 4, 16)


def test_groups_of_either_sign_share_one_skewed_book():
    book = torch.tensor([-0.5, -0.125, 0.25, 1.0])
    codes = torch.randint(0, 4, (8, 32), generator=torch.Generator().manual_seed(2))
    codes[:, ::16] = 3
    signs = torch.tensor([[1.0, -2.0]] * 4 + [[-1.0, 0.5]] * 4).repeat_interleave(16, 1)
    _, hessian = problem(8, 32)
    spec = CodebookSpec(4, 16, None, torch.float32)
    coded = quantize_weight(book[codes] * signs, hessian, gptq.feedback_of(hessian), spec)
    torch.testing.assert_close(coded.dequantize(), book[codes] * signs, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_on_a_book_comes_back_exactly():
    book = torch.tensor([-1.0, -0.25, 0.125, 1.0])
    codes = torch.randint(0, 4, (8, 32), generator=torch.Generator().manual_seed(0))
    codes[:, 0] = 3
    _, hessian = problem(8, 32)
    spec = CodebookSpec(4, 32, None, torch.float32)
    coded = quantize_weight(book[codes], hessian, gptq.feedback_of(hessian), spec)
    torch.testing.assert_close(coded.dequantize(), book[codes], rtol=1e-4, atol=1e-4)


def test_a_share_of_a_groups_end_is_the_best_of_those_tried():
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    importance = torch.rand(16, generator=torch.Generator().manual_seed(2))
    groups, costs = weight.view(3, 2, 8), importance.view(2, 8)
    ends = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    books = torch.tensor([[-0.6, -0.2, 0.2, 1.0], [-0.9, -0.1, 0.3, 1.0], [0.0, 0.1, 0.5, 1.0]])
    found = codebook._best_share(weight, importance, ends, books)
    for n, g in itertools.product(range(3), range(2)):
        lost = {}
        for share in codebook._SHARES:
            scale = ends[n, g] * share
            near = (groups[n, g, :, None] - scale * books[n]).square().amin(-1)
            lost[float(scale)] = float((near * costs[g]).sum())
        assert lost[float(found[n, g])] == pytest.approx(min(lost.values()))


@pytest.mark.parametrize("entries", [8, 16])
def test_scales_fitted_with_the_book_lose_less_than_the_groups_ends(
    entries: int, monkeypatch: pytest.MonkeyPatch
):
    weight, _ = problem(64, 256)
    importance = torch.rand(256, generator=torch.Generator().manual_seed(3))
    spec = CodebookSpec(entries, 32, None, torch.bfloat16)

    def lost() -> float:
        scale, book = codebook._fitted(weight, importance, spec)
        groups = weight.view(*scale.shape, -1)
        near = codebook._nearest(groups / scale.float()[..., None], book.float().expand(64, -1))
        error = near * scale.float()[..., None] - groups
        return float((error.square() * importance.view(8, 32)).sum())

    fitted = lost()
    monkeypatch.setattr(codebook, "_SEARCHES", 0)
    assert fitted < 0.97 * lost()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CodebookSpec(17, 32, None, torch.float32), "entries 17"),
        (CodebookSpec(16, 48, None, torch.float32), "group_size 48 does not divide K = 64"),
        (CodebookSpec(16, 64, 5, torch.float32), "rows 5 does not divide N = 16"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(spec, message):
    weight, hessian = problem()
    with pytest.raises(ValueError, match=message):
        quantize_weight(weight, hessian, gptq.feedback_of(hessian), spec)


def test_learned_indices_name_the_nearest_entry_of_the_rows_own_book():
    book = torch.tensor([[-1.0, 0.0, 0.5, 2.0], [-0.25, 0.25, 1.0, 1.5]])
    spec, places = BookSpec(book), torch.randn(6, 8, generator=torch.Generator().manual_seed(11))
    by_hand = [
        [min(range(4), key=lambda e: abs(float(book[n // 3, e] - places[n, k]))) for k in range(8)]
        for n in range(6)
    ]
    assert spec.indices(places).tolist() == by_hand
    nearest = spec.nearest(places)
    assert torch.equal(spec.values_of(spec.indices(places)), nearest)
    scale = torch.ones(6, 2)
    weight = spec.coded(nearest, scale, None)
    assert (weight.codes.tolist(), weight.book.tolist()) == (by_hand, book.tolist())
    # Ends have one neighbour, the others the mean of two distances.
    distances = [[1.0, 0.75, 1.0, 1.5], [0.5, 0.625, 0.625, 0.5]]
    expected = [[distances[n // 3][by_hand[n][k]] for k in range(8)] for n in range(6)]
    assert spec.step_at(nearest).tolist() == expected
