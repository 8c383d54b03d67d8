"""Every change of a rollout as a Kubernetes Event, against a server that speaks that API."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from admin_harness import Admin, administered
from gateway_harness import eventually
from kubernetes_api import FakeApi
from mock_reader import ReadingEngine
from rollout_calls import at_half, do, send, stands
from rollout_settings import settings_of

from taut_service.config.settings import KubernetesEvents, Settings
from taut_service.rollout import outbox
from taut_service.rollout.audit import GATEWAY, Entry, write_line
from taut_service.rollout.kubernetes_events import event_of, kubernetes_events
from taut_service.rollout.state import Rollout

NAME = "rel-taut-gateway"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PAUSE_S", 0.01)


def place(api: FakeApi) -> dict[str, Any]:
    root = f"https://127.0.0.1:{api.port}"
    account = {"api_server": root, "service_account": str(api.folder)}
    return {"namespace": "ns", "deployment": NAME, **account}


def settings_for(api: FakeApi, base: ReadingEngine, small: ReadingEngine, folder: Path) -> Settings:
    rollout = {"directory": str(folder / "journal"), "events": place(api)}
    return settings_of(base, small, rollout)


def line_of(phase: Any = "rolled_back", why: str = "harm: x", **changes: Any) -> Entry:
    state = Rollout("m", "small", "base", "1", phase, 10.0, 1_700_000_000.25, why)
    return write_line(None, changes.pop("event", "rolled_back"), GATEWAY, state, changes)


async def test_every_change_is_an_event_about_the_deployment(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api, ReadingEngine() as base, ReadingEngine() as small:
        api.deployments[NAME] = "u-1"
        async with administered(settings_for(api, base, small, tmp_path)) as admin:
            await do(admin, "start", candidate="small")
            await do(admin, "hold", why="lunch")
            await do(admin, "start", candidate="small")
            await send(admin, 20)
            await eventually(lambda: at_half(admin), 10)
            await do(admin, "rollback", why="a hunch")
        written = list(api.events.values())
    found = [(event["reason"], event["type"]) for event in written]
    assert found == [
        ("RolloutStarted", "Normal"),
        ("RolloutHeld", "Normal"),
        ("RolloutResumed", "Normal"),
        ("RolloutPromoted", "Normal"),
        ("RolloutRolledBack", "Warning"),
    ]
    assert [event["note"] for event in written[:2]] == [
        "m: small running at 0 %: started",
        "m: small held at 0 %: lunch",
    ]
    assert written[-1]["note"] == "m: small rolled_back at 0 %: a hunch"
    about = {"apiVersion": "apps/v1", "kind": "Deployment", "namespace": "ns", "name": NAME}
    assert all(event["regarding"] == {**about, "uid": "u-1"} for event in written)
    for event in written:
        kubernetes_validate.validate(event, "1.34", strict=True)


async def test_a_refused_event_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeApi(tmp_path) as api, ReadingEngine() as base, ReadingEngine() as small:
        api.deployments[NAME], api.fail_with = "u-1", 403
        with caplog.at_level(logging.INFO, "taut_service.rollout.outbox"):
            async with administered(settings_for(api, base, small, tmp_path)) as admin:
                await do(admin, "start", candidate="small")
                await do(admin, "hold")
                assert await stands(admin, "held")
                await eventually(lambda: failures(admin, 2), 10)
                api.fail_with = None
                await do(admin, "rollback", why="enough")
                await eventually(lambda: len(api.events) == 1, 10)
    said = [(record.levelname, record.message) for record in caplog.records]
    assert said == [
        (
            "ERROR",
            "rollout: Kubernetes is not told of changes: the API server answered 403 Boom: its "
            f"account needs 'get' on the Deployment {NAME} and 'create' on events of "
            "events.k8s.io",
        ),
        ("INFO", "rollout: Kubernetes is told again"),
    ]


async def failures(admin: Admin, count: int) -> bool:
    return bool(await admin.harness.metric("taut_rollout_event_failures_total") == count)


async def test_an_api_server_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api, ReadingEngine() as base, ReadingEngine() as small:
        settings = settings_for(api, base, small, tmp_path)
        await api.stop()
        async with administered(settings) as admin:
            assert (await do(admin, "start", candidate="small"))[0] == 200
            assert await stands(admin, "running")
            await eventually(lambda: failures(admin, 1), 10)


@pytest.mark.parametrize(
    ("uid", "status", "told"),
    [
        (None, None, "the API server answered 404"),
        ("", None, f"the Deployment {NAME} has no uid"),
        ("u-1", 500, "the API server answered 500 Boom"),
    ],
)
async def test_what_keeps_events_from_being_written_is_named(
    uid: str | None, status: int | None, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeApi(tmp_path) as api:
        api.fail_with = status
        if uid is not None:
            api.deployments[NAME] = uid
        events = kubernetes_events(KubernetesEvents.model_validate(place(api)))
        events.start()
        events.put(line_of())
        await events.close()
        assert (len(api.events), events.failures) == (0, 1)
    (record,) = caplog.records
    assert record.message == f"rollout: Kubernetes is not told of changes: {told}"


async def test_a_line_that_is_told_twice_is_one_event(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api:
        api.deployments[NAME] = "u-1"
        events = kubernetes_events(KubernetesEvents.model_validate(place(api)))
        events.start()
        for entry in (line_of(), line_of()):
            events.put(entry)
        await events.close()
        assert (len(api.events), events.failures) == (1, 0)


def test_a_note_is_cut_to_what_the_api_server_takes_at_a_whole_character() -> None:
    about = {"namespace": "ns", "name": NAME}
    event = event_of(line_of(why="é" * 2000), about, "host")
    assert len(event["note"].encode()) in (1023, 1024) and event["note"].endswith("é")
    assert event["eventTime"] == "2023-11-14T22:13:20.250000Z"
    assert len(event["metadata"]["name"]) <= 253


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"api_server": "http://x"}, "is not of the form https://host:port"),
        ({"deployment": "Not_A_Name"}, "deployment"),
        ({"extra": 1}, "extra"),
    ],
)
async def test_wrong_settings_are_refused(wrong: dict[str, Any], told: str, tmp_path: Path) -> None:
    async with ReadingEngine() as base, ReadingEngine() as small:
        events = {"namespace": "ns", "deployment": NAME, **wrong}
        with pytest.raises(ValueError, match=told):
            settings_of(base, small, {"directory": str(tmp_path), "events": events})
