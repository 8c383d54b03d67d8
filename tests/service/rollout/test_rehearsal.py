"""``taut bench rollout`` with mock workers as its processes, and a real gateway between."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from mock_engine import Faults, MockEngine

from taut_deploy.bench import rollout_fleet as fleet
from taut_deploy.bench import rollout_report
from taut_deploy.bench.rollout import Plan, rehearse
from taut_deploy.bench.rollout_traffic import Load, Traffic, read_prompts
from taut_deploy.errors import WorkerError
from taut_deploy.ports import free_port
from taut_deploy.serve.process import ChildSpec
from taut_service.rollout.audit import verify_file

QUICK = {
    "guard": {
        "max_kl_excess_nats": 0.1,
        "max_disagreement_excess": 0.2,
        "regenerate": False,
        "max_slowdown": 50,
    },
    "rollout": {
        "steps": [0, 50, 100],
        "min_step_s": 0.3,
        "min_answers": 10,
        "min_tokens": 100,
        "every_s": 0.1,
        "min_streams": 10_000,
    },
}


def mocks(folder: Path, **harms: float) -> list[fleet.Member]:
    members = []
    for name, harm in harms.items():
        port = free_port()
        script = str(Path(__file__).with_name("reading_worker.py"))
        argv = (sys.executable, script, str(port), str(harm))
        child = ChildSpec(name, argv, {}, folder / f"worker-{name}.log", 5.0)
        members.append(fleet.Member(name, port, child))
    return members


def plan_for(folder: Path, limit_s: float, **rollout: Any) -> Plan:
    sections = {**QUICK, "rollout": {**QUICK["rollout"], **rollout}}
    return Plan(4096, sections, Load(read_prompts(None), 2, 12), limit_s, 60.0, folder)


async def test_the_harmed_copy_is_sent_back_and_the_candidate_climbs(tmp_path: Path) -> None:
    members = mocks(tmp_path, baseline=0.0, candidate=0.0, harmed=3.0)
    said: list[str] = []
    found = await rehearse(plan_for(tmp_path, 90), members, said.append)
    assert found.as_expected, (found.rollouts, found.traffic)
    harmed, good = found.rollouts["harmed"], found.rollouts["candidate"]
    # It was found in the shadow, where no client is answered by it.
    assert (harmed["phase"], harmed["highest_percent"], harmed["answered_by_it"]) == (
        "rolled_back",
        0,
        0,
    )
    assert harmed["course"][-1]["why"].startswith("harm: ")
    assert [step["percent"] for step in good["course"]] == [0, 50, 100, 100]
    assert 0 < good["answered_by_it"] < good["answered"]
    assert found.traffic["streams"] > 0 and found.traffic["failures"] == {}
    files = rollout_report.write(found, {"command": "taut bench rollout"}, tmp_path)
    told = json.loads((tmp_path / "report.json").read_text())
    entries = verify_file(tmp_path / "rollout" / "audit.jsonl")
    assert told["audit"] == {"lines": len(entries), "head": entries[-1].hash}
    assert [entry.event for entry in entries] == [
        "started",
        "rolled_back",
        "started",
        "promoted",
        "promoted",
        "completed",
    ]
    pictures = {"ui-harmed.png", "ui-candidate.png"} if shutil.which("chromium") else set()
    assert {file.name for file in files if file.suffix == ".png"} == pictures
    for name in pictures:
        assert (tmp_path / name).read_bytes()[1:4] == b"PNG"
    table = (tmp_path / "report.md").read_text()
    assert "| harmed | rolled_back | rolled_back |" in table
    assert "| candidate | complete | complete |" in table


async def test_a_harm_that_is_not_found_in_time_is_said_and_taken_back(tmp_path: Path) -> None:
    members = mocks(tmp_path, baseline=0.0, candidate=0.0, harmed=0.0)
    # The harmed copy is not harmed at all, and no step ends.
    found = await rehearse(plan_for(tmp_path, 1.5, min_step_s=3600), members, print)
    assert not found.as_expected
    assert found.rollouts["harmed"]["phase"] == "running"
    assert "of 3600 s at this step" in found.rollouts["harmed"]["waits"]
    entries = verify_file(tmp_path / "rollout" / "audit.jsonl")
    assert [entry.event for entry in entries] == ["started", "rolled_back"] * 2
    assert entries[1].document["state"]["why"] == "the rehearsal's 1.5 s are over"


async def test_a_worker_that_cannot_start_ends_it_with_its_last_words(tmp_path: Path) -> None:
    (broken, *others) = mocks(tmp_path, baseline=0.0, candidate=0.0, harmed=0.0)
    argv = (sys.executable, "-c", "raise SystemExit('no such model')")
    child = ChildSpec("baseline", argv, {}, broken.child.log, 5.0)
    members = [fleet.Member("baseline", broken.port, child), *others]
    with pytest.raises(WorkerError, match=r"baseline ended 1 times.*: no such model"):
        await rehearse(plan_for(tmp_path, 5), members, print)


async def test_settings_that_the_gateway_refuses_are_said_in_its_words(tmp_path: Path) -> None:
    members = mocks(tmp_path, baseline=0.0, candidate=0.0, harmed=0.0)
    with pytest.raises(WorkerError, match="the last of 'steps' must be 100"):
        await rehearse(plan_for(tmp_path, 5, steps=[0, 50]), members, print)


async def test_what_fails_is_counted_by_its_kind() -> None:
    load = Load(["one"], 1, 12)
    gone = Traffic(f"http://127.0.0.1:{free_port()}", "m", load)
    async with gone.running():
        await asyncio.sleep(0.35)
    assert set(gone.failures) == {"ConnectError"} and 2 <= gone.failures["ConnectError"] <= 5
    async with MockEngine(Faults(status=503)) as engine:
        refusing = Traffic(engine.url, "m", load)
        async with refusing.running():
            await asyncio.sleep(0.25)
    assert set(refusing.failures) == {"503"} and not refusing.answered
