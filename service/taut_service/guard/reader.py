"""Asks the workers of one variant beside the clients' requests, counted as load like these."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from taut_service.config.settings import GuardSettings
from taut_service.guard.divergence import Distribution, UnreadableError
from taut_service.guard.reading import distributions_of, parse
from taut_service.route.variants import Variant
from taut_service.worker.upstream_errors import UpstreamError
from taut_service.worker.worker import Worker

_BYTES_A_LOGPROB = 160
"""Of JSON: ``"128009":{"logprob":-12.345678901234567,"rank":5,"decoded_token":"…"}``."""
_ROOM = 256 * 1024
_TOO_BUSY = (429, 503)
_INT = frozenset({int})


class BusyError(Exception):
    """No worker can be asked now: clients come first."""


class ReadError(Exception):
    """A worker did not do what it was asked; ``str()`` says what, for the log."""


class Reader:
    """One variant.

    Args:
        variant: whose workers are asked.
        settings: patience and sizes.
    """

    def __init__(self, variant: Variant, settings: GuardSettings) -> None:
        self._variant = variant
        self._settings = settings
        self._asked: list[Worker] = []

    async def tokens(self, fields: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a prompt or a conversation.

        Args:
            fields: for ``/tokenize``.

        Raises:
            BusyError: nobody can be asked.
            ReadError: the worker failed.
        """
        answer = await self.ask("/tokenize", fields)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not _INT.issuperset(map(type, tokens)):
            raise ReadError("/tokenize answered without 'tokens'")
        return tokens

    async def distributions(
        self, tokens: list[int], prompt: int, top_k: int
    ) -> tuple[list[Distribution], float]:
        """Read a text (teacher forcing); a second call prefers another worker.

        Args:
            tokens: of prompt and answer.
            prompt: how many of them are the prompt's.
            top_k: most probable tokens to be told of each place, beside the text's own.

        Returns:
            What the variant expected at each place of the answer, and the seconds it took.

        Raises:
            BusyError: nobody can be asked.
            NotFiniteError: it computes rubbish.
            ReadError: the worker failed.
        """
        fields = {
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top_k,
        }
        path = "/v1/completions"
        data, seconds = await self._fetch(path, fields, len(tokens))
        try:
            return await distributions_of(data, prompt, len(tokens)), seconds
        except (ValueError, RecursionError) as error:
            raise _no_json(path) from error
        except UnreadableError as error:
            if type(error) is UnreadableError:
                raise ReadError(str(error)) from error
            raise

    async def ask(self, path: str, fields: Mapping[str, Any], tokens: int = 1) -> Any:
        """Send one request, return the parsed answer.

        Args:
            path: of the worker.
            fields: of the body; the model's name is put in.
            tokens: size of the request, for the worker's load.

        Raises:
            BusyError: nobody can be asked.
            ReadError: the worker failed.
        """
        data, _ = await self._fetch(path, fields, tokens)
        try:
            return await parse(data)
        except (ValueError, RecursionError) as error:
            raise _no_json(path) from error

    async def events(
        self, path: str, fields: Mapping[str, Any], tokens: int
    ) -> AsyncIterator[dict[str, Any]]:
        """Send one request for a stream, yield its events as they come.

        Args:
            path: of the worker.
            fields: of the body; the model's name and ``stream`` are put in.
            tokens: size of the request, for the worker's load.

        Raises:
            BusyError: nobody can be asked.
            ReadError: the worker failed.
        """
        body, rest = self._body({**fields, "stream": True}), b""
        with self._worker(path, tokens) as worker:
            patience = self._settings.timeout_s
            async with worker.client.answer("POST", path, body, patience) as connection:
                _require_answered(path, connection.status)
                while data := await connection.read():
                    *lines, rest = (rest + data).split(b"\n")
                    if len(rest) > _ROOM:
                        raise ReadError(f"{path}: an event of more than {_ROOM} bytes")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            yield _event(path, line.removeprefix(b"data: "))

    async def _fetch(
        self, path: str, fields: Mapping[str, Any], tokens: int
    ) -> tuple[bytes, float]:
        """Return an answer's body and the seconds from request to last byte."""
        room = tokens * (self._settings.top_k + 1) * _BYTES_A_LOGPROB + _ROOM
        with self._worker(path, tokens) as worker:
            started = time.perf_counter()
            status, data = await worker.client.ask(
                "POST", path, self._body(fields), self._settings.timeout_s, room
            )
            seconds = time.perf_counter() - started
        if path == "/v1/completions":
            self._asked = [worker]
        _require_answered(path, status)
        return data, seconds

    def _body(self, fields: Mapping[str, Any]) -> bytes:
        return json.dumps({**fields, "model": self._variant.served_name}).encode()

    @contextlib.contextmanager
    def _worker(self, path: str, tokens: int) -> Iterator[Worker]:
        """A worker, counted as busy with so many tokens; its failures are ``ReadError``."""
        worker = self._variant.choose(self._asked) or self._variant.choose()
        if worker is None:
            raise BusyError
        probe = worker.take(tokens)
        try:
            yield worker
        except (UpstreamError, TimeoutError) as error:
            raise ReadError(f"{path}: {str(error) or 'no answer in time'}") from error
        finally:
            worker.give_back(tokens)
            if probe:
                # A comparison says nothing about what clients would get.
                worker.breaker.abandoned(probe)


def _require_answered(path: str, status: int) -> None:
    if status in _TOO_BUSY:
        raise BusyError
    if status != 200:
        raise ReadError(f"{path} answered with status {status}")


def _event(path: str, text: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_json(path) from error
    if "error" in event:
        raise ReadError(f"{path}: the worker broke off its answer")
    return event


def _no_json(path: str) -> ReadError:
    return ReadError(f"{path} answered with what is no JSON")
