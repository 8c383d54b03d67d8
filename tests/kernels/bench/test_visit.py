"""The borrowed-GPU visit: every command parses, limits hold, results come back in one archive."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from taut_bench import shapes
from tuning import visit

CHILD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("part", visit.PARTS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: it would run")
def test_every_benchmark_accepts_its_arguments(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in visit.PARTS[part]:
        if step.module != "pytest":
            arguments = step.command(tmp_path)[3:]
            assert import_module(step.module).main(arguments) == 2
            assert "needs a CUDA device" in capsys.readouterr().err


def test_a_part_fits_into_ten_minutes_and_its_plan_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part, steps in visit.PARTS.items():
        assert sum(step.limit_s for step in steps) <= 570
        assert visit.main([part, "--output", str(tmp_path), "--plan"]) == 0
        assert capsys.readouterr().out.count("\n") == len(steps)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules ``python -m`` finds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_step_that_hangs_is_stopped_and_the_next_ones_run(modules: Path) -> None:
    (modules / "hangs.py").write_text("import time; time.sleep(600)")
    (modules / "ends.py").write_text("print('here')")
    steps = (
        visit.Step("hangs", "hangs", (), limit_s=1),
        visit.Step("ends", "ends", (), limit_s=200),
        visit.Step("fails", "no_such_module", (), limit_s=200),
    )
    lines = visit.run(steps, modules, 600)
    assert lines[0].startswith("hangs: stopped after 1 s")
    assert lines[1].startswith("ends: exit 0, ")
    assert lines[2].startswith("fails: exit 1, ")
    assert (modules / "ends.log").read_text() == "here\n"
    assert (modules / "summary.txt").read_text().splitlines() == lines


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # where nobody collects orphans they stay as zombies


def test_a_stopped_step_takes_its_children_with_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert _is_running(child)
    visit._end(process)
    deadline = time.monotonic() + 60
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)
    process.stdout.close()


def test_no_step_starts_when_the_time_is_over(tmp_path: Path) -> None:
    steps = (visit.Step("late", "late", (), limit_s=60),)
    assert visit.run(steps, tmp_path, 5) == ["late: not run: the time was over"]


def test_an_engine_without_the_plugin_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "nope")
    (line,) = visit.run((visit.Step("e", "e", (), 60, needs_plugin=True),), tmp_path, 300)
    assert line.startswith("e: not run: VLLM_PLUGINS='nope' excludes 'taut'")


def test_results_come_back_in_one_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = visit.Step("w", "timeit", ("-n1", "-r1", "pass"), limit_s=60)
    monkeypatch.setitem(visit.PARTS, "tests", (step,))
    assert visit.main(["tests", "--output", str(tmp_path)]) == 0
    with tarfile.open(tmp_path / "visit-tests.tgz") as archive:
        names = archive.getnames()
    assert {"tests/w.log", "tests/summary.txt", "tests/w"} <= set(names)


# --- which products a benchmark runs -------------------------------------------------------------


def test_products_are_those_of_the_models() -> None:
    found = shapes.PRODUCTS
    assert found["gate_up"] == (28672, 4096)
    assert found["qkv"] == (6144, 4096)
    assert found["qwen2.5-7b/qkv"] == (4608, 3584)
    assert found["qwen2.5-32b/gate_up"] == (55296, 5120)
    assert found["llama3-70b/down"] == (8192, 28672)
    assert found["llama3-70b-tp8/qkv"] == (1280, 8192)
    assert found["llama3-70b-tp8/o"] == (8192, 1024)
    assert found["llama3-70b-tp8/down"] == (8192, 3584)
    # Ours takes each of them in 4 bits with groups of 128.
    assert all(N % 16 == 0 and K % 128 == 0 for N, K in found.values())


def _parse(*arguments: str) -> dict[str, tuple[int, int]]:
    import argparse

    parser = argparse.ArgumentParser()
    shapes.add_arguments(parser)
    return shapes.chosen(parser.parse_args(arguments), {"default": (1, 2)})


def test_models_and_single_products_are_chosen_by_name() -> None:
    assert _parse() == {"default": (1, 2)}
    assert list(_parse("--shapes", "llama3-8b")) == ["gate_up", "down", "qkv", "o"]
    some = _parse("--shapes", "qwen2.5-7b,llama3-70b-tp8", "--shape", "square", "--shape", "o")
    assert len(some) == 10
    assert some["qwen2.5-7b/o"] == (3584, 3584)


@pytest.mark.parametrize(
    ("text", "expected"), [("1,64", [1, 64]), ("all", list(shapes.TOKENS)), ("8192", [8192])]
)
def test_numbers_of_tokens(text: str, expected: list[int]) -> None:
    assert shapes.token_counts(text) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "gpt-2"], "'gpt-2': use some of llama3-8b, qwen2.5-7b"),
        (["--tokens", "0"], "'0': use all, or numbers in 1..8192"),
        (["--tokens", "1,x"], "'1,x': use all"),
        (["--tokens", "8193"], "1..8192"),
    ],
)
def test_a_wrong_name_or_number_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _parse(*arguments)
    assert message in capsys.readouterr().err
