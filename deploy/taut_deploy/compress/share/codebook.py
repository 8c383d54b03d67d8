"""Codebooks: every weight is one of 8 or 16 values that its block of rows shares.

Sources: SqueezeLLM, arXiv:2306.07629, §4.1 (k-means weighted by sensitivity); GPTVQ,
arXiv:2402.15319, §3 (rounding to the book with GPTQ's feedback, then the book refitted in the
Hessian's metric). Values are relative to a scale per group of input channels, so that one book
serves rows of any size.
"""

from dataclasses import dataclass

import torch

from taut_deploy.compress.quantize.gptq import Feedback
from taut_deploy.compress.quantize.scales import row_slices
from taut_deploy.compress.share.kmeans import weighted_kmeans

_LAZY_BLOCK = 128
_SEARCHES = 2
_SHARES = tuple(1.0 - 0.05 * step for step in range(9))
_REFIT_ROWS = 64
"""Rows in memory at a time, ``entries`` copies of each."""


@dataclass(frozen=True)
class CodebookSpec:
    """Shape of a codebook.

    Args:
        entries: values to choose from, 2 to 16.
        group_size: weights per scale along K, or None for one scale per row.
        rows: output rows that share a book, or None for one book per layer.
        stored_dtype: dtype of books and scales.
    """

    entries: int
    group_size: int | None
    rows: int | None
    stored_dtype: torch.dtype

    def require_fit(self, n: int, k: int) -> None:
        """Refuse a layer that groups or row blocks do not divide.

        Raises:
            ValueError: naming the numbers.
        """
        if not 2 <= self.entries <= 16:
            raise ValueError(f"codebook: entries {self.entries} is not between 2 and 16")
        if k % (self.group_size or k):
            raise ValueError(f"codebook: group_size {self.group_size} does not divide K = {k}")
        if n % (self.rows or n):
            raise ValueError(f"codebook: rows {self.rows} does not divide N = {n}")


