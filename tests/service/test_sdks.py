"""The makers' own client libraries read our answers, our streams and our errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from anthropic.types import MessageParam
from gateway_harness import gateway, settings_for
from mock_engine import Faults, MockEngine
from node_sdk import needs_node_sdk, run_node

SAID: list[MessageParam] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def clients(
    faults: Faults,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url)) as harness:
        url = f"http://127.0.0.1:{harness.port}"
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as other,
        ):
            yield one, other


async def test_responses() -> None:
    async with clients(Faults()) as (sdk, _):
        whole = await sdk.responses.create(model="m", input="hello")
        assert whole.output_text == " tok tok tok tok"
        assert whole.usage is not None
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (5, 4)
        stream = await sdk.responses.create(model="m", input="hello", stream=True)
        kinds = [event.type async for event in stream]
        assert kinds.count("response.output_text.delta") == 4
        assert kinds[-1] == "response.completed"


async def test_broken_response_stream_gives_an_error_event() -> None:
    async with clients(Faults(kill_at_byte=1400)) as (sdk, _):
        stream = await sdk.responses.create(model="m", input="hello", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "error"
        assert events[-1].code == "worker_lost"
        assert events[-1].sequence_number == len(events) - 1


async def test_broken_completion_stream_raises() -> None:
    async with clients(Faults(kill_at_byte=400, tokens=20)) as (sdk, _):
        stream = await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        with pytest.raises(openai.APIError, match="broke off"):
            [part async for part in stream]


async def test_messages() -> None:
    async with clients(Faults()) as (_, sdk):
        whole = await sdk.messages.create(model="m", max_tokens=8, messages=SAID)
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (3, 4)
        async with sdk.messages.stream(model="m", max_tokens=8, messages=SAID) as stream:
            message = await stream.get_final_message()
        (block,) = message.content
        assert block.type == "text"
        assert block.text == " tok tok tok tok"
        assert message.usage.output_tokens == 4


async def test_broken_message_stream_raises() -> None:
    async with clients(Faults(kill_at_byte=600)) as (_, sdk):
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            async with sdk.messages.stream(model="m", max_tokens=8, messages=SAID) as stream:
                await stream.get_final_message()


@pytest.mark.parametrize(
    ("model", "max_tokens", "status", "error"),
    [
        ("nope", 8, 200, anthropic.NotFoundError),
        ("m", 65, 200, anthropic.BadRequestError),
        ("m", 8, 400, anthropic.BadRequestError),
        ("m", 8, 500, anthropic.InternalServerError),
    ],
)
async def test_message_errors_have_their_classes(
    model: str, max_tokens: int, status: int, error: type[anthropic.APIStatusError]
) -> None:
    async with clients(Faults(status=status)) as (_, sdk):
        with pytest.raises(error) as raised:
            await sdk.messages.create(model=model, max_tokens=max_tokens, messages=SAID)
        body = raised.value.body
        assert isinstance(body, dict)
        assert body["request_id"] == raised.value.response.headers["x-request-id"]


_NODE_STREAM = """
const parts = await client.chat.completions.create({
  model, messages: [{role: "user", content: "hello"}], stream: true,
  stream_options: {include_usage: true},
});
let text = "", tokens = 0;
for await (const part of parts) {
  text += part.choices[0]?.delta?.content ?? "";
  tokens = part.usage?.completion_tokens ?? tokens;
}
return {text, tokens};
"""


@needs_node_sdk
@pytest.mark.parametrize(
    ("faults", "model", "found"),
    [
        (Faults(), "m", {"text": " tok tok tok tok", "tokens": 4}),
        (Faults(), "other", {"error": "NotFoundError"}),
        (Faults(status=500), "m", {"error": "InternalServerError"}),
        (Faults(kill_at_byte=400, tokens=20), "m", {"error": "APIError"}),
    ],
    ids=["whole", "no such model", "worker fails", "broken off"],
)
async def test_openai_s_library_for_node(faults: Faults, model: str, found: dict[str, object]):
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url)) as harness:
        url = f"http://127.0.0.1:{harness.port}"
        said = await asyncio.to_thread(run_node, url, model, _NODE_STREAM)
        assert said.pop("message", "x"), "an error says something"
        assert said == found
