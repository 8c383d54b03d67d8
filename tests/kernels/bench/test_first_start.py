"""The benchmark of a first start, as far as a CPU can run it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import first_start
from taut_bench.first_start import Row
from taut_kernels.launch import compile_ahead

FACTS = "Measured with a fake."


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert first_start.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == ("error: taut_bench.first_start needs a CUDA device\n")


@pytest.mark.parametrize("given", ["0", "1,-2", "many"])
def test_refuses_numbers_of_compilers_that_are_none(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        first_start.main(["--output", "x", "--compilers", given])
    assert "--compilers" in capsys.readouterr().err


def test_wants_a_place_for_its_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        first_start.main([])
    assert "are required: --output" in capsys.readouterr().err


def test_counts_what_each_warm_up_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(count: int) -> None:
        for _ in range(count):
            triton.knobs.runtime.jit_post_compile_hook(key="k", repr="r")

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(compile_ahead, "THREADS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    warm_ups = {"products": lambda: compiles(3), "decode attention": lambda: compiles(1)}
    monkeypatch.setattr(first_start, "_warm_ups", lambda device: warm_ups)
    rows = first_start.measure(8)
    assert [(r.compilers, r.what, r.forms) for r in rows] == [
        (8, "products", 3),
        (8, "decode attention", 1),
    ]
    assert all(r.seconds >= 0 for r in rows)
    assert compile_ahead.THREADS == 8


def test_each_number_of_compilers_has_a_process_and_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caches = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        cache = Path(env["TRITON_CACHE_DIR"])
        assert not list(cache.iterdir())
        (cache / "kernel").touch()
        caches.append(cache)
        row = {"compilers": int(command[-1]), "what": "products", "forms": 45, "seconds": 20.46}
        return subprocess.CompletedProcess(command, 0, f"a warning\n{json.dumps([row])}\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_start.report, "measured_with", lambda rates: FACTS)
    assert first_start.main(["--output", str(tmp_path / "new"), "--compilers", "1,8"]) == 0
    assert len(set(caches)) == 2
    assert not any(cache.exists() for cache in caches)
    written = (tmp_path / "new" / "first_start.csv").read_text().splitlines()
    assert written == [
        "compilers,what,forms,seconds",
        "1,products,45,20.5",
        "8,products,45,20.5",
    ]
    assert (tmp_path / "new" / "first_start.md").read_text().startswith(f"{FACTS}\n\n| compilers")


def test_writes_a_line_a_figure(tmp_path: Path) -> None:
    first_start.write([Row(8, "fused ops", 13, 1.94)], FACTS, tmp_path)
    assert "| 8 | fused ops | 13 | 1.9 |" in (tmp_path / "first_start.md").read_text()
