"""Two sources asked for the same sequences, one after the other, and compared."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from taut_deploy.validate import metrics
from taut_deploy.validate.divergence import Comparison, Distribution, FullDistribution, compare
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import Progress


class Source(Protocol):
    """A model that can be asked for next-token distributions."""

    role: str

    @property
    def max_positions(self) -> int | None:
        """Longest sequence it takes."""

    def score(self, ids: tuple[int, ...]) -> Distribution:
        """Distributions for ``len(ids) - 1`` positions."""


class Once(Protocol):
    """Hands out a comparison that is known, or the one that ``ask`` gives."""

    def __call__(self, stage: str, at: int, ask: Callable[[], Comparison]) -> Comparison:
        """The comparison at a place of a stage."""


def compare_sources(
    first: Source,
    second: Source,
    sequences: list[tuple[int, ...]],
    stage: str,
    progress: Progress | None,
    keep: Callable[[Comparison], None] | None = None,
    once: Once | None = None,
    begin: int = 0,
) -> Comparison:
    """Score sequences with both sources and compare position by position.

    Args:
        first: takes the baseline's place in the comparison.
        second: takes the candidate's.
        sequences: token ids, equally long.
        stage: told to ``progress``.
        progress: called after each sequence.
        keep: called with the comparison of each sequence.
        once: hands out what an earlier run compared, by stage and place.
        begin: place of the first sequence.

    Returns:
        Arrays [sequences, positions].

    Raises:
        CouldNotValidateError: a source cannot answer, or their vocabularies differ.
    """
    comparisons = []
    for done, ids in enumerate(sequences, start=1):
        ask = partial(compare_sequence, first, second, ids)
        comparisons.append(ask() if once is None else once(stage, begin + done - 1, ask))
        if keep is not None:
            keep(comparisons[-1])
        if progress is not None:
            progress(stage, done, len(sequences))
    return metrics.stack(comparisons)


def compare_sequence(first: Source, second: Source, ids: tuple[int, ...]) -> Comparison:
    """Score one sequence with both sources and compare position by position.

    Args:
        first: takes the baseline's place.
        second: takes the candidate's.
        ids: token ids.

    Raises:
        CouldNotValidateError: a source cannot answer, or their vocabularies differ.
    """
    left, right = first.score(ids), second.score(ids)
    check_vocabulary(left, right)
    return compare(left, right, torch.tensor(ids[1:]))


def check_vocabulary(left: Distribution, right: Distribution) -> None:
    """Refuse distributions over vocabularies of different sizes.

    Raises:
        CouldNotValidateError: they differ.
    """
    if isinstance(left, FullDistribution) and isinstance(right, FullDistribution):
        sizes = left.logits.shape[-1], right.logits.shape[-1]
        if sizes[0] != sizes[1]:
            raise CouldNotValidateError(
                f"the vocabularies differ: {sizes[0]} in the baseline, {sizes[1]} in the candidate"
            )
