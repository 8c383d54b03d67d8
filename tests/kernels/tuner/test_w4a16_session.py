"""Measuring a model within a budget: what comes first, what is kept, what the ranks of it read."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from taut_kernels.gemm.w4a16 import dispatch
from taut_kernels.gemm.w4a16.op import w4a16_gemm_ref
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import measured_here
from taut_kernels.launch.measured_here import Machine
from taut_kernels.tuner import timing, w4a16_compile, w4a16_stock
from taut_kernels.tuner.w4a16_candidates import Product
from taut_kernels.tuner.w4a16_compile import Compilers
from taut_kernels.tuner.w4a16_layer import Layer, blank_layer
from taut_kernels.tuner.w4a16_session import Session, Wish, judged

MACHINE = Machine("a card", "1.0", {"torch": "2"})
SMALL = Wish(Product(64, 256, WeightFormat.G128), 4)
LARGE = Wish(Product(96, 256, WeightFormat.G32_ZP), 4)
RARE = Wish(Product(128, 256, WeightFormat.G128), 1)


class _AtOnce(Executor):
    """Compiles nothing, at once, or never."""

    def __init__(self, *, done: bool) -> None:
        self._done = done

    def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._done:
            future.set_result(None)
        return future


def _compilers(*, done: bool) -> Callable[[], Any]:
    @contextmanager
    def start() -> Iterator[Compilers]:
        yield Compilers(_AtOnce(done=done))

    return start


def _clock(subjects: Sequence[timing.Subject], M: int) -> list[float]:
    """Ours takes M µs, vLLM's twice that."""
    return [M * (1.0 if subject.name.startswith("taut") else 2.0) for subject in subjects]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Session, list[str]]:
    monkeypatch.setattr(dispatch, "launch", lambda tile, x, *given: w4a16_gemm_ref(x, *given))
    monkeypatch.setattr(w4a16_stock, "STOCK", dict.fromkeys(w4a16_stock.STOCK, w4a16_stock.taut))
    lines: list[str] = []
    return Session(
        tmp_path / "verdicts.json",
        MACHINE,
        "a test",
        time.monotonic() + 600,
        1,
        lines.append,
        _clock,
        _compilers(done=True),
        "cpu",
    ), lines


def test_the_heaviest_come_first_and_all_are_judged(session: tuple[Session, list[str]]) -> None:
    run, lines = session
    wishes = [RARE, SMALL, LARGE]
    document = run.run(wishes)
    assert [line.split(" ")[0] for line in lines] == ["96×256", "64×256", "128×256"]
    assert "vLLM's time ÷ ours 2.00 at 1, 2.00 at 16" in lines[0]
    assert measured_here.read(run.path) == document
    assert document.machine == MACHINE
    told = judged(document, wishes)
    assert [(one["N"], one["ours"]) for one in told] == [(128, True), (64, True), (96, True)]
    assert told[0]["us"] == [1.0, 16.0, 64.0, 256.0, 1024.0]


def test_what_is_there_is_not_measured_again(session: tuple[Session, list[str]]) -> None:
    run, lines = session
    run.run([SMALL])
    before = run.path.stat().st_mtime_ns
    run.run([SMALL])
    assert (len(lines), run.path.stat().st_mtime_ns) == (1, before)
    document = run.run([SMALL, RARE])
    assert len(lines) == 2
    assert [row["N"] for row in document.tables["w4a16_measured"]] == [64, 128]


@pytest.mark.parametrize("left", [0.3, -1.0])
def test_a_spent_budget_leaves_the_rest_to_vllm(
    session: tuple[Session, list[str]], left: float
) -> None:
    """What does not compile in time is not waited for."""
    run, lines = session
    begun = time.monotonic()
    late = replace(run, deadline=begun + left, start_compilers=_compilers(done=False))
    document = late.run([SMALL, LARGE])
    assert time.monotonic() - begun < 30
    assert (document.tables, lines) == ({}, [])
    assert [one["ours"] for one in judged(document, [SMALL, LARGE])] == [None, None]
    assert not run.path.exists()


