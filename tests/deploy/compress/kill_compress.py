"""Runs ``taut compress`` again and again in forked children and kills them; used by test_resume.py.

A script for ``check_server.CheckServer``, because forking is only safe before torch has started
threads, and because one import then serves all runs. Arguments: MODEL RECIPE WORK, and
``times COUNT`` or ``steps STRIDE``.
Prints one JSON document: ``hits`` (what each kill interrupted) and ``outputs`` (directories that
must be equal; the first was never disturbed).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from optimum.utils import NormalizedConfigManager
from transformers import conversion_mapping
from transformers.models.llama import modeling_llama

from taut_deploy import cli
from taut_deploy.compress import pipeline

PRELOADED = (
    transformers.AutoModelForCausalLM,
    transformers.AutoTokenizer,
    NormalizedConfigManager,
    pipeline,
    modeling_llama,
    conversion_mapping.get_checkpoint_conversion_mapping("llama"),  # hundreds of expressions
)
"""What every run would import or compile anew."""
# Durable steps: what changes the directory, and what flushes it.
EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod"}


def compress(model: str, recipe: str, output: Path, prepare: Callable[[], None]) -> int:
    """Start one run in a child; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        prepare()
        sys.argv = ["taut", "compress", model, "--recipe", recipe, "--output", str(output)]
        os._exit(cli.main())
    finally:
        os._exit(70)  # a traceback of ours


def finish(pid: int) -> bool:
    """Wait; True if the run ended well, False if it was killed."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"a run ended with {os.waitstatus_to_exitcode(status)}")
    return True


def state_of(output: Path) -> str:
    """Where a killed run was, read off the directory."""
    partial = output.parent / f".{output.name}.partial"
    if output.exists():
        return "published"
    if (partial / "taut.json").exists():
        return "sealed"
    if (partial / "model.safetensors.index.json").exists():
        return "writing the outer files"
    done = len(list((partial / ".state").glob("block-*.json")))
    if (partial / ".state" / "calibration.json").exists():
        return f"{done} blocks done"
    return "preparing" if partial.exists() else "starting"


def count_events(report: Path, die_before: int) -> Callable[[], None]:
    """Count durable steps below the work directory; die before the n-th (0: never)."""

    def prepare() -> None:
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event not in EVENTS:
                return
            path = Path(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else "")
            # rmtree names files relative to a directory it holds open.
            if path.is_absolute() and not path.is_relative_to(report.parent):
                return
            seen += 1
            if seen == die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            if die_before == 0:
                with report.open("a") as handle:
                    handle.write(f"{event} {path.name}\n")

        sys.addaudithook(hook)

    return prepare


def kill_at_steps(model: str, recipe: str, work: Path, stride: int) -> dict[str, object]:
    """One run per durable step: killed right before it, then finished by a second run."""
    undisturbed, report = work / "undisturbed" / "out", work / "events.txt"
    finish(compress(model, recipe, undisturbed, count_events(report, 0)))
    events = report.read_text().splitlines()
    outputs, hits = [undisturbed], []
    for step in range(1, len(events) + 1, stride):
        output = work / f"step-{step}" / "out"
        if finish(compress(model, recipe, output, count_events(report, step))):
            raise SystemExit(f"step {step} of {len(events)} was never reached")
        hits.append(f"{events[step - 1].split()[0]}: {state_of(output)}")
        finish(compress(model, recipe, output, lambda: None))
        outputs.append(output)
    return {"hits": hits, "outputs": [str(output) for output in outputs]}


def wait_for_progress(pid: int, output: Path) -> None:
    """Return when the run left the state it was started in, or ended."""
    before = state_of(output)
    while state_of(output) == before:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)


def kill_at_times(model: str, recipe: str, work: Path, count: int) -> dict[str, object]:
    """Kills at seeded random moments, several to a run, each followed by a restart.

    Every second one waits for the run's next step first: what a restart repeats (imports, the
    model, calibration) takes most of a run's time, and on a slow machine a clock alone would keep
    hitting that.
    """
    draw = random.Random(0)
    undisturbed = work / "undisturbed" / "out"
    started = time.monotonic()
    finish(compress(model, recipe, undisturbed, lambda: None))
    seconds = time.monotonic() - started
    outputs, hits = [undisturbed], []
    while len(hits) < count:
        output = work / f"run-{len(outputs)}" / "out"
        while len(hits) < count:
            pid = compress(model, recipe, output, lambda: None)
            if len(hits) % 2:
                wait_for_progress(pid, output)
                time.sleep(draw.uniform(0.0, seconds / 10))
            else:
                time.sleep(draw.uniform(0.0, seconds))
            os.kill(pid, signal.SIGKILL)
            if finish(pid):
                break
            hits.append(state_of(output))
        finish(compress(model, recipe, output, lambda: None))
        outputs.append(output)
    return {"hits": hits, "outputs": [str(output) for output in outputs]}


def main(arguments: Sequence[str]) -> None:
    """Kill runs as the arguments say."""
    torch.set_num_threads(1)
    model, recipe, work, how, number = arguments
    kill = {"times": kill_at_times, "steps": kill_at_steps}[how]
    print(json.dumps(kill(model, recipe, Path(work), int(number))))
