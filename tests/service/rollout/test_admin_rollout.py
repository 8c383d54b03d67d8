"""The operator's commands, and gateways that share a rollout through Redis."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from admin_harness import Admin, administered
from gateway_harness import eventually
from mock_reader import Reading, ReadingEngine
from redis_process import redis_server
from rollout_calls import as_json, at_half, do, report, send, stands
from rollout_settings import ADMIN, KEYS, PLAIN, settings_of

from taut_service.config.settings import Settings


async def test_commands_their_order_and_what_they_refuse(tmp_path: Path) -> None:
    async with ReadingEngine() as base, ReadingEngine() as small:
        settings = settings_of(base, small, {"directory": str(tmp_path)})
        async with administered(settings) as admin:
            assert (await report(admin))["phase"] == "none"
            for command, body, status, code in (
                ("hold", {}, 409, "not_running"),
                ("rollback", {}, 409, "not_running"),
                ("start", {"candidate": "base"}, 404, "variant_not_found"),
                ("start", {"candidate": "smal"}, 404, "variant_not_found"),
                ("start", {"candidate": "small", "model": "x"}, 404, "model_not_found"),
                ("start", {}, 400, "invalid_value"),
                ("start", {"candidate": "small", "forse": True}, 400, "invalid_value"),
            ):
                found, refusal = await do(admin, command, **body)
                assert (found, refusal["error"]["code"]) == (status, code)
            status, moved = await do(admin, "start", candidate="small", model="other")
            assert (status, moved["model"], moved["phase"]) == (200, "m", "running")
            assert (await do(admin, "start", candidate="small"))[1]["error"]["code"] == (
                "rollout_active"
            )
            assert (await do(admin, "hold", why="lunch"))[1]["why"] == "lunch"
            await send(admin, 20)
            assert (await report(admin))["percent"] == 0
            assert (await do(admin, "start", candidate="small"))[1]["why"] == "resumed"
            await send(admin, 20)
            await eventually(lambda: at_half(admin), 10)
            assert (await do(admin, "rollback", why="a hunch"))[1]["percent"] == 0
            assert (await report(admin))["weights"] == {"base": 1, "small": 0}
            status, refused = await do(admin, "start", candidate="small")
            assert (status, refused["error"]["code"]) == (409, "cooldown")
            assert "a hunch" in refused["error"]["message"]
            assert (await do(admin, "start", candidate="small", force=True))[0] == 200
            answer = await admin.ask(
                "PUT", "/admin/models/m/weights", as_json({"weights": {"small": 0.25}})
            )
            assert answer.status == 200
            found = await report(admin)
            assert (found["phase"], found["weights"]["small"]) == ("manual", 0.25)
            history = (await admin.ask("GET", "/admin/rollout/history?limit=3")).json
            assert [e["event"] for e in history["entries"]] == ["rolled_back", "started", "manual"]
            assert history["lines"] == 7


async def test_weights_set_by_hand_end_a_rollout_and_without_one_leave_no_line(
    tmp_path: Path,
) -> None:
    async with ReadingEngine() as base, ReadingEngine() as small, ReadingEngine() as lone:
        settings = settings_of(base, small, {"directory": str(tmp_path)})
        document = settings.model_dump(mode="json")
        worker = {"name": "lone", "url": lone.url}
        document["models"].append({"name": "lone", "max_model_len": 64, "workers": [worker]})
        async with administered(Settings.model_validate(document)) as admin:
            for share, lines in ((0.2, 0), (0.3, 2), (0.4, 2)):
                body = as_json({"weights": {"small": share}})
                answer = await admin.ask("PUT", "/admin/models/m/weights", body)
                assert (answer.status, (await report(admin))["weights"]["small"]) == (200, share)
                history = (await admin.ask("GET", "/admin/rollout/history")).json
                assert history["lines"] == lines
                if not lines:
                    assert (await do(admin, "start", candidate="small"))[0] == 200
            status, refused = await do(admin, "start", model="lone", candidate="x")
            assert (status, refused["error"]["code"]) == (409, "no_baseline")
            assert "'lone' names no 'baseline'" in refused["error"]["message"]


async def test_only_an_admin_key_moves_traffic(tmp_path: Path) -> None:
    async with ReadingEngine() as base, ReadingEngine() as small:
        settings = settings_of(base, small, {"directory": str(tmp_path)}, api_keys=KEYS)
        async with administered(settings) as admin:
            for key, status in (("", 401), (PLAIN, 403), (ADMIN, 200)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                body = as_json({"model": "m", "candidate": "small"})
                answer = await admin.ask("POST", "/admin/rollout/start", body, headers)
                assert answer.status == status
            headers = {"authorization": f"Bearer {ADMIN}"}
            history = (await admin.ask("GET", "/admin/rollout/history", b"", headers)).json
            assert [(e["event"], e["actor"]) for e in history["entries"]] == [("started", "root")]


async def test_verdicts_for_argo_and_flagger_without_a_rollout() -> None:
    async with ReadingEngine() as base, ReadingEngine(Reading(harm=3.0)) as small:
        settings = settings_of(base, small, {"directory": "/nowhere"}).model_copy(
            update={"rollout": None}
        )
        path = "/admin/rollout/analysis?model=m&variant=small"
        async with administered(settings) as admin:
            first = (await admin.ask("GET", path)).json
            assert (first["verdict"], first["value"]) == ("INCONCLUSIVE", 0.5)
            assert (await admin.ask("POST", path)).status == 409
            await send(admin, 30)
            await eventually(lambda: verdict_is(admin, path, "FAIL"), 10)
            assert (await admin.ask("POST", path)).json["error"]["message"].startswith("FAIL: ")
            assert (await admin.ask("GET", path.replace("small", "base"))).status == 404
            assert (await admin.ask("POST", "/admin/rollout/start", b"{}")).status == 404


async def verdict_is(admin: Admin, path: str, verdict: str) -> bool:
    return bool((await admin.ask("GET", path)).json["verdict"] == verdict)


async def test_a_paused_baseline_promotes_nothing(tmp_path: Path) -> None:
    async with ReadingEngine() as base, ReadingEngine() as small:
        settings = settings_of(base, small, {"directory": str(tmp_path)})
        async with administered(settings) as admin:
            await do(admin, "start", candidate="small")
            await send(admin, 40)
            await admin.ask("POST", "/admin/workers/base-0/drain")
            await eventually(lambda: waits_for(admin, "paused: no worker of 'base' is ready"))
            percent = (await report(admin))["percent"]
            for _ in range(10):
                await eventually(lambda: waits_for(admin, "paused"))
            assert (await report(admin))["percent"] == percent < 100


async def waits_for(admin: Admin, why: str) -> bool:
    return bool((await report(admin))["next"].startswith(why))


async def test_two_gateways_share_one_rollout_and_its_evidence(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        ReadingEngine() as base,
        ReadingEngine() as small,
        AsyncExitStack() as stack,
    ):
        shared = {"store": "redis", "redis": {"url": server.url}, "min_answers": 30}
        settings = settings_of(base, small, shared)
        one = await stack.enter_async_context(administered(settings))
        two = await stack.enter_async_context(administered(settings))
        await do(one, "start", candidate="small")
        await eventually(lambda: stands(two, "running"))
        # Neither has enough by itself.
        await send(one, 20)
        await send(two, 20)
        for admin in (one, two):
            await eventually(lambda a=admin: at_half(a), 15)
            assert (await report(admin))["weights"] == {"base": 0.5, "small": 0.5}
        small.reading.harm = 3.0
        await send(one, 60)
        for admin in (one, two):
            await eventually(lambda a=admin: stands(a, "rolled_back"), 15)
            assert (await report(admin))["weights"] == {"base": 1, "small": 0}
        server.kill()
        await eventually(lambda: is_lost(one))
        status, lost = await do(one, "start", candidate="small", force=True)
        assert (status, lost["error"]["code"]) == (503, "journal_lost")
        history = await one.ask("GET", "/admin/rollout/history")
        assert (history.status, history.error["code"]) == (503, "journal_lost")
        assert (
            await one.harness.post({"model": "m", "prompt": "x", "max_tokens": 2})
        ).status == 200


async def is_lost(admin: Admin) -> bool:
    return await admin.harness.metric("taut_rollout_journal_up") == 0


@pytest.mark.parametrize("lacking", ["guard", "admin"])
def test_a_rollout_without_what_it_needs_is_refused(lacking: str) -> None:
    engine: Any = ReadingEngine()
    engine.port = 1
    settings = settings_of(engine, engine, {"directory": "/x"})
    document = settings.model_dump(mode="json", exclude={lacking})
    with pytest.raises(ValueError, match="needs the sections 'guard' and 'admin'"):
        Settings.model_validate(document)
