"""One function a slice: puts its prompts to both models and measures what comes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from taut_deploy.validate.bounds import LongContextBounds, SliceBounds
from taut_deploy.validate.divergence import Comparison, compare
from taut_deploy.validate.errors import CouldNotValidateError, NotOfferedError
from taut_deploy.validate.generation import Answer, Generation, Message
from taut_deploy.validate.side_by_side import check_vocabulary
from taut_deploy.validate.slices.haystack import is_found, prompt_with_needle
from taut_deploy.validate.slices.loops import ends_in_loop
from taut_deploy.validate.slices.measured import (
    Measured,
    likelihood_metrics,
    perplexities,
    ratio,
    share,
    share_difference,
)
from taut_deploy.validate.slices.prompts import Code, Conversation, Language, Needle, Structured
from taut_deploy.validate.slices.prompts import WithTools as ToolPrompt
from taut_deploy.validate.slices.python_code import completion_parses
from taut_deploy.validate.slices.structured import is_valid_json
from taut_deploy.validate.slices.tool_calls import calls_of, is_valid_call, named
from taut_deploy.validate.tasks.answers import Writer
from taut_deploy.validate.text import Tokenizer

_ANSWER_TOKENS = 12
_WINDOWS = 4
_LENGTHS_NEED = 6
"""Answers cut at one length are equal without being alike: fewer say nothing of the next one."""


class Speaker(Writer, Protocol):
    """A model that also answers conversations."""

    def converse(
        self, messages: Sequence[Message], tools: Sequence[Message], generation: Generation
    ) -> Answer:
        """Answer a conversation.

        Args:
            messages: ``role`` and ``content`` each.
            tools: offered functions, as in the OpenAI API.
            generation: length and stop texts.

        Raises:
            NotOfferedError: it has no such ability.
            CouldNotValidateError: there is no answer.
        """


@dataclass(frozen=True, slots=True)
class Setting:
    """What the measures of slices share.

    Args:
        baseline: the model compared with.
        candidate: the model compared.
        tokenizer: of both.
        bos: token in front of every text, if the tokenizer has one.
        text_ids: tokens of the text of the validation, the haystack.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        each: runs a function over prompts, and tells of progress.
    """

    baseline: Speaker
    candidate: Speaker
    tokenizer: Tokenizer
    bos: int | None
    text_ids: tuple[int, ...]
    resamples: int
    seed: int
    each: Callable[[Sequence[Any], Callable[[Any], Any]], list[Any]]

    def both(self, ask: Callable[[Speaker], Any]) -> tuple[Any, Any]:
        """The answers of both models."""
        return ask(self.baseline), ask(self.candidate)

    def encoded(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, its first token included."""
        front = () if self.bos is None else (self.bos,)
        return (*front, *self.tokenizer.encode(text, special=False))

    def compared(self, ids: tuple[int, ...]) -> Comparison:
        """Both models over one text, or as much of its beginning as their contexts hold.

        Raises:
            CouldNotValidateError: fewer than two tokens, so that nothing is predicted.
        """
        limits = (self.baseline.max_positions, self.candidate.max_positions)
        ids = ids[: min([len(ids), *(limit for limit in limits if limit is not None)])]
        if len(ids) < 2:
            raise CouldNotValidateError(
                "a prompt of a slice has fewer than two tokens, so nothing is predicted in it; "
                "give more text"
            )
        left, right = self.both(lambda model: model.score(ids))
        check_vocabulary(left, right)
        return compare(left, right, torch.tensor(ids[1:]))


Measure = Callable[[Setting, Sequence[Any], Any], Measured]


def structured(setting: Setting, items: Sequence[Structured], _: SliceBounds) -> Measured:
    """Share of answers that are JSON of the form asked for."""

    def ask(item: Structured) -> tuple[bool, bool]:
        generation = Generation(item.max_tokens)
        answers = setting.both(lambda model: model.converse(item.messages, (), generation))
        first, second = (is_valid_json(answer.text, item.schema_) for answer in answers)
        return first, second

    return _valid(setting, setting.each(items, ask))


def tools(setting: Setting, items: Sequence[ToolPrompt], _: SliceBounds) -> Measured:
    """Share of answers that call an offered tool rightly, and share that call the same."""

    def ask(item: ToolPrompt) -> tuple[bool, bool, bool]:
        generation = Generation(item.max_tokens)
        answers = setting.both(lambda model: model.converse(item.messages, item.tools, generation))
        first, second = (calls_of(answer) for answer in answers)
        return (
            is_valid_call(first, item.tools),
            is_valid_call(second, item.tools),
            named(first) == named(second),
        )

    rows = setting.each(items, ask)
    found = _valid(setting, rows)
    metrics = {**found.metrics, "same_tool": share([same for _, _, same in rows])}
    return Measured(metrics, len(rows), found.values)


def chat(setting: Setting, items: Sequence[Conversation], _: SliceBounds) -> Measured:
    """Length of answers, endless loops, and why an answer ended."""

    def ask(item: Conversation) -> tuple[Answer, Answer]:
        generation = Generation(item.max_tokens)
        return setting.both(lambda model: model.converse(item.messages, (), generation))

    rows = setting.each(items, ask)
    tokens = [[float(row[side].tokens) for row in rows] for side in (0, 1)]
    loops = [[ends_in_loop(row[side].text) for row in rows] for side in (0, 1)]
    loop, loop_shares = share_difference(loops[0], loops[1], setting.seed)
    length = ratio(tokens[1], tokens[0], resamples=setting.resamples, seed=setting.seed)
    same = share([first.finish_reason == second.finish_reason for first, second in rows])
    metrics = {"loop_difference": loop, "same_finish": same}
    missing = {}
    if length is not None and length.low == length.high and len(rows) < _LENGTHS_NEED:
        missing["length_ratio"] = (
            f"{len(rows)} answers of one length bound nothing; give {_LENGTHS_NEED} prompts or more"
        )
    elif length is not None:
        metrics["length_ratio"] = length
    means = {"baseline": sum(tokens[0]) / len(rows), "candidate": sum(tokens[1]) / len(rows)}
    values = {"loops": loop_shares, "tokens": means}
    return Measured(metrics, len(rows), values, not_measured=missing)


