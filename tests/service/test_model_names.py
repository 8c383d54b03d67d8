"""Answers name the model as the client did, whatever their workers call it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_harness import CHAT, COMPLETION, gateway, variants_for
from mock_engine import Faults, MockEngine

from taut_service.config.settings import Settings
from taut_service.http.rewrite import rewrite_for
from taut_service.http.sse import SseReframer

SAID = [{"role": "user", "content": "hello"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"model": "m", "input": "x", "metadata": {"model": "canary-w4a16"}}),
    ("/v1/messages", {"model": "m", "max_tokens": 8, "messages": SAID}),
]


def renamed(engine: MockEngine) -> Settings:
    model = variants_for(
        {"only": [engine]}, each={"only": {"served_name": "canary-w4a16"}}, aliases=["alias-of-m"]
    )
    return Settings.model_validate({"models": [model]})


def names(document: Any) -> list[str]:
    """Every ``model`` of a document, but for what the client wrote itself."""
    if not isinstance(document, dict):
        return []
    found = [document["model"]] if "model" in document else []
    for name, value in document.items():
        found += names(value) if name != "metadata" else []
    return found


@pytest.mark.parametrize("asked", ["m", "alias-of-m"])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_whole_answers_say_the_name_that_was_asked_for(
    path: str, body: dict[str, Any], asked: str
) -> None:
    async with MockEngine() as engine, gateway(renamed(engine)) as harness:
        answer = await harness.post({**body, "model": asked}, path)
        assert answer.status == 200
        assert engine.seen[-1].json["model"] == "canary-w4a16"
        assert names(answer.json) == [asked]
        if "metadata" in body:
            assert answer.json["metadata"]["model"] == "canary-w4a16"


@pytest.mark.parametrize("chunk", [None, 11])
@pytest.mark.parametrize("asked", ["m", "alias-of-m"])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_streams_say_the_name_that_was_asked_for(
    path: str, body: dict[str, Any], asked: str, chunk: int | None
) -> None:
    async with MockEngine(Faults(chunk=chunk)) as engine, gateway(renamed(engine)) as harness:
        answer = await harness.post({**body, "model": asked, "stream": True}, path)
        data = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
        documents = [json.loads(line) for line in data if line != b"[DONE]"]
        found = [name for document in documents for name in names(document)]
        assert set(found) == {asked}
        told = [(d["response"]["metadata"] or {}) for d in documents if "response" in d]
        assert all(metadata["model"] == "canary-w4a16" for metadata in told)
        assert len(found) == {"/v1/responses": 3, "/v1/messages": 1}.get(path, 4)


async def test_long_document_has_the_right_name_and_length() -> None:
    faults = Faults(token="y" * 1_000_000)
    async with MockEngine(faults) as engine, gateway(renamed(engine)) as harness:
        answer = await harness.post(COMPLETION)
        assert answer.json["model"] == "m"
        assert len(answer.json["choices"][0]["text"]) == 4_000_000


async def test_text_that_looks_like_a_name_is_left_alone() -> None:
    token = '"model":"canary-w4a16" \\"model\\":\\"canary-w4a16\\"'
    async with MockEngine(Faults(token=token)) as engine, gateway(renamed(engine)) as harness:
        answer = await harness.post(COMPLETION)
        assert answer.json["choices"][0]["text"] == token * 4
        stream = await harness.post({**COMPLETION, "stream": True})
        parts = [json.loads(e[6:]) for e in stream.body.split(b"\n\n")[:-2]]
        assert "".join(part["choices"][0]["text"] for part in parts) == token * 4


def test_name_that_needs_escapes_and_odd_spaces() -> None:
    rewrite = rewrite_for('q"', hide_usage=False, within="")
    assert json.loads(rewrite.document(b'{"model" :\n"w", "x":{"model":"w"}}')) == {
        "model": 'q"',
        "x": {"model": "w"},
    }
    reframer = SseReframer(rewrite=rewrite)
    event = b'data: {"model" : "w"}\n\n'
    assert reframer.feed(event + event) == event.replace(b'"w"', b'"q\\""') * 2


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"{", b'{"model":1}', b'{"a":{"model":"w"}', b"\xff"]
)
def test_what_has_no_name_passes_unchanged(text: bytes) -> None:
    rewrite = rewrite_for("m", hide_usage=False, within="response")
    assert rewrite.document(text).replace(b'"m"', b'"w"') == text
    event = b'event: x\ndata: {"model":"w","response":{"id":1}}\n\n'
    assert SseReframer(rewrite=rewrite).feed(event) == event
