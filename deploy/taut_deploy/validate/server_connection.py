"""JSON over HTTP with a model server, and the tokenizer behind it."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests

from taut_deploy.validate.errors import CouldNotValidateError, NotOfferedError, one_line
from taut_deploy.validate.generation import Message

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
            answer = self._send(method, self.root + path, body)
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

    def _send(self, method: str, url: str, body: dict[str, Any] | None) -> requests.Response:
        """Send, once more if the connection breaks: a server ends an idle one at any moment."""
        try:
            return self._session.request(method, url, json=body, timeout=self._timeout_s)
        except requests.ConnectTimeout:
            raise
        except requests.ConnectionError:
            return self._session.request(method, url, json=body, timeout=self._timeout_s)


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
        return self._tokens({"prompt": text, "add_special_tokens": special})

    def conversation(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that the model is to continue.

        Raises:
            NotOfferedError: no chat template, or it refuses the messages.
            CouldNotValidateError: the server has no ``/tokenize`` or answers nonsense.
        """
        body: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": True}
        return self._tokens(body | ({"tools": list(tools)} if tools else {}))

    def _tokens(self, asked: dict[str, Any]) -> list[int]:
        tokens = self._connection.call("/tokenize", {"model": self._model, **asked}).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise self._connection.fail(
                "/tokenize answered without a list of token ids in 'tokens'"
            )
        return tokens

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``."""
        body = {"model": self._model, "tokens": ids}
        return str(self._connection.call("/detokenize", body).get("prompt", ""))
