"""The mock engine: its plans as data, its strict reader, and one engine as a process."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from taut_deploy.bench.gateway_process import Running, start_engine
from taut_deploy.bench.mock_answers import GARBAGE, STREAM_HEAD, plan, whole
from taut_deploy.bench.mock_behaviour import Behaviour
from taut_deploy.bench.mock_strict import what_is_wrong
from taut_deploy.ports import free_port

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Running]]:
    port = free_port()
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    running = start_engine([port], {0, 1}, log, strict=True)
    yield port, running
    running.stop()


def steps(stream: bool = True, **fields: object) -> list[tuple[float, bytes, str]]:
    return [tuple(step) for step in plan(Behaviour().changed(fields), True, stream, False)]


def test_stream_is_head_events_and_end() -> None:
    found = steps(chunks=3, ttft_s=1, itl_s=0.5)
    assert [delay for delay, _, _ in found] == [1, 0, 0.5, 0.5, 0]
    assert found[0][1] == STREAM_HEAD
    assert found[-1][1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert [action for _, _, action in found] == ["", "", "", "", "done"]


def test_whole_answer_waits_for_all_of_its_tokens() -> None:
    assert steps(stream=False, chunks=4, ttft_s=1, itl_s=0.5) == [
        (3.0, whole(Behaviour(chunks=4, ttft_s=1, itl_s=0.5), True), "done")
    ]


@pytest.mark.parametrize("fault", ["stall", "close", "reset", "kill"])
@pytest.mark.parametrize("at_byte", [0, 1, 150, 300, 500])
def test_fault_strikes_at_exactly_that_byte(fault: str, at_byte: int) -> None:
    clean = b"".join(data for _, data, _ in steps())
    found = steps(fault=fault, at_byte=at_byte)
    assert b"".join(data for _, data, _ in found) == clean[:at_byte]
    assert [action for _, _, action in found][-1] == fault


def test_answer_shorter_than_the_place_of_the_fault_is_whole() -> None:
    assert steps(fault="reset", at_byte=10**6)[-1][2] == "done"


def test_trickle_sends_the_same_bytes_one_at_a_time() -> None:
    clean = b"".join(data for _, data, _ in steps(chunks=1))
    found = steps(chunks=1, fault="trickle", trickle_s=0.5)
    assert [data for _, data, _ in found] == [bytes([byte]) for byte in clean]
    assert all(delay >= 0.5 for delay, _, _ in found)


def test_hang_sends_nothing_and_garbage_is_not_http() -> None:
    assert steps(fault="hang") == [(0.0, b"", "stall")]
    assert steps(fault="garbage")[0][1] == GARBAGE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fault": "explode"}, "fault: 'explode' is not one of"),
        ({"ttft_s": "soon"}, "ttft_s: 'soon' does not fit"),
        ({"tokens": 3}, "tokens: unknown"),
        ({"chunks": -1}, "chunks: -1 is negative"),
        ({"fault_every": 0}, "fault_every: must be 1 or more"),
    ],
)
def test_wrong_behaviour_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Behaviour().changed(values)


def test_query_changes_one_request_and_ignores_strangers() -> None:
    assert Behaviour().for_query("chunks=7&x=1&fault=reset") == Behaviour(chunks=7, fault="reset")


@pytest.mark.parametrize(
    ("head", "body", "fragment"),
    [
        (b"", b'{"model":"m"}', None),
        (b"transfer-encoding: chunked\r\n", b"", "llhttp"),
        (b"te: trailers\r\n", b'{"model":"m"}', "hop-by-hop"),
        (b"host: u\r\n", b'{"model":"m"}', "host appears 2 times"),
        (b"x: \x01\r\n", b'{"model":"m"}', "llhttp"),
        (b"", b'{"model":"\\ud800"}', "not strict JSON"),
        (b"", b'{"model":NaN}', "not strict JSON"),
        (b"", b"[1]", "not an object with a model"),
        (b"", b'{"model":"\xff"}', "not strict JSON"),
    ],
)
def test_strict_reader_says_what_is_wrong(head: bytes, body: bytes, fragment: str | None) -> None:
    reason = what_is_wrong(HEAD + head + b"content-length: %d\r\n\r\n" % len(body), body)
    assert (reason is None) == (fragment is None)
    assert fragment is None or fragment in str(reason)


def test_engine_speaks_like_vllm(engine: tuple[int, Running]) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{engine[0]}") as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "m"
        answer = client.post("/v1/chat/completions", json=CHAT).json()
        assert answer["choices"][0]["message"]["content"] == " tok" * 4
        asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        text = client.post("/v1/chat/completions", json=asked).text
        events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        assert [len(event["choices"]) for event in events] == [1, 1, 1, 1, 0]
        assert events[-1]["usage"]["completion_tokens"] == 4
        metrics = client.get("/metrics").text
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f'vllm:{name}{{model_name="m"' in metrics


def test_only_the_header_of_that_name_is_the_length(engine: tuple[int, Running]) -> None:
    url = f"http://127.0.0.1:{engine[0]}"
    strange = {"x-content-length": "5", "note": "content-length: 7"}
    answer = httpx.post(f"{url}/v1/completions", json={"model": "m"}, headers=strange)
    assert answer.status_code == 200
    assert httpx.get(f"{url}/mock/state").json()["malformed"] == []


def test_engine_queues_to_its_capacity_and_then_refuses(engine: tuple[int, Running]) -> None:
    url = f"http://127.0.0.1:{engine[0]}"
    httpx.post(f"{url}/mock/behaviour", json={"capacity": 1, "queue": 1, "ttft_s": 0.3})
    request = json.dumps(CHAT).encode()
    data = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    data += b"content-length: %d\r\n\r\n%b" % (len(request), request)
    plugs = [socket.create_connection(("127.0.0.1", engine[0])) for _ in range(3)]
    try:
        for plug in plugs:
            plug.sendall(data)
            time.sleep(0.05)
        state = httpx.get(f"{url}/mock/state").json()
        assert (state["open"], state["waiting"], state["refused"]) == (2, 1, 1)
        assert [plug.recv(65536)[9:12] for plug in reversed(plugs)] == [b"503", b"200", b"200"]
    finally:
        for plug in plugs:
            plug.close()
        httpx.post(f"{url}/mock/behaviour", json={"capacity": 0, "ttft_s": 0})
    assert httpx.get(f"{url}/mock/state").json()["malformed"] == []


@pytest.mark.parametrize(
    "data", [b"NONSENSE\r\n\r\n", HEAD + b"content-length: -5\r\n\r\n{}", HEAD + b"\r\n{}"]
)
def test_request_without_readable_framing_is_written_down(tmp_path: Path, data: bytes) -> None:
    port = free_port()
    running = start_engine([port], {0, 1}, tmp_path / "log", strict=True)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plug:
            plug.sendall(data)
            plug.recv(65536)
        state = httpx.get(f"http://127.0.0.1:{port}/mock/state").json()
        assert state["malformed_requests"] >= 1
    finally:
        running.stop()


def test_engine_tells_who_left(engine: tuple[int, Running]) -> None:
    url = f"http://127.0.0.1:{engine[0]}"
    with pytest.raises(httpx.ReadTimeout):
        body = {**CHAT, "note": "mark:leaver-1"}
        httpx.post(f"{url}/v1/chat/completions?fault=hang", json=body, timeout=0.2)
    time.sleep(0.1)
    assert httpx.get(f"{url}/mock/open").json() == []
    aborts = httpx.get(f"{url}/mock/aborts").json()
    assert [mark for mark, _ in aborts] == ["leaver-1"]
    assert 0 < time.monotonic() - aborts[0][1] < 5


def test_kill_ends_the_process(tmp_path: Path) -> None:
    port = free_port()
    running = start_engine([port], {0, 1}, tmp_path / "log", "fault=kill", "at_byte=10")
    try:
        with pytest.raises(httpx.TransportError):
            httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"model": "m"}, timeout=5)
        assert running._process.wait(5) == -signal.SIGKILL
    finally:
        running.stop()


def test_wrong_setting_is_one_line(tmp_path: Path) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "taut_deploy.bench.mock_engine", "--port", "0", "--set", "x=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--set: x: unknown" in done.stderr
    assert "Traceback" not in done.stderr