@dataclass(frozen=True)
class CodebookWeight:
    """Codes with their books.

    Args:
        codes: [N, K] uint8 in ``[0, entries)``.
        book: [B, entries] rising; row ``n`` uses book ``n * B // N``.
        scale: [N, G]; G = K / group_size.
    """

    codes: torch.Tensor
    book: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The weights these codes stand for, [N, K] fp32."""
        from taut_kernels.for_deploy import codebook

        return codebook.dequantise(self.codes, self.scale, self.book)


def quantize_weight(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    feedback: Feedback,
    spec: CodebookSpec,
    *,
    refits: int = 2,
) -> CodebookWeight:
    """Find a book and codes for one layer.

    Args:
        weight: [N, K] fp32.
        hessian: [K, K] fp32, mean of ``x xᵀ`` over calibration tokens.
        feedback: of that Hessian, channels in order of importance.
        spec: shape of the book.
        refits: how often the book is fitted to the codes and the codes chosen anew.

    Returns:
        The codes and books of least output error among all passes.

    Raises:
        ValueError: the spec does not fit the layer.
    """
    n, k = weight.shape
    spec.require_fit(n, k)
    hessian = hessian.clone()
    hessian.diagonal()[feedback.dead] = 1.0
    weight = torch.where(feedback.dead, torch.zeros_like(weight), weight)
    scale, book = _fitted(weight, feedback.importance, spec)
    best: tuple[float, CodebookWeight] | None = None
    for attempt in range(refits + 1):
        codes = _round_with_feedback(weight, feedback, scale, book)
        found = CodebookWeight(codes, book, scale)
        # The book that suits these codes best is also where the next pass begins.
        book = _refit_book(weight, hessian, found).to(spec.stored_dtype)
        fitted = CodebookWeight(codes, book, scale)
        for candidate in (found, fitted):
            difference = weight - candidate.dequantize()
            error = float(((difference @ hessian) * difference).sum())
            if best is None or error < best[0]:
                best = (error, candidate)
        if attempt < refits:
            book = book.sort(1).values
    if best is None:
        raise AssertionError("there is at least one pass")
    return in_rising_order(best[1])


def _fitted(
    weight: torch.Tensor, importance: torch.Tensor, spec: CodebookSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and books that lose least together, each fitted to the other in turn.

    Returns:
        Scales [N, G] and books [B, entries].
    """
    ends = _scales(weight, spec)
    scale, book = ends, _kmeans(weight, importance, ends, spec)
    for _ in range(_SEARCHES):
        books = book.float().repeat_interleave(len(weight) // len(book), 0)
        parts = [
            _best_share(weight[rows], importance, ends[rows], books[rows])
            for rows in row_slices(weight)
        ]
        scale = torch.cat(parts)
        book = _kmeans(weight, importance, scale, spec)
    return scale, book


def _best_share(
    weight: torch.Tensor, importance: torch.Tensor, ends: torch.Tensor, books: torch.Tensor
) -> torch.Tensor:
    """The share of each group's end that loses least to a book, [N, G].

    A group with one far value would spend most of its entries between it and the others. Solving
    for the scale loses less of the weights, and no less of the output.

    Args:
        weight: [N, K].
        importance: [K], of a unit's square of error.
        ends: [N, G], in the stored dtype.
        books: [N, entries] fp32, the rising book of each row.
    """
    groups = weight.view(*ends.shape, -1)
    costs = importance.view(ends.shape[1], -1)
    best, least = ends, torch.full_like(ends, torch.inf, dtype=torch.float32)
    for share in _SHARES:
        scale = (ends.float() * share).to(ends.dtype)
        wide = scale.float()[..., None]
        lost = (_nearest(groups / wide, books) * wide - groups).square_().mul_(costs).sum(-1)
        best, least = torch.where(lost < least, scale, best), torch.minimum(lost, least)
    return best


def _nearest(places: torch.Tensor, books: torch.Tensor) -> torch.Tensor:
    """The nearest entries of each row's rising book to values [N, G, S]."""
    borders = (books[:, 1:] + books[:, :-1]) / 2
    found = torch.searchsorted(borders, places.flatten(1))
    return books.gather(1, found).view(places.shape)


def _scales(weight: torch.Tensor, spec: CodebookSpec) -> torch.Tensor:
    """The value of largest magnitude of each group, [N, G] in the stored dtype; 1 for zeros.

    With its sign: the far end of every group is then the same entry of the book, and none is spent
    on an end that only groups of the other sign would reach.
    """
    n, k = weight.shape
    groups = weight.view(n, k // (spec.group_size or k), -1)
    far = groups.abs().argmax(-1, keepdim=True)
    scale = groups.gather(-1, far)[..., 0].to(spec.stored_dtype)
    return torch.where(scale != 0, scale, torch.ones_like(scale))


def _kmeans(
    weight: torch.Tensor, importance: torch.Tensor, scale: torch.Tensor, spec: CodebookSpec
) -> torch.Tensor:
    """Books of the scaled values of each block of rows, [B, entries]."""
    n, k = weight.shape
    wide = scale.float().repeat_interleave(k // scale.shape[1], 1)
    values = (weight / wide).view(n // (spec.rows or n), -1)
    costs = (importance * wide.square()).view_as(values)
    return weighted_kmeans(values, costs, spec.entries).to(spec.stored_dtype)


def _round_with_feedback(
    weight: torch.Tensor, feedback: Feedback, scale: torch.Tensor, book: torch.Tensor
) -> torch.Tensor:
    """GPTQ's loop with the book as the grid; returns [N, K] uint8."""
    n, k = weight.shape
    factor, order = feedback.factor, feedback.order
    remaining = weight.T[order].contiguous()
    channel_scale = scale.float().T[order // (k // scale.shape[1])]
    rows = book.float().repeat_interleave(n // book.shape[0], 0)
    codes = torch.empty(k, n, dtype=torch.uint8, device=weight.device)
    for start in range(0, k, _LAZY_BLOCK):
        stop = min(start + _LAZY_BLOCK, k)
        block = remaining[start:stop]
        errors = torch.empty_like(block)
        for i in range(stop - start):
            wanted = block[i] / channel_scale[start + i]
            code = (rows - wanted[:, None]).abs_().argmin(1)
            got = rows.gather(1, code[:, None])[:, 0] * channel_scale[start + i]
            errors[i] = (block[i] - got) / factor[start + i, start + i]
            block[i + 1 :].addr_(factor[start + i, start + i + 1 : stop], errors[i], alpha=-1)
            codes[start + i] = code
        remaining[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    restored = torch.empty_like(codes)
    restored[order] = codes
    return restored.T.contiguous()


def _refit_book(weight: torch.Tensor, hessian: torch.Tensor, coded: CodebookWeight) -> torch.Tensor:
    """Least squares for the books with codes and scales fixed, [B, entries] fp32."""
    n, k = weight.shape
    blocks, entries = coded.book.shape
    wide = coded.scale.float().repeat_interleave(k // coded.scale.shape[1], 1)
    normal = torch.zeros(blocks, entries, entries, dtype=torch.float64, device=weight.device)
    target = torch.zeros(blocks, entries, dtype=torch.float64, device=weight.device)
    for start in range(0, n, _REFIT_ROWS):
        # One row at a time would do: rows of one book only add up. [R, E, K]
        rows = slice(start, min(start + _REFIT_ROWS, n))
        each = torch.arange(entries, dtype=torch.uint8, device=weight.device)
        parts = (coded.codes[rows, None] == each[:, None]) * wide[rows, None]
        seen = parts @ hessian
        book = torch.arange(rows.start, rows.stop, device=weight.device) * blocks // n
        normal.index_add_(0, book, (seen @ parts.transpose(1, 2)).double())
        target.index_add_(0, book, (seen @ weight[rows, :, None])[..., 0].double())
    ridge = 1e-6 * normal.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)
    eye = torch.eye(entries, dtype=torch.float64, device=weight.device)
    old = coded.book.double()
    # The ridge pulls towards the old entry, so that one nobody uses keeps its value.
    solved: torch.Tensor = torch.linalg.solve(
        normal + ridge[:, None, None] * eye, target + ridge[:, None] * old
    )
    return solved.float()


def in_rising_order(coded: CodebookWeight) -> CodebookWeight:
    """The same weights with rising books."""
    book, order = coded.book.sort(1)
    rank = order.argsort(1)
    rows = rank.repeat_interleave(coded.codes.shape[0] // book.shape[0], 0)
    return CodebookWeight(rows.gather(1, coded.codes.long()).to(torch.uint8), book, coded.scale)
