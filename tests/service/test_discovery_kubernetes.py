"""Workers from EndpointSlices, against a server on TLS that speaks that part of the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from gateway_harness import eventually
from kubernetes_api import FakeApi, endpoint, endpoint_slice
from pydantic import ValidationError

from taut_service.config.settings import Discovery, KubernetesDiscovery, WorkerSettings
from taut_service.kubernetes import api_server
from taut_service.worker.discovery.endpoint_slices import SliceSet
from taut_service.worker.discovery.kubernetes import EndpointWatch


class Follower:
    """A running watch and what it applied."""

    def __init__(self, api: FakeApi, port: int | str = 8000) -> None:
        self.applied: list[list[str]] = []
        settings = KubernetesDiscovery(
            namespace="ns",
            service="vllm",
            port=port,
            api_server=f"https://127.0.0.1:{api.port}",
            service_account=api.folder,
        )
        self.watch = EndpointWatch(settings, self._apply, first_backoff_s=0.02)

    def _apply(self, workers: tuple[WorkerSettings, ...]) -> None:
        self.applied.append([worker.name for worker in workers])

    @property
    def last(self) -> list[str]:
        return self.applied[-1] if self.applied else []


@asynccontextmanager
async def following(api: FakeApi, port: int | str = 8000) -> AsyncIterator[Follower]:
    follower = Follower(api, port)
    task = asyncio.create_task(follower.watch.run())
    try:
        yield follower
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_list_and_every_change_are_applied(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        await api.put(endpoint_slice("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)))
        async with following(api) as follower:
            await eventually(lambda: follower.last == ["10.0.0.1:8000"])
            await api.put(endpoint_slice("b", endpoint("10.0.1.1", ready=None)))
            await eventually(lambda: follower.last == ["10.0.0.1:8000", "10.0.1.1:8000"])
            await api.put(endpoint_slice("a", endpoint("10.0.0.2")))
            await eventually(lambda: follower.last == ["10.0.0.2:8000", "10.0.1.1:8000"])
            await api.delete("a")
            await api.delete("b")
            await eventually(lambda: follower.last == [])
            assert api.lists == 1
            assert follower.watch.state.failures == 0


async def test_long_lists_come_in_pages(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        api.page = 2
        for i in range(5):
            await api.put(endpoint_slice(f"s{i}", endpoint(f"10.0.0.{i}")))
        async with following(api) as follower:
            await eventually(lambda: len(follower.last) == 5)
            assert api.lists == 3
            assert len(follower.applied) == 1, "a half list is never applied"


async def test_a_bookmark_moves_the_version(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api, following(api) as follower:
        await eventually(lambda: api.watches)
        await api.bookmark()
        marked = api.version
        await asyncio.sleep(0.05)
        api.drop_connections()
        await eventually(lambda: len(api.watches) > 1)
        assert api.watches[-1] == marked
        assert api.lists == 1
        assert follower.watch.state.failures >= 1


async def test_a_watch_that_has_ended_goes_on_from_its_version(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        follower = Follower(api)
        follower.watch.server.watch_s = 1
        task = asyncio.create_task(follower.watch.run())
        await eventually(lambda: len(api.watches) == 2)
        await api.put(endpoint_slice("a", endpoint("10.0.0.1")))
        await eventually(lambda: follower.last == ["10.0.0.1:8000"])
        task.cancel()
        assert api.lists == 1
        assert follower.watch.state.failures == 0


async def test_a_server_that_ends_every_watch_is_not_asked_without_a_pause(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        follower = Follower(api)
        follower.watch.server.watch_s = 0
        task = asyncio.create_task(follower.watch.run())
        await asyncio.sleep(1)
        task.cancel()
        # The mean pause here is 10 ms.
        assert 1 < len(api.watches) < 200


@pytest.mark.parametrize("how", ["status", "event"])
async def test_gone_means_list_again(tmp_path: Path, how: str) -> None:
    async with FakeApi(tmp_path) as api:
        await api.put(endpoint_slice("a", endpoint("10.0.0.1")))
        async with following(api) as follower:
            await eventually(lambda: api.watches and follower.last == ["10.0.0.1:8000"])
            if how == "status":
                del api.slices["a"]
                api.slices["b"] = endpoint_slice("b", endpoint("10.0.0.9"))
                await api.compact()
                api.drop_connections()
            else:
                api.slices["b"] = endpoint_slice("b", endpoint("10.0.0.9"))
                await api.error(410)
            await eventually(lambda: "10.0.0.9:8000" in follower.last)
            assert api.lists == 2
            assert ("10.0.0.1:8000" in follower.last) == (how == "event")


async def test_the_set_survives_an_outage_and_the_watch_goes_on(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        await api.put(endpoint_slice("a", endpoint("10.0.0.1")))
        async with following(api) as follower:
            await eventually(lambda: api.watches)
            await api.stop()
            await eventually(lambda: follower.watch.state.failures >= 3)
            assert follower.applied == [["10.0.0.1:8000"]]
            assert [worker.name for worker in follower.watch.state.workers] == ["10.0.0.1:8000"]
            await api.start()
            await api.put(endpoint_slice("a", endpoint("10.0.0.2")))
            await eventually(lambda: follower.last == ["10.0.0.2:8000"], 10)
            assert follower.watch.state.detail == ""


@pytest.mark.parametrize("status", [403, 429, 500, 503])
async def test_an_error_status_is_tried_again(tmp_path: Path, status: int) -> None:
    async with FakeApi(tmp_path) as api:
        api.fail_with = status
        await api.put(endpoint_slice("a", endpoint("10.0.0.1")))
        async with following(api) as follower:
            await eventually(lambda: follower.watch.state.failures >= 2)
            assert follower.watch.state.detail == f"the API server answered {status} Boom"
            api.fail_with = None
            await eventually(lambda: follower.last == ["10.0.0.1:8000"])


async def test_a_replaced_token_is_used(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        api.token = "token-2"
        async with following(api) as follower:
            # Not api.refused: the server has counted before its answer is read.
            await eventually(lambda: follower.watch.state.failures >= 1)
            assert api.refused >= 1
            assert "401 Unauthorized" in follower.watch.state.detail
            assert "token-1" not in follower.watch.state.detail
            (tmp_path / "token").write_text("token-2")
            await eventually(lambda: api.watches)


@pytest.mark.parametrize(
    "garbage", [b"not json\n", b"[1]\n", b'{"type":"ODD","object":{"metadata":{}}}\n', b"{}\n"]
)
async def test_garbage_in_the_watch_is_survived_by_a_new_list(
    tmp_path: Path, garbage: bytes
) -> None:
    async with FakeApi(tmp_path) as api:
        await api.put(endpoint_slice("a", endpoint("10.0.0.1")))
        async with following(api) as follower:
            await eventually(lambda: api.watches)
            api.garbage = garbage
            await api.put(endpoint_slice("a", endpoint("10.0.0.2")))
            await eventually(lambda: api.lists >= 2)
            await eventually(lambda: follower.last == ["10.0.0.2:8000"])


async def test_a_server_of_another_authority_is_not_trusted(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        Authority().write(tmp_path)
        async with following(api) as follower:
            await eventually(lambda: follower.watch.state.failures >= 1)
            assert "CERTIFICATE_VERIFY_FAILED" in follower.watch.state.detail
            assert api.lists == 0


async def test_missing_service_account_is_said(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        (tmp_path / "token").unlink()
        async with following(api) as follower:
            await eventually(lambda: follower.watch.state.failures >= 1)
            assert "No such file" in follower.watch.state.detail


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (whole(502, b"<html>Bad Gateway</html>"), "the API server answered 502"),
        (whole(500, b'["oh"]'), "the API server answered 500"),
        (whole(200, b'{"items": [], "metadata": {}}'), "the list has no resourceVersion"),
        (whole(200, b'{"items": [{"metadata": {}}], "metadata": {}}'), "a slice has no name"),
        (whole(200, b"[" + b" " * 3000 + b"]"), "the answer is too long"),
    ],
)
async def test_an_answer_that_is_no_list_is_said(
    tmp_path: Path, raw: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "MAX_DOCUMENT_BYTES", 2000)
    async with FakeApi(tmp_path) as api:
        api.raw = raw
        async with following(api) as follower:
            await eventually(lambda: follower.watch.state.detail == told)
            assert follower.applied == []


async def test_a_line_of_the_watch_without_an_end_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "MAX_LINE_BYTES", 2000)
    async with FakeApi(tmp_path) as api, following(api) as follower:
        await eventually(lambda: api.watches)
        api.garbage = b"x" * 3000
        await api.bookmark()
        await eventually(lambda: follower.watch.state.failures >= 1)
        assert follower.watch.state.detail == "a line of the watch is too long"


async def test_an_error_within_the_watch_is_said(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api, following(api) as follower:
        await eventually(lambda: api.watches)
        await api.error(500, "InternalError")
        told = "the API server answered 500 InternalError"
        await eventually(lambda: follower.watch.state.detail == told)


async def test_a_refused_watch_is_said(tmp_path: Path) -> None:
    """The account may list and not watch, which its role forgot."""
    async with FakeApi(tmp_path) as api, following(api) as follower:
        await eventually(lambda: api.watches)
        api.fail_with = 403
        api.drop_connections()
        told = "the API server answered 403 Boom"
        await eventually(lambda: follower.watch.state.detail == told)


async def test_an_authority_that_is_no_certificate_is_said(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        (tmp_path / "ca.crt").write_text("not PEM")
        async with following(api) as follower:
            told = f"{tmp_path}/ca.crt is not a PEM certificate"
            await eventually(lambda: follower.watch.state.detail == told)
            assert api.lists == 0


async def test_a_server_that_takes_the_connection_and_is_silent_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "CONNECT_S", 0.05)
    async with FakeApi(tmp_path) as api:
        await api.stop()
        silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", api.port)
        async with following(api) as follower:
            told = "no connection within 0.05 s"
            await eventually(lambda: follower.watch.state.detail == told)
        silent.close()


def slices(port: int | str, *items: dict[str, Any]) -> list[str]:
    kept = SliceSet(port)
    for item in items:
        kept.put(item)
    return [worker.url for worker in kept.workers()]


def test_a_pod_of_two_families_counts_once() -> None:
    six = endpoint_slice("six", endpoint("fd00::1", uid="u1"), family="IPv6")
    four = endpoint_slice("four", endpoint("10.0.0.1", uid="u1"))
    assert slices(8000, six, four) == ["http://10.0.0.1:8000"]
    assert slices(8000, six) == ["http://[fd00::1]:8000"]


def test_a_port_is_found_by_name() -> None:
    item = endpoint_slice("a", endpoint("10.0.0.1"), port=9000)
    assert slices("http", item) == ["http://10.0.0.1:9000"]
    assert slices("absent", item) == []
    assert slices(8000, item) == ["http://10.0.0.1:8000"]


def test_an_empty_slice_is_fine() -> None:
    item = {"metadata": {"name": "a"}, "addressType": "IPv4", "endpoints": None, "ports": None}
    assert slices("http", item) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("api_server", "http://10.0.0.1"),
        ("api_server", "https://10.0.0.1/api"),
        ("namespace", "a/b"),
        ("service", "a&b"),
        ("port", "Not a name"),
        ("port", 0),
    ],
)
def test_wrong_settings_are_refused(key: str, value: object) -> None:
    good: dict[str, Any] = {"namespace": "ns", "service": "vllm", "port": 8000}
    KubernetesDiscovery.model_validate(good)
    with pytest.raises(ValidationError):
        KubernetesDiscovery.model_validate({**good, key: value})


@pytest.mark.parametrize("keys", [(), ("dns", "kubernetes")])
def test_one_source_of_workers_is_asked_for(keys: tuple[str, ...]) -> None:
    each: dict[str, Any] = {
        "dns": {"host": "vllm", "port": 8000},
        "kubernetes": {"namespace": "ns", "service": "vllm", "port": 8000},
    }
    with pytest.raises(ValidationError, match="give either 'dns' or 'kubernetes'"):
        Discovery.model_validate({key: each[key] for key in keys})
