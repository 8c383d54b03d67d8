"""Next-token distributions from an OpenAI-compatible server (vLLM), as top-K log-probabilities.

One ``POST /v1/completions`` a sequence: the prompt as token ids, ``max_tokens=1``,
``prompt_logprobs=K``. Entry ``i`` of the answer's ``prompt_logprobs`` is the distribution that
predicted token ``i`` (the first is null); its keys are token ids as strings, the K most likely and
the true token. Read in vLLM 0.32: ``entrypoints/openai/completion`` and ``v1/engine/logprobs.py``;
K is limited by ``--max-logprobs`` (20 by default).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taut_deploy.validate.divergence import Floats, TopKDistribution
from taut_deploy.validate.generation import Answer, FinishReason, Generation, Message, within
from taut_deploy.validate.server_connection import ServerConnection, ServerTokenizer

# Rounding, to bf16 at worst, adds this much to the 1 that all probabilities make.
_MOST_IN_ALL = 1.01
_NO_LOGPROBS = (
    "probabilities of one token add up to more than 1: what it tells are no log-probabilities; "
    "start vLLM with --logprobs-mode raw_logprobs"
)
# Of an entry of /v1/models: when it was asked for, and by whom.
OF_THE_CALL = frozenset({"created", "permission"})


class ServerSource:
    """A served model that answers with top-K distributions.

    Args:
        connection: the server.
        model: model name; by default the server's only one.
        top_k: log-probabilities per position.

    Raises:
        CouldNotValidateError: unreachable, or the model is not there or not the only one.
    """

    def __init__(self, connection: ServerConnection, model: str | None, top_k: int) -> None:
        self.role, self.path, self.headers = connection.role, connection.root, connection.headers
        self._connection, self._top_k = connection, top_k
        self.card = self._find_model(model)
        self.model_name = str(self.card["id"])
        self.tokenizer = ServerTokenizer(connection, self.model_name)

    def _find_model(self, wanted: str | None) -> dict[str, Any]:
        cards = self._connection.call("/v1/models").get("data")
        if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards):
            raise self._connection.fail("/v1/models answered without a list of models in 'data'")
        names = ", ".join(str(card["id"]) for card in cards) or "none"
        matching = [card for card in cards if wanted in (None, card["id"])]
        flag = f"--{self.role}-model"
        if not matching:
            raise self._connection.fail(f"{flag} {wanted}: no such model; it serves {names}")
        if len(matching) > 1:
            raise self._connection.fail(f"serves several models ({names}); choose with {flag}")
        card: dict[str, Any] = matching[0]
        return card

    @property
    def max_positions(self) -> int | None:
        """Longest prompt the server takes, one generated token left over, if it says so."""
        value = self.card.get("max_model_len")
        return value - 1 if isinstance(value, int) else None

    def require_same_model(self) -> None:
        """Refuse a server that by now serves another model than when it was opened.

        Raises:
            CouldNotValidateError: its entry of ``/v1/models`` changed.
        """
        now = self._find_model(self.model_name)
        for name in sorted({*self.card, *now} - OF_THE_CALL):
            if self.card.get(name) != now.get(name):
                raise self._connection.fail(
                    f"{name} of its model was {self.card.get(name)!r} and is {now.get(name)!r}: "
                    "it was restarted with another model in the meantime; run it again"
                )

    def sampled(self, ids: Sequence[int], max_tokens: int, seed: int) -> Floats:
        """Log-probabilities of what the server writes by its own defaults.

        Args:
            ids: token ids of the prompt.
            max_tokens: at most as many are written.
            seed: of the draw.

        Returns:
            [tokens written] of the model's distribution, not of the one that was drawn from.

        Raises:
            CouldNotValidateError: a refused request, or an answer without log-probabilities.
        """
        body = {
            "model": self.model_name,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "seed": seed,
            "logprobs": 1,
        }
        answer = self._connection.call("/v1/completions", body)
        told = self._first_choice(answer, "/v1/completions").get("logprobs")
        values = told.get("token_logprobs") if isinstance(told, dict) else None
        try:
            found = np.array(values, dtype=np.float64)
        except (TypeError, ValueError):
            found = np.array(np.nan)
        if found.ndim != 1 or not found.size or not np.isfinite(found).all():
            raise self._connection.fail(
                "/v1/completions answered without finite 'token_logprobs'; it must be vLLM or pass "
                "vLLM's fields on"
            )
        if found.max() > math.log(_MOST_IN_ALL):
            raise self._connection.fail(_NO_LOGPROBS)
        return found

    def score(self, ids: Sequence[int]) -> TopKDistribution:
        """Ask for one sequence.

        Args:
            ids: token ids.

        Returns:
            ``len(ids) - 1`` positions.

        Raises:
            CouldNotValidateError: a refused request, or an answer that lacks what was asked for.
        """
        body = {
            "model": self.model_name,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self._top_k,
        }
        answer = self._connection.call("/v1/completions", body)
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        entries = first.get("prompt_logprobs") if isinstance(first, dict) else None
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise self._connection.fail(
                "/v1/completions answered without one 'prompt_logprobs' entry per token; it "
                "must be vLLM or pass vLLM's fields on"
            )
        rows = zip(entries[1:], ids[1:], strict=True)
        return TopKDistribution(tuple(self._position(entry, token) for entry, token in rows))

    def _position(self, entry: Any, token: int) -> dict[int, float]:
        try:
            logprobs = {int(key): float(value["logprob"]) for key, value in entry.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._connection.fail(
                "'prompt_logprobs' has an entry of unknown shape"
            ) from error
        if token not in logprobs:
            raise self._connection.fail(f"'prompt_logprobs' lacks the prompt's own token {token}")
        if not all(math.isfinite(value) for value in logprobs.values()):
            raise self._connection.fail(
                "NaN or infinite log-probabilities; the served weights are broken"
            )
        # Capped, as a logit may be beyond what can be raised to.
        if sum(math.exp(min(value, 1.0)) for value in logprobs.values()) > _MOST_IN_ALL:
            raise self._connection.fail(_NO_LOGPROBS)
        return logprobs

    def write(self, ids: Sequence[int], generation: Generation) -> Answer:
        """Continue a prompt greedily.

        Args:
            ids: token ids.
            generation: length and stop texts.

        Raises:
            CouldNotValidateError: the prompt fills the context, a refused request, or an answer
                without text.
        """
        # The prompt and what follows fill max_model_len, one more than a prompt alone may have.
        positions = None if self.max_positions is None else self.max_positions + 1
        shortened = within(generation, len(ids), positions)
        if shortened is None:
            raise self._connection.fail(
                f"a prompt of {len(ids)} tokens leaves no room in its {positions} positions; "
                "shorten it"
            )
        body = {"prompt": list(ids), **self._asked(shortened)}
        answer = self._connection.call("/v1/completions", body)
        choice = self._first_choice(answer, "/v1/completions")
        return self._answer(answer, choice, choice.get("text"), None)

    def converse(
        self, messages: Sequence[Message], tools: Sequence[Message], generation: Generation
    ) -> Answer:
        """Answer a conversation; see :class:`~taut_deploy.validate.slices.measures.Speaker`.

        Raises:
            NotOfferedError: the server refuses it, as one without a parser refuses tools.
            CouldNotValidateError: no answer, or one without a message.
        """
        body: dict[str, Any] = {"messages": list(messages), **self._asked(generation)}
        if tools:
            body["tools"] = list(tools)
        answer = self._connection.call("/v1/chat/completions", body)
        choice = self._first_choice(answer, "/v1/chat/completions")
        message = choice.get("message")
        if not isinstance(message, dict):
            raise self._connection.fail("/v1/chat/completions answered without a 'message'")
        return self._answer(answer, choice, message.get("content") or "", _calls(message))

    def _asked(self, generation: Generation) -> dict[str, Any]:
        asked = {
            "model": self.model_name,
            "max_tokens": generation.max_tokens,
            "temperature": 0.0,
        }
        return asked | ({"stop": list(generation.stop)} if generation.stop else {})

    def _first_choice(self, answer: Mapping[str, Any], path: str) -> dict[str, Any]:
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict):
            raise self._connection.fail(f"{path} answered without 'choices'")
        return first

    def _answer(
        self,
        answer: Mapping[str, Any],
        choice: Mapping[str, Any],
        text: Any,
        calls: tuple[tuple[str, str], ...] | None,
    ) -> Answer:
        usage = answer.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not isinstance(text, str) or not isinstance(tokens, int):
            raise self._connection.fail("an answer lacks its text or 'usage.completion_tokens'")
        reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        return Answer(text, tokens, reason, calls)


def _calls(message: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    """Name and arguments of the calls that the server parsed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return None
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    named = [function if isinstance(function, dict) else {} for function in functions]
    return tuple((str(one.get("name")), str(one.get("arguments") or "")) for one in named)
