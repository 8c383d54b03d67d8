"""Requests that two servers in a row may read differently: one reading, or none.

Source: RFC 9112 §2.2 to §7.1 and the classes of request smuggling (CL.TE, TE.CL, TE.TE, obs-fold,
bare LF, chunk sizes). A request of :data:`REFUSED` ends in a 4xx and a closed connection and no
worker hears of it; one of :data:`UNAMBIGUOUS` reaches a worker exactly once, well formed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from live_processes import House, call, house
from raw_client import Client, exchange, post

BODY = b'{"model":"m","prompt":"a"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n\r\n" % len(BODY)
CHUNKED_BODY = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
HIDDEN = HEAD + LENGTH + BODY
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
"""Java's client sends it with its first request to a server."""
TE = b"transfer-encoding: chunked\r\n"


def chunked(sizes: bytes) -> bytes:
    """A chunked request with this text for a body."""
    return HEAD + TE + b"\r\n" + sizes


REFUSED: dict[str, bytes] = {
    "CL.TE": HEAD + TE + LENGTH + CHUNKED_BODY,
    "TE.CL hides a request": HEAD + TE + b"content-length: 4\r\n\r\n" + CHUNKED_BODY + HIDDEN,
    "TE.TE": HEAD + TE + b"transfer-encoding: identity\r\n\r\n" + CHUNKED_BODY,
    "TE unknown": HEAD + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKED_BODY,
    "TE space before colon": HEAD + b"transfer-encoding : chunked\r\n\r\n" + CHUNKED_BODY,
    "TE vertical tab": HEAD + b"transfer-encoding: \x0bchunked\r\n\r\n" + CHUNKED_BODY,
    "TE chunked not last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKED_BODY,
    "TE gzip as well": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKED_BODY,
    "TE quoted": HEAD + b'transfer-encoding: "chunked"\r\n\r\n' + CHUNKED_BODY,
    "TE folded": HEAD + b"transfer-encoding:\r\n chunked\r\n\r\n" + CHUNKED_BODY,
    "TE in HTTP/1.0": (HEAD + TE).replace(b"1.1", b"1.0") + LENGTH + CHUNKED_BODY,
    "obs-fold": HEAD + b"x-a: b\r\n c\r\n" + LENGTH + BODY,
    "bare LF everywhere": (HEAD + LENGTH).replace(b"\r\n", b"\n") + BODY,
    "bare LF once": HEAD + b"x-a: b\n" + LENGTH + BODY,
    "bare CR": HEAD + b"x-a: b\rcontent-length: 0\r\n" + LENGTH + BODY,
    "CL twice, equal": HEAD + LENGTH[:-2] + LENGTH + BODY,
    "CL twice, different": HEAD + b"content-length: 0\r\n" + LENGTH + BODY,
    "CL list": HEAD + b"content-length: 26, 26\r\n\r\n" + BODY,
    "CL negative": HEAD + b"content-length: -1\r\n\r\n" + BODY,
    "CL with plus": HEAD + b"content-length: +26\r\n\r\n" + BODY,
    "CL hexadecimal": HEAD + b"content-length: 0x1a\r\n\r\n" + BODY,
    "CL beyond 64 bits": HEAD + b"content-length: 99999999999999999999999999\r\n\r\n" + BODY,
    "CL empty": HEAD + b"content-length: \r\n\r\n" + BODY,
    "CL with space": HEAD + b"content-length: 2 6\r\n\r\n" + BODY,
    "CL space before colon": HEAD + LENGTH.replace(b":", b" :") + BODY,
    "chunk ended by bare LF": chunked(CHUNKED_BODY.replace(b"\r\n", b"\n", 1)),
    "chunk size negative": chunked(b"-" + CHUNKED_BODY),
    "chunk size 0x": chunked(b"0x" + CHUNKED_BODY),
    "chunk size beyond 64 bits": chunked(b"fffffffffffffffff\r\n" + BODY),
    "chunk longer than said": chunked(b"4\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk without CRLF": chunked(b"%x\r\n%b0\r\n\r\n" % (len(BODY), BODY)),
    "CL in a trailer": chunked(CHUNKED_BODY[:-2] + b"content-length: 5\r\n\r\n"),
    "NUL in a value": HEAD + b"x-a: a\x00b\r\n" + LENGTH + BODY,
    "control character in a value": HEAD + b"x-a: \x7f\x01\r\n" + LENGTH + BODY,
    "space in a name": HEAD + b"x a: b\r\n" + LENGTH + BODY,
    "no name": HEAD + b": b\r\n" + LENGTH + BODY,
    "no colon": HEAD + b"xab\r\n" + LENGTH + BODY,
    "space before the first header": HEAD.replace(b"\r\nhost", b"\r\n host") + LENGTH + BODY,
    "no Host": HEAD.replace(b"host: t\r\n", b"") + LENGTH + BODY,
    "two Hosts": HEAD + b"host: u\r\n" + LENGTH + BODY,
    "CRLF in the target": HEAD.replace(b" HTTP", b"\r\nx: y HTTP") + LENGTH + BODY,
    "tab in the target": HEAD.replace(b"completions", b"completions?a=\tb") + LENGTH + BODY,
    "HTTP/0.9": b"POST /v1/completions\r\n" + HEAD.partition(b"\r\n")[2] + LENGTH + BODY,
    "HTTP/9.9": HEAD.replace(b"1.1", b"9.9") + LENGTH + BODY,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT elsewhere:80 HTTP/1.1\r\nhost: t\r\n\r\n" + HIDDEN,
    "invalid UTF-8 in the target": HEAD.replace(b"completions", b"completions?a=\xff") + LENGTH,
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
}
UNAMBIGUOUS: dict[str, bytes] = {
    "plain": HEAD + LENGTH + BODY,
    "chunked": chunked(CHUNKED_BODY),
    "TE after a tab": HEAD + b"transfer-encoding:\tchunked\r\n\r\n" + CHUNKED_BODY,
    "chunk extension": chunked(CHUNKED_BODY.replace(b"\r\n", b";a=b\r\n", 1)),
    "absolute target": HEAD.replace(b" /v1", b" http://t/v1") + LENGTH + BODY,
    "encoded CRLF in the query": HEAD.replace(b" HTTP", b"?a=%0d%0aX:%20y HTTP") + LENGTH + BODY,
    "Connection names Content-Length": HEAD + b"connection: content-length\r\n" + LENGTH + BODY,
    "Connection names Host": HEAD + b"connection: host, x-request-id\r\n" + LENGTH + BODY,
    "UTF-8 in a value": HEAD + "x-a: é\r\n".encode() + LENGTH + BODY,
    "Latin-1 in a value": HEAD + b"x-a: \xe9\xff\r\n" + LENGTH + BODY,
    "hop-by-hop fields": HEAD
    + b"te: trailers\r\nkeep-alive: 5\r\nproxy-connection: x\r\n"
    + LENGTH
    + BODY,
    "Expect": HEAD + b"expect: 100-continue\r\n" + LENGTH + BODY,
}
BAD_BODIES: dict[str, bytes] = {
    "invalid UTF-8": b'{"model":"m","prompt":"\xff\xfe"}',
    "overlong UTF-8": b'{"model":"m","prompt":"\xc0\xaf"}',
    "UTF-16": '{"model":"m","prompt":"a"}'.encode("utf-16"),
    "lone surrogate": b'{"model":"m","prompt":"\\ud800"}',
    "NaN": b'{"model":"m","prompt":"a","temperature":NaN}',
    "cut short": BODY[:-1],
    "two documents": BODY + BODY,
    "deep nesting": b'{"model":"m","prompt":' + b"[" * 100_000,
    "NUL": b'{"model":"m","prompt":"\x00"}',
    "huge number": b'{"model":"m","prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with house(tmp_path_factory.mktemp("smuggling")) as found:
        yield found


def statuses(answer: bytes) -> list[int]:
    """Status of every final response in what came back."""
    found = (int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3})", answer))
    return [code for code in found if code >= 200]


@pytest.mark.parametrize("name", REFUSED)
async def test_ambiguous_request_is_refused_and_reaches_no_worker(home: House, name: str) -> None:
    before = home.engines[0].state()["started"]
    answer = await exchange(home.port, REFUSED[name], patience_s=1)
    assert len(statuses(answer)) == 1
    assert 400 <= statuses(answer)[0] < 500 or statuses(answer)[0] in (501, 505)
    assert home.engines[0].state()["started"] == before


@pytest.mark.parametrize("name", REFUSED)
async def test_connection_is_closed_after_a_refusal(home: House, name: str) -> None:
    # A second request behind the refused one must not be answered.
    answer = await exchange(home.port, REFUSED[name] + HIDDEN, patience_s=1)
    assert 200 not in statuses(answer)


@pytest.mark.parametrize("name", [name for name, each in REFUSED.items() if HEAD in each])
async def test_offer_of_another_protocol_makes_nothing_clear(home: House, name: str) -> None:
    offered = REFUSED[name].replace(HEAD, HEAD + OFFER, 1)
    before = home.engines[0].state()["started"]
    answer = await exchange(home.port, offered + HIDDEN, patience_s=1)
    assert len(statuses(answer)) == 1
    assert 400 <= statuses(answer)[0] < 500
    assert home.engines[0].state()["started"] == before


@pytest.mark.parametrize("name", UNAMBIGUOUS)
async def test_unusual_but_clear_request_reaches_a_worker_once(home: House, name: str) -> None:
    before = home.engines[0].state()["started"]
    answer = await exchange(home.port, UNAMBIGUOUS[name], patience_s=1)
    assert statuses(answer) == [200]
    assert home.engines[0].state()["started"] - before == 1
    assert home.malformed() == []


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_body_that_is_not_strict_json_reaches_no_worker(home: House, name: str) -> None:
    before = home.engines[0].state()["started"]
    answer = await post(home.port, BAD_BODIES[name])
    assert answer.status == 400
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert home.engines[0].state()["started"] == before


async def test_pipelined_requests_are_answered_in_order(home: House) -> None:
    first = HEAD + LENGTH.replace(b"26", b"2") + b"[]"
    answer = await exchange(home.port, first + HIDDEN, patience_s=1)
    assert statuses(answer) == [400, 200]


async def test_upgrade_is_not_followed(home: House) -> None:
    upgrade = b"GET /v1/models HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    upgrade += b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
    before = home.engines[0].state()["started"]
    assert 101 not in statuses(await exchange(home.port, upgrade + HIDDEN, patience_s=1))
    assert home.engines[0].state()["started"] == before


@pytest.mark.parametrize(
    "framed", [LENGTH + BODY, TE + b"\r\n" + CHUNKED_BODY], ids=["length", "chunked"]
)
@pytest.mark.parametrize("pause_s", [0, 0.2])
async def test_body_of_a_declined_upgrade_is_no_request(
    home: House, framed: bytes, pause_s: float
) -> None:
    """A parser that takes what follows such a head for another protocol loses the body."""
    before = home.engines[0].state()["started"]
    head, _, body = (HEAD + OFFER + framed).partition(b"\r\n\r\n")
    client = await Client.connect(home.port)
    for _ in range(2):
        client.writer.write(head + b"\r\n\r\n")
        await asyncio.sleep(pause_s)
        client.writer.write(body)
        assert (await client.answer()).status == 200
    client.close()
    assert home.engines[0].state()["started"] - before == 2


@pytest.mark.parametrize(("target", "status"), [(b"other:443", 400), (b"/", 404)])
async def test_what_follows_connect_is_not_read(home: House, target: bytes, status: int) -> None:
    tunnel = b"CONNECT %b HTTP/1.1\r\nhost: t\r\n" % target + LENGTH + BODY + HIDDEN
    before = home.engines[0].state()["started"]
    answer = await exchange(home.port, tunnel, patience_s=1)
    assert statuses(answer) == [status]
    assert home.engines[0].state()["started"] == before


async def test_gateway_is_whole_afterwards(home: House) -> None:
    await home.quiet()
    assert home.gateway.problems() == []
    assert home.malformed() == []
    assert call(home.port, "GET", "/health/ready")[0] == 200
