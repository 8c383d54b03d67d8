"""Compressed request bodies: decoded within bounds, sent on as plain JSON, bombs refused early."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import zlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from gateway_harness import COMPLETION, Harness, gateway, settings_for
from mock_engine import MockEngine
from patience import within

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_BODY = 4 * 1024 * 1024


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZIP", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw": ("deflate", raw_deflate),
    "zstd": ("zstd", zstd.compress),
}


def words(size: int) -> str:
    """Text that compresses as text does."""
    chance = random.Random(7)
    known = ["".join(chance.choices("abcdefghijklmnopqrst", k=5)) for _ in range(5000)]
    return " ".join(chance.choices(known, k=size // 6 + 1))[:size]


async def send(
    harness: Harness, content: bytes | AsyncIterator[bytes], coding: str
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{harness.port}") as client:
        headers = {"content-encoding": coding, "content-type": "application/json"}
        return await client.post("/v1/completions", content=content, headers=headers, timeout=20)


async def in_pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
        await asyncio.sleep(0)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [5, 300_000])
@pytest.mark.parametrize("name", CODINGS)
async def test_worker_gets_the_decoded_body(name: str, size: int, chunked: bool) -> None:
    coding, pack = CODINGS[name]
    async with MockEngine() as engine:
        settings = settings_for(engine.url, limits={"chars_per_token": 10_000})
        async with gateway(settings) as harness:
            body = json.dumps({**COMPLETION, "prompt": words(size)}).encode()
            packed = pack(body)
            answer = await send(harness, in_pieces(packed, 1000) if chunked else packed, coding)
            assert answer.status_code == 200, answer.text
            seen = engine.seen[-1]
            assert seen.body == body
            assert "content-encoding" not in seen.headers
            assert seen.headers["content-length"] == str(len(body))


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, gzip", "aws-chunked", "gzip;q=1"])
async def test_other_codings_are_named_and_refused(coding: str) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await send(harness, b"whatever", coding)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (415, "unsupported_encoding")
        assert repr(coding) in error["message"]
        assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
        assert not engine.seen


async def test_identity_is_no_coding() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await send(harness, json.dumps(COMPLETION).encode(), "Identity")
        assert answer.status_code == 200
        assert "content-encoding" not in engine.seen[-1].headers


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize(
    ("spoil", "words_of_it"),
    [
        (lambda packed: packed[:-3], "is not complete"),
        (lambda packed: packed + b"more", "goes on behind its end"),
        (lambda packed: packed + packed, "goes on behind its end"),
        (lambda packed: b"\xff" + packed, "is damaged"),
        (lambda packed: b"", "is not complete"),
    ],
)
async def test_damaged_bodies_are_refused(
    name: str, spoil: Callable[[bytes], bytes], words_of_it: str
) -> None:
    coding, pack = CODINGS[name]
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await send(harness, spoil(pack(json.dumps(COMPLETION).encode())), coding)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_encoding"), error
        assert words_of_it in error["message"]
        assert not engine.seen


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a" * (3 * 1024 * 1024), "100 times its size"),
        (words(1_000_000) + "a" * MAX_BODY, f"larger than {MAX_BODY} bytes"),
    ],
    ids=["ratio", "size"],
)
async def test_bombs_are_refused(name: str, prompt: str, reason: str) -> None:
    coding, pack = CODINGS[name]
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await send(harness, pack(json.dumps({"prompt": prompt}).encode()), coding)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (413, "request_too_large"), error
        assert reason in error["message"]
        assert not engine.seen


async def test_bomb_is_refused_before_it_has_been_sent() -> None:
    """A gigabyte of zeros in a megabyte of zlib: the answer comes after the first piece."""
    packer = zlib.compressobj()
    piece = packer.compress(bytes(64 * 1024 * 1024)) + packer.flush(zlib.Z_SYNC_FLUSH)
    assert len(piece) < 80_000
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        head = {"content-encoding": "deflate", "content-length": "1000000"}
        await client.send("POST", "/v1/completions", piece, head)
        answer = await within(5, client.answer())
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        client.close()


async def test_what_is_decoded_counts_as_held() -> None:
    """Three bodies of 300 KiB find room for two of them, whatever they are when they are sent."""
    body = json.dumps({**COMPLETION, "prompt": words(300_000)}).encode()
    packed = gzip.compress(body)
    limits = {
        "chars_per_token": 10_000, "max_body_bytes": 400_000, "max_inflight_bytes": 700_000,
    }  # fmt: skip
    async with MockEngine() as engine:
        engine.faults.latency_s = 0.5
        async with gateway(settings_for(engine.url, limits=limits)) as harness:
            answers = await asyncio.gather(*(send(harness, packed, "gzip") for _ in range(3)))
            assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
            engine.faults.latency_s = 0
            assert (await send(harness, packed, "gzip")).status_code == 200


async def test_zstd_window_is_bounded() -> None:
    """A frame of a few bytes may ask for a window of 128 MiB."""
    options = {zstd.CompressionParameter.window_log: 27}
    packer = zstd.ZstdCompressor(options=options)
    body = packer.compress(json.dumps(COMPLETION).encode(), zstd.ZstdCompressor.FLUSH_BLOCK)
    body += packer.flush(zstd.ZstdCompressor.FLUSH_FRAME)
    assert zstd.decompress(body) == json.dumps(COMPLETION).encode()
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await send(harness, body, "zstd")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encoding")


async def test_wrong_key_is_told_before_anything_is_decoded() -> None:
    keys = [{"name": "a", "sha256": "0" * 64}]
    async with MockEngine() as engine:
        settings = settings_for(engine.url, api_keys=keys)
        async with gateway(settings) as harness:
            assert (await send(harness, b"x", "br")).status_code == 401
