"""One part of a visit to a borrowed GPU: ``python -m tuning.visit PART --output DIR``.

Runs tests and benchmarks one after another, from the repository's root, each with a limit of its
own, and never longer than ``--minutes`` together: what a step had written when its time was over is
kept, and the next one runs. Leaves each step's log, ``summary.txt`` and everything in one archive,
``visit-<part>.tgz``. The parts, in order of worth, are :data:`PARTS`; kernels/README.md, "Next
visit", says how to get there.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_PYTEST = ("-c", "/dev/null", "--rootdir=.", "--import-mode=importlib", "-p", "no:cacheprovider")
_BIG_MODELS = "qwen2.5-7b,llama3-70b-tp8,qwen2.5-32b,llama3-70b"
_FEW_TOKENS = "1,4,8,16,32,64,128,256,384,512,768,1024,1664,2048,4096,8192"
_BETWEEN_TOKENS = "24,40,80,96,160,192,300,448,600,700,900,1300,1800,3000"
"""That fill no tile: what they cost is easily overlooked (kernels/README.md, "Fed by TMA")."""
_W4A16_MODES = ("off", "prefer", "prefer+attention", "prefer+fused", "prefer+fused+attention")
_ALL_MODES = ("--mode", "off", "--mode", "prefer+fused+attention")
_OUR_RECIPE = ("--group-size", "32", "--zero-points")
"""How taut's own recipe of 4 bits quantises."""
_VLLM_ONLY = ("--kernel", "taut", "--kernel", "Marlin", "--kernel", "Machete")
_DENSE_TOO = ("--kernel", "cuBLAS", "--kernel", "FP8 CUTLASS (other weights)")
_SHARE_OF_CORES = 0.85
_GRACE_S = 10


@dataclass(frozen=True, slots=True)
class Step:
    """Something to run.

    Attributes:
        name: of its log and its folder of results.
        module: run as ``python -m``.
        arguments: ``{output}`` stands for its folder.
        limit_s: longest run.
        needs_plugin: whether vLLM has to find our entry point.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    limit_s: float
    needs_plugin: bool = False

    def command(self, output: Path) -> list[str]:
        """Return the argv.

        Args:
            output: the step's folder.
        """
        filled = (argument.format(output=output) for argument in self.arguments)
        return [sys.executable, "-m", self.module, *filled]


def _tests() -> Step:
    jobs = max(1, int(_SHARE_OF_CORES * (os.cpu_count() or 1)))
    parallel = ("-n", str(jobs)) if find_spec("xdist") else ()
    arguments = (*_PYTEST, "-q", "-W", "ignore", "--tb=short", "-m", "gpu", *parallel)
    return Step("tests", "pytest", (*arguments, "tests/kernels"), 300)


def _bench(name: str, module: str, limit_s: float, *arguments: str) -> Step:
    full = ("--output", "{output}", *arguments)
    return Step(name, f"taut_bench.{module}", full, limit_s, module == "engine")


PARTS: dict[str, tuple[Step, ...]] = {
    "tests": (
        _tests(),
        _bench("w4a16", "w4a16", 160, *_VLLM_ONLY, *_DENSE_TOO, "--tokens", _FEW_TOKENS),
        _bench("w4a16-between", "w4a16", 70, *_VLLM_ONLY, "--tokens", _BETWEEN_TOKENS),
    ),
    "formats": (
        _bench("w4a16-g32-zp", "w4a16", 280, *_OUR_RECIPE, "--tokens", "1,4,16,64,256,1024,2048"),
        _bench("engine-w4a16-g32-zp", "engine", 280, "--scheme", "w4a16-g32-zp", *_ALL_MODES),
    ),
    "library": (
        _bench("loss", "loss", 180),
        _bench("fused_backward", "fused_backward", 120),
        _bench("primitives", "primitives", 90),
        _bench("attention", "attention", 100),
    ),
    "engine": (
        _bench(
            "engine-w4a16",
            "engine",
            500,
            *("--scheme", "w4a16"),
            *(word for mode in _W4A16_MODES for word in ("--mode", mode)),
        ),
        _bench("attention-backward", "attention", 60, "--part", "backward"),
    ),
    "shapes": (
        _bench(
            "shapes", "w4a16", 400, *_VLLM_ONLY, "--shapes", _BIG_MODELS, "--tokens", _FEW_TOKENS
        ),
        _bench("scaled_mm", "scaled_mm", 160, "--tokens", "1,16,64,256,1024,4096"),
    ),
    "engine-8bit": (
        _bench("engine-fp8", "engine", 240, "--scheme", "fp8", *_ALL_MODES),
        _bench("engine-int8", "engine", 240, "--scheme", "int8", *_ALL_MODES),
    ),
    "fused": (
        _bench("fused", "fused", 280, "--shapes", "llama3-8b", "--tokens", "1,64,4096,8192"),
        _bench("fused-shapes", "fused", 280, "--shapes", _BIG_MODELS, "--tokens", "1,64,4096"),
    ),
}
"""Part → its steps; a part is one call of at most ten minutes."""


def run_step(step: Step, output: Path, seconds: float) -> str:
    """Run a step; return one line about it.

    Args:
        step: what to run.
        output: folder of the part; the step gets one of its name in it.
        seconds: time left; the step gets no more than its own limit.
    """
    folder = output / step.name
    folder.mkdir(parents=True, exist_ok=True)
    limit = min(step.limit_s, seconds)
    start = time.monotonic()
    with (output / f"{step.name}.log").open("wb") as log:
        # A session of its own: an engine's processes have to end with it.
        process = subprocess.Popen(
            step.command(folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            outcome = f"exit {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
        finally:
            _end(process)
    return f"{step.name}: {outcome}, {time.monotonic() - start:.0f} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, grace in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            continue


def run(steps: Sequence[Step], output: Path, seconds: float) -> list[str]:
    """Run steps one after another.

    Args:
        steps: of a part.
        output: folder of the part.
        seconds: for all of them together.

    Returns:
        One line a step.
    """
    deadline = time.monotonic() + seconds
    lines: list[str] = []
    for step in steps:
        left = deadline - time.monotonic()
        if left <= _GRACE_S:
            lines.append(f"{step.name}: not run: the time was over")
        elif step.needs_plugin and (reason := _why_no_plugin()):
            lines.append(f"{step.name}: not run: {reason}")
        else:
            lines.append(run_step(step, output, left - _GRACE_S))
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
        (output / "summary.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return lines


def _why_no_plugin() -> str | None:
    from taut_kernels.vllm_plugin import selfcheck

    return selfcheck.why_not_ready(os.environ.get("VLLM_PLUGINS"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where a step did not end well."""
    parser = argparse.ArgumentParser(prog="python -m tuning.visit", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all steps together")
    parser.add_argument("--plan", action="store_true", help="print the commands, run nothing")
    arguments = parser.parse_args(argv)
    steps, output = PARTS[arguments.part], arguments.output / arguments.part
    if arguments.plan:
        for step in steps:
            sys.stdout.write(
                f"{step.limit_s:.0f} s: {' '.join(step.command(output / step.name))}\n"
            )
        return 0
    if not Path("tests/kernels").is_dir():
        sys.stderr.write("error: run it from the repository's root: there is no tests/kernels\n")
        return 2
    output.mkdir(parents=True, exist_ok=True)
    lines = run(steps, output, 60 * arguments.minutes)
    with tarfile.open(arguments.output / f"visit-{arguments.part}.tgz", "w:gz") as archive:
        archive.add(output, arguments.part)
    return 0 if all(": exit 0, " in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
