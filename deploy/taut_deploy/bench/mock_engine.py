"""A worker that costs next to nothing: vLLM's OpenAI server as bytes, with faults on demand.

    python -m taut_deploy.bench.mock_engine --port P [--port Q …] [--set itl_s=0.02 …] [--strict]

It is the other side of every gateway measurement and of the tests against real processes, so it
must never be the bottleneck: requests are cut by hand, generations are found in the bytes and
answered from prepared ones. ``--strict`` instead reads every request with llhttp and ``json`` and
writes down what is wrong with it, for tests that a gateway never passes on a malformed request.

| path | answer |
|---|---|
| ``/v1/completions``, ``/v1/chat/completions`` | a generation, whole or streamed |
| ``/v1/completions`` with ``prompt_logprobs``, ``/tokenize`` | :mod:`taut_deploy.bench.mock_readings` |
| ``/v1/embeddings``, ``/detokenize``, ``/v1/responses``, ``/v1/messages`` | a small document |
| ``/health``, ``/v1/models``, ``/metrics``, ``/version`` | as vLLM's, ``vllm:*`` names included |
| ``GET /mock/state`` | counters: open, started, completed, aborted, faulted, refused, … |
| ``GET /mock/aborts`` | ``[[mark, CLOCK_MONOTONIC seconds], …]`` of broken-off generations since the last call |
| ``GET /mock/open`` | the marks of open generations; a mark is ``mark:NAME`` anywhere in the request |
| ``POST /mock/behaviour`` | changes :class:`Behaviour`; a JSON object of its fields |
"""  # noqa: E501 - a table

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from typing import cast

import uvloop

from taut_deploy.bench.mock_answers import Step, document, error, plan, whole
from taut_deploy.bench.mock_behaviour import Behaviour
from taut_deploy.bench.mock_readings import read, tokenized
from taut_deploy.bench.mock_state import MockEngine
from taut_deploy.bench.mock_strict import what_is_wrong

GENERATIONS = {b"/v1/completions": False, b"/v1/chat/completions": True}
SMALL: Mapping[bytes, bytes] = {
    b"/v1/embeddings": document(
        200,
        b'{"object":"list","model":"m","data":[{"object":"embedding","index":0,"embedding":[0.5]}],'
        b'"usage":{"prompt_tokens":5,"total_tokens":5}}',
    ),
    b"/detokenize": document(200, b'{"prompt":"hi"}'),
    b"/v1/responses": document(
        200,
        b'{"id":"resp_1","object":"response","status":"completed","model":"m","output":[],'
        b'"usage":{"input_tokens":5,"output_tokens":4,"total_tokens":9}}',
    ),
    b"/v1/messages": document(
        200,
        b'{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[],'
        b'"stop_reason":"end_turn","usage":{"input_tokens":5,"output_tokens":4}}',
    ),
    b"/v1/models": document(
        200, b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"mock"}]}'
    ),
    b"/version": document(200, b'{"version":"0.32.0"}'),
}
OVERLOADED = error(503, "the engine's queue is full")
NO_LENGTH = -1
_LENGTH = b"\r\ncontent-length:"
_MARK = re.compile(rb"mark:([\w-]{1,64})")


