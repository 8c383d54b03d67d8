"""One of our two models as lm-evaluation-harness sees it. Imports the harness: load it late."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lm_eval.api.model import LM

from taut_deploy.validate.divergence import token_logprobs, top1
from taut_deploy.validate.generation import Generation
from taut_deploy.validate.tasks.answers import Writer
from taut_deploy.validate.tasks.likelihood import encode_choices
from taut_deploy.validate.text import Tokenizer

_MAX_TOKENS = 256  # the harness's own default


class HarnessModel(LM):  # type: ignore[misc]  # the harness has no types
    """Answers the harness's requests with one source.

    Without a token in front of every text, the first token of a text is predicted by nothing and
    is not scored.

    Args:
        source: the model.
        tokenizer: of both models.
        bos: token in front of every text, if the tokenizer has one.
        on_request: called after each request with requests done and in all.
        once: hands out an answer of an earlier run by its place, or the one that is given now.
    """

    def __init__(
        self,
        source: Writer,
        tokenizer: Tokenizer,
        bos: int | None,
        on_request: Callable[[int, int], None],
        once: Callable[[int, Callable[[], Any]], Any],
    ) -> None:
        super().__init__()
        self._source, self._tokenizer, self._bos = source, tokenizer, bos
        self._on_request, self._once = on_request, once
        self._asked = 0

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is what greedy decoding writes."""
        return self._all(requests, self._continuation)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each whole text, in windows of the model's context."""
        return self._all(requests, self._rolling)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """What the model writes, greedily, until a stop text."""
        return self._all(requests, self._written)

    def _all(self, requests: Sequence[Any], answer: Callable[..., Any]) -> list[Any]:
        found = []
        for done, request in enumerate(requests, start=1):
            found.append(self._once(self._asked, partial(answer, *request.args)))
            self._asked += 1
            self._on_request(done, len(requests))
        return found

    def _continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        encoded = encode_choices(self._tokenizer, self._bos, context, [continuation])
        return self._scored(encoded.rows[0], encoded.start)

    def _rolling(self, text: str) -> float:
        front = [] if self._bos is None else [self._bos]
        ids = (*front, *self._tokenizer.encode(text, special=False))
        window = self._source.max_positions or len(ids)
        # Each window begins with the last token of the one before: every token is predicted once.
        starts = range(0, max(len(ids) - 1, 0), max(window - 1, 1))
        return sum(self._scored(ids[start : start + window], 1)[0] for start in starts)

    def _scored(self, ids: tuple[int, ...], start: int) -> tuple[float, bool]:
        if len(ids) <= start:
            return 0.0, True
        # A prompt that is too long loses its beginning, as in the harness's own models.
        excess = max(0, len(ids) - (self._source.max_positions or len(ids)))
        ids, start = ids[excess:], max(start - excess, 1)
        distribution, targets = self._source.score(ids), torch.tensor(ids[1:])
        logprobs = token_logprobs(distribution, targets)[start - 1 :]
        greedy = top1(distribution)[start - 1 :] == targets[start - 1 :].numpy()
        return float(logprobs.sum()), bool(greedy.all())

    def _written(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(until)
        length = int(settings.get("max_gen_toks") or _MAX_TOKENS)
        front = [] if self._bos is None else [self._bos]
        ids = [*front, *self._tokenizer.encode(context, special=False)]
        if self._source.max_positions is not None:
            ids = ids[-max(1, self._source.max_positions - length) :]
        return self._source.write(ids, Generation(length, stop)).text