def test_a_product_that_vllm_cannot_run_has_no_verdict(
    session: tuple[Session, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lines = session

    def absent(layer: Any) -> w4a16_stock.Prepared:
        raise w4a16_stock.UnavailableError("vLLM: not here")

    monkeypatch.setattr(w4a16_stock, "STOCK", dict.fromkeys(w4a16_stock.STOCK, absent))
    document = run.run([SMALL])
    assert judged(document, [SMALL])[0]["ours"] is None
    assert lines == ["64×256 g128: stays with vLLM, no figures: Marlin: vLLM: not here"]


def test_another_machines_or_a_damaged_file_is_refused(
    session: tuple[Session, list[str]],
) -> None:
    run, _ = session
    run.run([SMALL])
    other = replace(run, machine=replace(MACHINE, driver="2.0"))
    with pytest.raises(ValueError, match=r"verdicts\.json: measured with driver 1\.0"):
        other.run([SMALL])
    run.path.write_text("no JSON")
    with pytest.raises(ValueError, match=r"verdicts\.json: not JSON"):
        run.run([SMALL])


def _without(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """An environment with such a vLLM."""

    def installed(name: str) -> str:
        if version is None or name != "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(w4a16_stock.importlib.metadata, "version", installed)


@pytest.mark.parametrize(
    ("version", "hopper", "N", "group", "names"),
    [
        ("0.26.0", True, 4096, 128, ["Machete", "Marlin"]),
        ("0.33.0", True, 4096, 128, ["Machete", "Marlin"]),
        ("0.26.0", True, 4096, 32, ["Marlin"]),
        ("0.33.0", True, 4096, 32, ["Humming", "Marlin"]),
        ("0.32.1rc1", True, 2752, 128, ["Humming", "Marlin"]),
        ("0.33.0", False, 4096, 128, ["Humming", "Marlin"]),
        (None, True, 2752, 64, ["Marlin"]),
    ],
)
def test_rivals_are_those_that_vllm_would_run(
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    hopper: bool,
    N: int,
    group: int,
    names: list[str],
) -> None:
    """Machete takes groups of 64 and 128 and whole blocks of 128 features, on Hopper alone."""
    _without(monkeypatch, version)
    assert list(w4a16_stock.stock_of(N, group, hopper=hopper)) == names


def test_humming_compiles_beside_the_tiles_and_is_waited_for(
    session: tuple[Session, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lines = session
    _without(monkeypatch, "0.33.0")
    compiled: list[int] = []

    def compile_it(layer: Layer, tokens: Sequence[int]) -> None:
        compiled.append(layer.N)

    monkeypatch.setattr(w4a16_compile, "compile_humming", compile_it)
    monkeypatch.setattr(w4a16_compile, "blank_layer", partial(blank_layer, device="cpu"))
    run.run([SMALL, LARGE])
    # The first alone, to bring what all share; again with the others, out of the cache.
    assert sorted(set(compiled)) == [64, 96]
    assert len(lines) == 2


def test_humming_that_does_not_compile_is_said_and_the_rest_measured(
    session: tuple[Session, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lines = session
    _without(monkeypatch, "0.33.0")

    def fails(layer: Layer, tokens: Sequence[int]) -> None:
        raise w4a16_stock.UnavailableError("Humming: no compiler")

    monkeypatch.setattr(w4a16_compile, "compile_humming", fails)
    monkeypatch.setattr(w4a16_compile, "blank_layer", partial(blank_layer, device="cpu"))
    document = run.run([LARGE])
    assert lines[0] == "Humming does not compile: Humming: no compiler"
    assert judged(document, [LARGE])[0]["ours"] is True


def test_a_form_is_compiled_once_and_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from taut_kernels.gemm.w4a16 import decode_tile

    asked: list[int] = []

    class Pool(_AtOnce):
        def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
            asked.append(given[0].N)
            future: Future[Any] = Future()
            if given[0].K == 512:
                future.set_exception(RuntimeError("a process died"))
            else:
                future.set_result("does not fit" if given[0].K == 256 else None)
            return future

    compilers = Compilers(Pool(done=True))
    tile = decode_tile.ranked(4096, 4096)[0]
    jobs = [
        w4a16_compile.Job(N, K, 8, tile, WeightFormat.G128)
        for N, K in ((64, 4096), (128, 4096), (64, 256), (64, 512))
    ]
    compilers.ask(jobs)
    assert asked == [64, 64, 64]
    assert compilers.wait(jobs, 0)
    assert compilers.refusals() == ["does not fit", "a process died"]


def test_the_command_says_in_one_line_why_it_cannot_measure(
    run_python: Any, tmp_path: Path
) -> None:
    wanted = json.dumps([[64, 256, "g128", 1]])
    words = ("--output", str(tmp_path / "v.json"), "--budget-s", "5")
    code = (
        "import io, sys; from taut_kernels.tuner import __main__ as tuner; "
        f"sys.stdin = io.StringIO({wanted!r}); sys.exit(tuner.main({list(words)!r}))"
    )
    done = run_python("-c", code, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == "error: no CUDA device to measure on"
    assert "Traceback" not in done.stderr
