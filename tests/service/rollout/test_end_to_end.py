"""A gateway process before mock workers: the good candidate climbs, the harmed one is sent back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import eventually
from live_processes import Gateway, call
from mock_engine import Faults
from mock_reader import Reading, ReadingEngine

from taut_deploy.ports import free_port
from taut_service.rollout.audit import TamperedError, verify_file

GOLDEN = {"prompt": "The capital of France is", "expected_text": " Paris"}


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the URL of a server, and what it was told."""
    told: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Fleet:
    """A gateway process with a baseline and two candidates."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder = folder
        self.hook = hook
        self.base, self.good = ReadingEngine(), ReadingEngine()
        self.bad = ReadingEngine(Reading(), Faults(tokens=12))
        self.admin = free_port()
        self.starts = 0

    def settings(self) -> dict[str, Any]:
        variants = [
            {"name": name, "weight": weight, "workers": [{"name": name, "url": engine.url}]}
            for name, weight, engine in (
                ("base", 1.0, self.base),
                ("good", 0.0, self.good),
                ("bad", 0.0, self.bad),
            )
        ]
        model = {
            "name": "m",
            "max_model_len": 4096,
            "golden": GOLDEN,
            "baseline": "base",
            "variants": variants,
        }
        bounds = {"max_kl_excess_nats": 0.1, "max_disagreement_excess": 0.2, "max_slowdown": 50}
        return {
            "models": [model],
            "admin": {"port": self.admin},
            "guard": {
                "sample": 1.0,
                "max_cpu_share": None,
                "max_queued": 200,
                "regenerate": False,
                **bounds,
            },
            "rollout": {
                "steps": [0, 10, 50, 100],
                "min_step_s": 0.5,
                "min_answers": 10,
                "min_tokens": 100,
                "every_s": 0.1,
                "webhook": self.hook,
                "directory": str(self.folder / "rollout"),
                "min_streams": 10_000,
            },
        }

    async def start(self) -> Gateway:
        self.starts += 1
        gateway = Gateway(self.folder, f"gateway-{self.starts}", self.settings())
        await gateway.start_and_wait()
        return gateway

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        status, answer = await asyncio.to_thread(
            call, self.admin, method, f"/admin/rollout{path}", data
        )
        assert status == 200, answer
        return json.loads(answer)

    async def report(self) -> Any:
        return (await self.ask("GET", ""))["rollouts"][0]

    async def stands(self, phase: str, percent: float) -> bool:
        found = await self.report()
        return (found["phase"], found["percent"]) == (phase, percent)

    async def until(self, phase: str, percent: float, timeout_s: float = 60) -> None:
        try:
            await eventually(lambda: self.stands(phase, percent), timeout_s)
        except TimeoutError:
            raise AssertionError(await self.report()) from None


@asynccontextmanager
async def traffic(gateway: Gateway) -> AsyncIterator[None]:
    """Send completions, half of them streamed, one after the other."""

    async def send() -> None:
        number = 0
        while True:
            number += 1
            body = {"model": "m", "prompt": f"question {number}", "max_tokens": 12}
            body["stream"] = number % 2 == 0
            data = json.dumps(body).encode()
            await asyncio.to_thread(call, gateway.port, "POST", "/v1/completions", data)

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_the_good_candidate_climbs_and_the_harmed_one_is_rolled_back(tmp_path: Path) -> None:
    with webhook() as (url, told):
        fleet = Fleet(tmp_path, url)
        async with fleet.base, fleet.good, fleet.bad:
            gateway = await fleet.start()
            try:
                async with traffic(gateway):
                    await fleet.ask("POST", "/start", {"model": "m", "candidate": "bad"})
                    await fleet.until("running", 10)
                    # It was fine in the shadow. From now on it serves another model.
                    fleet.bad.reading.harm = 3.0
                    await fleet.until("rolled_back", 0)
                    assert (await fleet.report())["why"].startswith("harm: ")
                    assert gateway.total("taut_variant_weight", variant="bad") == 0
                    assert gateway.total("taut_rollout_rollbacks_total") == 1
                    await fleet.ask("POST", "/start", {"model": "m", "candidate": "good"})
                    await fleet.until("running", 10)
                # Killed in the middle, it comes back where it was, with its evidence.
                held = await fleet.ask("POST", "/hold", {"model": "m", "why": "lunch"})
                answers = (await evidence_of(fleet, "good"))["answers"]
                await asyncio.sleep(2.2)  # evidence is saved every two seconds
                await gateway.kill()
                gateway = await fleet.start()
                found = await fleet.report()
                share = found["percent"] / 100
                assert (found["phase"], found["percent"], found["why"]) == (
                    "held",
                    held["percent"],
                    "lunch",
                )
                assert found["weights"] == {"base": 1 - share, "good": share, "bad": 0}
                assert (await evidence_of(fleet, "good"))["answers"] >= answers
                await fleet.ask("POST", "/start", {"model": "m", "candidate": "good"})
                async with traffic(gateway):
                    await fleet.until("running", 100)
                    await fleet.until("complete", 100)
                    verdict = await fleet.ask("GET", "/analysis?model=m&variant=good")
                    assert verdict["verdict"] == "PASS"
                history = await fleet.ask("GET", "/history")
                assert gateway.problems() == []
            finally:
                await gateway.kill()
    events = [(e["event"], e["state"]["candidate"], e["state"]["percent"]) for e in told]
    assert [e["event"] for e in history["entries"]] == [e for e, _, _ in events]
    pause = [event for event, _, _ in events].index("held")
    assert [event for event, _, _ in events[pause : pause + 2]] == ["held", "resumed"]
    assert events[:pause] + events[pause + 2 :] == [
        ("started", "bad", 0),
        ("promoted", "bad", 10),
        ("rolled_back", "bad", 0),
        ("started", "good", 0),
        ("promoted", "good", 10),
        ("promoted", "good", 50),
        ("promoted", "good", 100),
        ("completed", "good", 100),
    ]
    check_chain(tmp_path / "rollout" / "audit.jsonl", history["head"])


async def evidence_of(fleet: Fleet, variant: str) -> Any:
    (found,) = [e for e in (await fleet.report())["evidence"] if e["variant"] == variant]
    return found


def check_chain(file: Path, head: str) -> None:
    """The chain is whole; changed, removed and inserted lines are named."""
    entries = verify_file(file)
    assert (len(entries), entries[-1].hash) == (10, head)
    lines = file.read_text().splitlines(keepends=True)
    for changed, line in (
        ([*lines[:2], lines[2].replace('"percent":0', '"percent":9'), *lines[3:]], 3),
        ([*lines[:3], *lines[4:]], 4),
        ([*lines[:4], lines[3], *lines[4:]], 5),
    ):
        file.write_text("".join(changed))
        with pytest.raises(TamperedError, match=f"line {line}: "):
            verify_file(file)
