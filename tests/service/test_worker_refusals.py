"""Tools for a model that knows of none: one line that names the model and the way out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_harness import CHAT, gateway, settings_for
from mock_engine import Faults, MockEngine

AUTO = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
NAMED = 'tool_choice=function "f" requires --tool-call-parser to be set'
QUOTED = "1 validation error: input 'please set --tool-call-parser to be set' is no message"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def refusing(message: str) -> Faults:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return Faults(status=400, error_body=json.dumps({"error": error}).encode())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("message", [AUTO, NAMED])
async def test_flags_of_the_worker_are_not_shown(message: str, stream: bool) -> None:
    body = {**CHAT, "tools": TOOLS, "stream": stream}
    async with (
        MockEngine(refusing(message)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        answer = await harness.post(body, "/v1/chat/completions")
        assert (answer.status, answer.error["code"]) == (400, "tools_not_supported")
        assert answer.error["param"] == "tools"
        text = answer.error["message"]
        assert "'m'" in text
        assert "--chat-template" in text
        assert "tool-call-parser" not in text
        assert "\n" not in text
        # The worker is fine, and so is the connection to it.
        engine.faults.status = 200
        assert (await harness.post(CHAT, "/v1/chat/completions")).status == 200
        assert (await harness.states()) == {"w0": "ready"}


async def test_anthropics_clients_read_it_in_their_shape() -> None:
    body: dict[str, Any] = {**CHAT, "max_tokens": 4, "tools": TOOLS}
    async with MockEngine(refusing(AUTO)) as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post(body, "/v1/messages")
        assert (answer.status, answer.json["type"]) == (400, "error")
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert "takes no tools" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "body", [json.dumps({"error": {"message": QUOTED}}).encode(), AUTO.encode()]
)
async def test_other_refusals_pass_as_they_are(body: bytes) -> None:
    faults = Faults(status=400, error_body=body)
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post(CHAT, "/v1/chat/completions")
        assert (answer.status, answer.body) == (400, body)
