"""Both models' answers to the items of a task, as far as they were asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from taut_deploy.validate.generation import Answer, Generation
from taut_deploy.validate.paired.counts import Bools
from taut_deploy.validate.tasks.items import Item
from taut_deploy.validate.tasks.likelihood import Scorer, choice_logprobs, encode_choices
from taut_deploy.validate.tasks.matching import is_right
from taut_deploy.validate.text import Tokenizer


class Writer(Scorer, Protocol):
    """A model that also continues prompts."""

    def write(self, ids: Sequence[int], generation: Generation) -> Answer:
        """Continue a prompt greedily."""


@dataclass(frozen=True, slots=True)
class ItemScore:
    """One model's answer to one item.

    Args:
        right: whether it is right.
        right_per_byte: whether the choice of the highest log-probability per byte is; None where
            there are no choices.
        said: the choice, or what was written.
    """

    right: bool
    right_per_byte: bool | None
    said: str


def answer_item(source: Writer, tokenizer: Tokenizer, bos: int | None, item: Item) -> ItemScore:
    """Ask one model.

    Args:
        source: the model.
        tokenizer: of both models.
        bos: token in front of every text, if the tokenizer has one.
        item: the question.

    Raises:
        CouldNotValidateError: the model cannot answer.
    """
    if item.choices is not None:
        encoded = encode_choices(tokenizer, bos, item.prompt, item.choices)
        logprobs = choice_logprobs(source, encoded)
        chosen = int(np.argmax(logprobs))
        per_byte = int(np.argmax(logprobs / np.array(encoded.sizes)))
        right = item.right_choice
        return ItemScore(chosen == right, per_byte == right, item.choices[chosen])
    front = [] if bos is None else [bos]
    ids = [*front, *tokenizer.encode(item.prompt, special=False)]
    said = source.write(ids, Generation(item.max_tokens, item.stop)).text
    return ItemScore(is_right(said, item.references, item.match), None, said)


@dataclass(slots=True)
class TaskAnswers:
    """Items asked so far, and what both said; grows in step.

    Args:
        name: of the task.
        items: prompt, group and identity of each.
        baseline: its answers.
        candidate: its answers.
    """

    name: str
    items: list[Item] = field(default_factory=list)
    baseline: list[ItemScore] = field(default_factory=list)
    candidate: list[ItemScore] = field(default_factory=list)

    @property
    def groups(self) -> list[str] | None:
        """The sub-task of each item; None unless every item has one."""
        found = [item.subtask for item in self.items]
        named = [group for group in found if group is not None]
        return named if len(named) == len(found) else None

    def right(self, role: str, score: str = "sum") -> Bools:
        """[items] whether the model of ``role`` was right, by ``sum`` or ``per_byte``."""
        scores: list[ItemScore] = getattr(self, role)
        if score == "per_byte":
            return np.array([bool(one.right_per_byte) for one in scores])
        return np.array([one.right for one in scores])


Ask = Callable[[Item], tuple[ItemScore, ItemScore]]