def code(setting: Setting, items: Sequence[Code], _: SliceBounds) -> Measured:
    """Share of completions that are code, and the likelihood of given code."""

    def ask(item: Code) -> tuple[bool, bool, Comparison]:
        ids, generation = setting.encoded(item.prompt), Generation(item.max_tokens)
        answers = setting.both(lambda model: model.write(ids, generation))
        first, second = (
            completion_parses(item.prompt, answer.text, cut_off=answer.finish_reason == "length")
            for answer in answers
        )
        return first, second, setting.compared(setting.encoded(item.prompt + item.solution))

    rows = setting.each(items, ask)
    parses, shares = share_difference(
        [first for first, _, _ in rows], [second for _, second, _ in rows], setting.seed
    )
    comparisons = [comparison for _, _, comparison in rows]
    likely = likelihood_metrics(comparisons, resamples=setting.resamples, seed=setting.seed)
    values = {"parses": shares, "perplexity": perplexities(comparisons)}
    return Measured({"parses_difference": parses, **likely}, len(rows), values)


def languages(setting: Setting, items: Sequence[Language], _: SliceBounds) -> Measured:
    """The likelihood of texts in several languages."""
    rows = [(item, setting.encoded(item.text)) for item in items]
    # A tokenizer that knows no letter of a language may read a whole text as one unknown token.
    scored = [(item, ids) for item, ids in rows if len(ids) > 1]
    if len(scored) < 2:
        raise NotOfferedError("the tokenizer reads fewer than two of the texts as several tokens")
    comparisons = setting.each(scored, lambda row: setting.compared(row[1]))
    metrics = likelihood_metrics(comparisons, resamples=setting.resamples, seed=setting.seed)
    by_language: dict[str, list[Comparison]] = {}
    for (item, _ids), comparison in zip(scored, comparisons, strict=True):
        by_language.setdefault(item.language, []).append(comparison)
    parts = {
        name: sum(float(c.kl.sum()) for c in found) / sum(c.kl.size for c in found)
        for name, found in by_language.items()
    }
    values = {"perplexity": perplexities(comparisons)}
    unread = sorted({item.language for item, ids in rows if len(ids) < 2})
    left_out = {"texts": f"one unknown token: {', '.join(unread)}"} if unread else {}
    return Measured(metrics, len(comparisons), values, parts, left_out)


def long_context(setting: Setting, items: Sequence[Needle], bounds: LongContextBounds) -> Measured:
    """Needles found in long prompts, and perplexity at the last quarter of the window."""
    limits = (setting.baseline.max_positions, setting.candidate.max_positions)
    window = min([bounds.tokens, *(limit for limit in limits if limit is not None)])

    def ask(at: int) -> tuple[bool, bool]:
        item = items[at]
        front = [] if setting.bos is None else [setting.bos]
        hidden = setting.tokenizer.encode(f"\n{item.needle}\n", special=False)
        question = setting.tokenizer.encode(f"\n{item.question}", special=False)
        ids = front + prompt_with_needle(
            setting.text_ids,
            hidden,
            question,
            length=window - _ANSWER_TOKENS - len(front),
            depth=at / (len(items) - 1),
        )
        answers = setting.both(lambda model: model.write(ids, Generation(_ANSWER_TOKENS)))
        first, second = (is_found(answer.text, item.answer) for answer in answers)
        return first, second

    rows = setting.each(range(len(items)), ask)
    sides = [[row[side] for row in rows] for side in (0, 1)]
    needle, shares = share_difference(sides[0], sides[1], setting.seed)
    metrics, values = {"needle_difference": needle}, {"needles": shares}
    windows = len(setting.text_ids) // window
    if windows < 2:
        short = (
            f"--text has {len(setting.text_ids)} tokens, and two windows of {window} are needed; "
            "give a longer text, or lower slices.long_context.tokens"
        )
        return Measured(metrics, len(rows), values, not_measured={"perplexity_ratio": short})
    quarters = [
        _last_quarter(setting.compared(setting.text_ids[at * window : (at + 1) * window]))
        for at in range(min(windows, _WINDOWS))
    ]
    likely = likelihood_metrics(quarters, resamples=setting.resamples, seed=setting.seed)
    metrics["perplexity_ratio"] = likely["perplexity_ratio"]
    return Measured(metrics, len(rows), values | {"perplexity": perplexities(quarters)})


MEASURES: dict[str, Measure] = {
    "structured": structured,
    "tools": tools,
    "long_context": long_context,
    "code": code,
    "languages": languages,
    "chat": chat,
}


def _valid(setting: Setting, rows: Sequence[Sequence[bool]]) -> Measured:
    metric, shares = share_difference([r[0] for r in rows], [r[1] for r in rows], setting.seed)
    return Measured({"valid_difference": metric}, len(rows), {"valid": shares})


def _last_quarter(comparison: Comparison) -> Comparison:
    start = comparison.kl.size - max(1, comparison.kl.size // 4)
    return Comparison(
        comparison.baseline_nll[start:],
        comparison.candidate_nll[start:],
        comparison.kl[start:],
        comparison.baseline_top1[start:],
        comparison.candidate_top1[start:],
        comparison.kl_is_lower_bound,
    )