class Connection(asyncio.Protocol):
    """One connection of a client: at most one generation at a time."""

    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self._pieces: list[bytes] = []
        self._size = self._need = 0
        self._timer: asyncio.TimerHandle | None = None
        self._steps: Iterator[Step] | None = None
        self._running = self._paused = self._held = False
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it."""
        self.transport = cast("asyncio.Transport", transport)
        self.engine.connections += 1
        self.engine.connections_opened += 1

    def connection_lost(self, _: Exception | None) -> None:
        """Count a generation that was open as broken off."""
        self.engine.connections -= 1
        if self._steps is not None:
            self.engine.aborts.append((self.mark(), time.monotonic()))
            self.engine.aborted += 1
            self._end()

    def mark(self) -> str:
        """Return the mark of the open generation, "" without one."""
        found = _MARK.search(self._body)
        return found[1].decode() if found else ""

    def pause_writing(self) -> None:
        """Hold the plan back: the reader is slow."""
        self._paused = True

    def resume_writing(self) -> None:
        """Go on with the plan."""
        self._paused = False
        if self._held:
            self._held = False
            self._advance()

    def data_received(self, data: bytes) -> None:
        """Cut requests out of what arrives."""
        if self._pieces:
            self._pieces.append(data)
            self._size += len(data)
            if self._size < self._need:
                return
            data = b"".join(self._pieces)
            self._pieces.clear()
        while data:
            end = data.find(b"\r\n\r\n") + 4
            total = end + _content_length(data[:end]) if end > 3 else len(data) + 1
            if total < end or (end > 3 and data.count(b" ", 0, end) < 2):
                self.engine.note(f"no request, or no length: {data[:200]!r}")
                self.transport.abort()
                return
            if len(data) < total:
                self._pieces.append(data)
                self._size, self._need = len(data), total
                return
            self._answer(data[:end], data[end:total])
            data = data[total:]

    def _answer(self, head: bytes, body: bytes) -> None:
        engine = self.engine
        engine.requests += 1
        method, target, _ = head.split(b" ", 2)
        path, _, query = target.partition(b"?")
        chat = GENERATIONS.get(path)
        if engine.strict and method == b"POST" and not path.startswith(b"/mock/"):
            reason = what_is_wrong(head, body)
            if reason is not None:
                engine.note(reason)
        if self._steps is not None:
            engine.note("a second request before the first was answered")
            self.transport.close()
        elif chat is False and b'"prompt_logprobs"' in body:
            self.transport.write(read(body))
        elif chat is not None:
            self._generate(chat, query, body)
        else:
            self.transport.write(self._small(path, body))

    def _small(self, path: bytes, body: bytes) -> bytes:
        engine = self.engine
        if path == b"/health":
            return document(engine.behaviour.health, b"")
        if path == b"/metrics":
            return engine.metrics()
        if path == b"/tokenize":
            return tokenized(body)
        if path == b"/mock/state":
            return engine.state()
        if path == b"/mock/open":
            return engine.open_marks()
        if path == b"/mock/aborts":
            return engine.take_aborts()
        if path == b"/mock/behaviour":
            return engine.change(body)
        return SMALL.get(path) or error(404, "Not Found")

    def _generate(self, chat: bool, query: bytes, body: bytes) -> None:
        engine = self.engine
        behaviour = engine.behaviour
        engine.started += 1
        stream = _is_true(body, b'"stream"')
        if not query and not stream and engine.plain:
            self.transport.write(whole(behaviour, chat))
            engine.completed += 1
            return
        if query:
            try:
                behaviour = behaviour.for_query(query.decode("latin-1"))
            except ValueError as problem:
                self.transport.write(error(400, str(problem)))
                return
        if behaviour.fault and engine.started % behaviour.fault_every:
            behaviour = behaviour.changed({"fault": ""})
        full = behaviour.capacity and engine.running >= behaviour.capacity
        if full and len(engine.waiting) >= behaviour.queue:
            engine.refused += 1
            self.transport.write(OVERLOADED)
            return
        self._body = body
        engine.busy.add(self)
        self._steps = plan(behaviour, chat, stream, _is_true(body, b'"include_usage"'))
        if full:
            engine.waiting.append(self)
        else:
            self.begin()

    def begin(self) -> None:
        """Begin the generation: a place is free."""
        engine = self.engine
        self._running = True
        engine.running += 1
        engine.peak = max(engine.peak, engine.running)
        self._advance()

    def _advance(self, step: Step | None = None) -> None:
        """Write steps until one has to wait."""
        self._timer = None
        while self._steps is not None:
            if step is None:
                step = next(self._steps)
                if step.delay_s:
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(step.delay_s, self._advance, step)
                    return
            if step.data:
                self.transport.write(step.data)
            if step.action:
                self._act(step.action)
                return
            step = None
            if self._paused:
                self._held = True
                return

    def _act(self, action: str) -> None:
        engine = self.engine
        if action == "stall":
            return
        if action == "done":
            engine.completed += 1
        else:
            engine.faulted += 1
        self._end()
        if action == "close":
            self.transport.close()
        elif action != "done":
            # Written bytes reach the kernel at the end of this turn of the loop.
            end = self._reset if action == "reset" else _kill_own_process
            asyncio.get_running_loop().call_later(0.005, end)

    def _reset(self) -> None:
        if self.transport.is_closing():
            return
        plug = self.transport.get_extra_info("socket")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _end(self) -> None:
        """Leave the running or waiting ones and let the next begin."""
        engine = self.engine
        engine.busy.discard(self)
        self._steps = None
        if self._timer is not None:
            self._timer.cancel()
        if not self._running:
            engine.waiting.remove(self)
            return
        self._running = False
        engine.running -= 1
        if engine.waiting:
            engine.waiting.popleft().begin()


def _content_length(head: bytes) -> int:
    place = head.find(_LENGTH)
    if place < 0:
        head = head.lower()
        place = head.find(_LENGTH)
        if place < 0:
            return 0
    begin = place + len(_LENGTH)
    text = head[begin : head.index(b"\r", begin)].strip()
    return int(text) if text.isdigit() else NO_LENGTH


def _is_true(body: bytes, name: bytes) -> bool:
    """Tell whether a field is true, without parsing; the last one of that name counts."""
    place = body.rfind(name)
    return place >= 0 and body[place + len(name) :].lstrip(b" :")[:4] == b"true"


def _kill_own_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def serve(engine: MockEngine, ports: list[int]) -> None:
    """Listen on every port until the process is ended; prints ``ready`` once it does."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
        for port in ports
    ]
    print("ready", *(s.sockets[0].getsockname()[1] for s in servers), flush=True)  # noqa: T201
    await asyncio.Event().wait()


def main() -> None:
    """Run one engine process."""
    parser = argparse.ArgumentParser(description="A mock vLLM worker with faults on demand.")
    parser.add_argument("--port", type=int, action="append", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--strict", action="store_true", help="check every request")
    options = parser.parse_args()
    try:
        settings = [item.partition("=") for item in options.set]
        behaviour = Behaviour().changed({name: value for name, _, value in settings})
    except ValueError as problem:
        parser.error(f"--set: {problem}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvloop.run(serve(MockEngine(behaviour, options.strict), options.port))


if __name__ == "__main__":
    main()
