"""Choosing by likelihood: which choice a model would continue the prompt with.

All choices of an item are scored from the same token on: the first at which the encodings of
prompt and prompt with choice part. A space at the end of the prompt belongs to the choices, since
most tokenizers join it to the word that follows. Beside the sum of log-probabilities, the sum over
the choice's bytes decides: long choices are unlikely by their length alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from taut_deploy.validate.divergence import Distribution, Floats, token_logprobs
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.text import Tokenizer


class Scorer(Protocol):
    """A model that gives next-token distributions."""

    role: str

    @property
    def max_positions(self) -> int | None:
        """Longest sequence it takes."""

    def score(self, ids: tuple[int, ...]) -> Distribution:
        """Distributions for ``len(ids) - 1`` positions."""


@dataclass(frozen=True, slots=True)
class Continuations:
    """Token ids of an item's choices.

    Args:
        rows: prompt and choice, one row a choice.
        start: index of the first token that is scored, the same in every row.
        sizes: UTF-8 bytes of each choice.
    """

    rows: tuple[tuple[int, ...], ...]
    start: int
    sizes: tuple[int, ...]


def encode_choices(
    tokenizer: Tokenizer, bos: int | None, prompt: str, choices: Sequence[str]
) -> Continuations:
    """Encode an item.

    Args:
        tokenizer: of both models.
        bos: token in front of every text, if the tokenizer has one.
        prompt: with or without a space at its end.
        choices: what may follow.
    """
    bare = prompt.rstrip(" ")
    gap = prompt[len(bare) :]
    front = [] if bos is None else [bos]
    context = [*front, *tokenizer.encode(bare, special=False)]
    rows = [(*front, *tokenizer.encode(bare + gap + choice, special=False)) for choice in choices]
    shared = min(_shared(context, row) for row in rows)
    # The first token of a sequence is predicted by nothing.
    start = max(shared, 1)
    sizes = tuple(len((gap + choice).encode()) for choice in choices)
    return Continuations(tuple(rows), start, sizes)


def choice_logprobs(source: Scorer, continuations: Continuations) -> Floats:
    """Log-probability of each choice, nats.

    Raises:
        CouldNotValidateError: a choice is longer than the model's context, or empty as tokens, or
            the model cannot answer.
    """
    found = []
    for row in continuations.rows:
        if source.max_positions is not None and len(row) > source.max_positions:
            raise CouldNotValidateError(
                f"{source.role}: an item of {len(row)} tokens is longer than its "
                f"{source.max_positions} positions; shorten it"
            )
        if len(row) <= continuations.start:
            raise CouldNotValidateError(
                f"{source.role}: a choice adds no token to its prompt; write it out"
            )
        logprobs = token_logprobs(source.score(row), torch.tensor(row[1:]))
        found.append(float(logprobs[continuations.start - 1 :].sum()))
    return np.array(found)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
