"""What tests ask of a rollout's admin API, and the requests that give it evidence."""

from __future__ import annotations

import json
from typing import Any

from admin_harness import Admin
from rollout_settings import ADMIN


async def do(admin: Admin, command: str, **body: Any) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    answer = await admin.ask(
        "POST", f"/admin/rollout/{command}", as_json({"model": "m", **body}), headers
    )
    return answer.status, answer.json


def as_json(body: Any) -> bytes:
    return json.dumps(body).encode()


async def report(admin: Admin) -> Any:
    answer = await admin.ask("GET", "/admin/rollout", b"", {"authorization": f"Bearer {ADMIN}"})
    assert answer.status == 200, answer.body
    return answer.json["rollouts"][0]


async def stands(admin: Admin, phase: str) -> bool:
    return bool((await report(admin))["phase"] == phase)


async def send(admin: Admin, count: int) -> None:
    for number in range(count):
        body = {"model": "m", "prompt": f"question {number}?", "max_tokens": 12}
        assert (await admin.harness.post(body)).status == 200


async def at_half(admin: Admin) -> bool:
    return bool((await report(admin))["percent"] == 50)
