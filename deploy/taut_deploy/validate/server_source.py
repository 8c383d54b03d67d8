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
from urllib.parse import urlsplit

import requests

from taut_deploy.validate.divergence import TopKDistribution
from taut_deploy.validate.errors import CouldNotValidateError, NotOfferedError, one_line
from taut_deploy.validate.generation import Answer, FinishReason, Generation, Message, within

# The request is understood and not served: by a model without that ability, or with other limits.
_REFUSED = frozenset({400, 404, 422})


def is_url(reference: str) -> bool:
    """Whether a baseline or candidate names a server rather than a directory."""
    return "://" in reference


class ServerConnection:
    """JSON over HTTP to one server; every failure is one line that names the role and the URL.

    Args:
        url: base URL, with or without ``/v1``.
        role: ``baseline`` or ``candidate``.
        headers: sent with every request.
        timeout_s: seconds to wait for one answer.

    Raises:
        CouldNotValidateError: not an http(s) URL.
    """

    def __init__(self, url: str, role: str, headers: Mapping[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CouldNotValidateError(f"--{role} {url}: expected http://host:port")
        self.root = url.rstrip("/").removesuffix("/v1")
        self.role = role
        self._timeout_s = timeout_s
        self._session = requests.Session()
        self.headers = dict(headers)
        self._session.headers.update(self.headers)

    def fail(self, what: str) -> CouldNotValidateError:
        """The error for this server."""
        return CouldNotValidateError(f"{self.role} {self.root}: {what}")

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """GET, or POST ``body``, and return the JSON object.

        Raises:
            CouldNotValidateError: unreachable, an HTTP error, or not a JSON object.
        """
        method = "GET" if body is None else "POST"
        try:
            answer = self._session.request(
                method, self.root + path, json=body, timeout=self._timeout_s
            )
        except requests.RequestException as error:
            kind = type(error).__name__
            raise self.fail(f"{path} gave no answer ({kind}); is the server up?") from error
        if not answer.ok:
            if answer.status_code in _REFUSED:
                message = f"{self.role} {self.root}: {path} answered {answer.status_code}: "
                raise NotOfferedError(message + _server_message(answer))
            raise self.fail(f"{path} answered {answer.status_code}: {_server_message(answer)}")
        try:
            value = answer.json()
        except ValueError as error:
            raise self.fail(f"{path} did not answer with JSON") from error
        if not isinstance(value, dict):
            raise self.fail(f"{path} did not answer with a JSON object")
        return value


def _server_message(answer: requests.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.reason
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return one_line(ValueError(str(message)))


class ServerTokenizer:
    """The tokenizer behind ``/tokenize`` and ``/detokenize``."""

    def __init__(self, connection: ServerConnection, model: str) -> None:
        self._connection, self._model = connection, model

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of ``text``.

        Raises:
            CouldNotValidateError: the server has no ``/tokenize`` or answers nonsense.
        """
        body = {"model": self._model, "prompt": text, "add_special_tokens": special}
        tokens = self._connection.call("/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise self._connection.fail(
                "/tokenize answered without a list of token ids in 'tokens'"
            )
        return tokens

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``."""
        body = {"model": self._model, "tokens": ids}
        return str(self._connection.call("/detokenize", body).get("prompt", ""))


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
        """Answer a conversation.

        Args:
            messages: ``role`` and ``content`` each.
            tools: offered functions, as in the OpenAI API.
            generation: length and stop texts.

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
