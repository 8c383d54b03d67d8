"""Progress on terminals of any width, and lines elsewhere that never stop for long."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from taut_deploy import progress

WHAT = "block 3: quantize model.layers.3.mlp.down_proj by gptq in W4A16"


def drawn(width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The last state of a bar, without its control sequences."""
    out = io.StringIO()
    monkeypatch.setattr(
        progress,
        "Console",
        lambda stderr: Console(file=out, force_terminal=True, width=width, color_system=None),
    )
    with progress.progress_reporter() as report:
        report(3, 30, WHAT)
    states = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", out.getvalue()).splitlines()
    return [state.strip() for state in states if state.strip()][-1]


@pytest.mark.parametrize("width", [24, 40, 59, 60, 80, 200])
def test_the_figures_are_whole_and_on_one_line_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch
):
    line = drawn(width, monkeypatch)
    assert re.search(r"(^| )3/30 0:00:00( |$)", line)
    assert len(line) <= width


def test_elsewhere_the_last_line_comes_again_where_nothing_is_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(progress, "_LONGEST_SILENCE_S", 0.2)
    with progress.progress_reporter() as report:
        report(0, 3, "downloading x")
        time.sleep(1.0)
        report(1, 3, "converting x")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[0/3] downloading x"
    assert re.fullmatch(r"\[0/3\] downloading x \(\d s so far\)", lines[1])
    assert lines[-1] == "[1/3] converting x"
