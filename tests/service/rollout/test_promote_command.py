"""``taut promote`` against a gateway's admin API, and ``taut-gateway verify-audit``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from admin_harness import administered
from mock_reader import ReadingEngine
from rollout_settings import ADMIN, KEYS, settings_of

from taut_deploy import cli
from taut_service.__main__ import main as gateway_main

BOUNDED = {"guard": {"sample": 1.0, "max_cpu_share": 0.1}}


async def run(port: int, *words: str) -> int:
    """Run the command in a thread: the gateway is in this loop."""
    given = ["promote", *words, "--admin-url", f"http://127.0.0.1:{port}"]
    return await asyncio.to_thread(cli.main, given)


async def status_says(port: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ask until the gateway has decided once."""
    while await run(port, "status") == 0:
        if text in capsys.readouterr().out:
            return
    raise AssertionError(capsys.readouterr().err)


async def test_a_rollout_by_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text(ADMIN + "\n")
    folder = tmp_path / "rollout"
    async with ReadingEngine() as base, ReadingEngine() as small:
        settings = settings_of(base, small, {"directory": str(folder)}, api_keys=KEYS, **BOUNDED)
        async with administered(settings) as admin:
            assert await run(admin.port, "status") == 2
            assert "--admin-url http://127.0.0.1" in capsys.readouterr().err
            monkeypatch.setenv("TAUT_ADMIN_KEY_FILE", str(key))
            assert await run(admin.port, "status") == 0
            out = capsys.readouterr().out
            assert out.startswith("m: no rollout; baseline base\n  small: INCONCLUSIVE: ")
            guard = admin.harness.app.guard
            assert guard is not None
            # A step of a tenth of the clip, 0.05 nats, whose bound is 0.1 nats.
            guard.evidence("m", "small").observe("chat", {"kl": 0.1, "loop": 0.1}, 10)
            assert await run(admin.port, "status") == 0
            out = capsys.readouterr().out
            assert "    kl: 0.0500 in [-0.4931, 0.4943] nats, at most 0.1 nats\n" in out
            assert "    loop: 0.1000 in [-0.9861, 0.9886], at most 0.05\n" in out
            guard.budget.kept = 0.125
            assert await run(admin.port, "status") == 0
            assert capsys.readouterr().out.startswith(
                "the guard compares 12.50% of the answers, not 100.00%: it may take 10% of the "
                "gateway's other CPU time (guard.max_cpu_share)\nm: no rollout"
            )
            assert await run(admin.port, "start", "m", "small") == 0
            assert capsys.readouterr().out == "m: small running at 0 %\n"
            await asyncio.wait_for(status_says(admin.port, "  waits: ", capsys), 30)
            assert await run(admin.port, "hold", "m", "--why", "lunch") == 0
            assert await run(admin.port, "hold", "m") == 2
            assert "no rollout of 'm' is running: it is held" in capsys.readouterr().err
            assert await run(admin.port, "rollback", "m", "--json") == 0
            assert json.loads(capsys.readouterr().out)["phase"] == "rolled_back"
            assert await run(admin.port, "start", "m", "nothing") == 2
            assert "there is small" in capsys.readouterr().err
            assert await run(admin.port, "history", "m", "--limit", "2") == 0
            held, back, head = capsys.readouterr().out.splitlines()
            assert "m  held  small 0 %  by root: lunch" in held
            assert "rolled_back" in back
            assert head.startswith("3 lines, newest hash ")
    file = folder / "audit.jsonl"
    assert gateway_main(["verify-audit", str(file)]) == 0
    assert head.split()[-1] in capsys.readouterr().out
    file.write_text(file.read_text().replace("lunch", "peace"))
    assert gateway_main(["verify-audit", str(file)]) == 1
    assert "audit.jsonl: line 2: was changed" in capsys.readouterr().err
    assert gateway_main(["verify-audit", str(tmp_path / "none")]) == 2
    assert "none: No such file or directory" in capsys.readouterr().err
    file.write_bytes(b"l\xfcnch\n")
    assert gateway_main(["verify-audit", str(file)]) == 1
    assert "audit.jsonl: not UTF-8 text" in capsys.readouterr().err
    for words in ([], [str(file), str(file)]):
        assert gateway_main(["verify-audit", *words]) == 2
        assert "give one file: taut-gateway verify-audit FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--admin-url", "ftp://x"], "is not of the form"),
        (["--admin-url", "http://127.0.0.1:1"], "no admin API answers there: "),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file"),
        (["--api-key-file", sys.executable], "not a text file"),
        (["--api-key-file", __file__], "expected one key, a line of printable ASCII"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["promote", "status", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1
