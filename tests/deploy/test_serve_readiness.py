"""What ``taut serve`` asks its gateway costs little once the answer is yes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taut_deploy.serve import supervise
from taut_deploy.serve.settings import ServeSettings


class EndError(Exception):
    """Ends the loop that never ends."""


def test_a_ready_gateway_is_asked_every_two_seconds_and_a_starting_one_four_times_as_often(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = iter([False, False, True, True, False])
    pauses: list[float] = []
    said: list[str] = []

    def is_ready(url: str) -> bool:
        assert url == "http://127.0.0.1:8000/health/ready"
        try:
            return next(answers)
        except StopIteration:
            raise EndError from None

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(supervise, "is_ready", is_ready)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    settings = ServeSettings(host="127.0.0.1", port=8000)
    model: Any = SimpleNamespace(name="m")
    with pytest.raises(EndError):
        asyncio.run(supervise._announce_readiness([], settings, [model], said.append))
    assert pauses == [0.5, 0.5, 2.0, 2.0, 0.5]
    assert [line.split(".")[0] for line in said] == ["ready", "not ready"]
