"""Commands side by side on a machine of several GPUs.

``python -m tuning.on_cards JOBS --output DIR --cards N --seconds S``: JOBS is a folder of JSON
files, each a :class:`Job`. They begin in the order of their files' names, each with as many cards
of its own as it asks for, as soon as those are free and the files it needs are there. More files
may be put there while others run; one that is not JSON yet is read again. Ends when nothing runs or
waits, or after S seconds, which kills what still runs. For each job the output has ``NAME/log`` and
``NAME/result.json``: exit code, seconds and cards.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PAUSE_S = 0.2
TIMED_OUT = 124
"""Exit code of a job that took longer than it may, as ``timeout`` has it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One command.

    Attributes:
        name: of its folder.
        command: for bash; ``$RESULTS`` is its folder.
        cards: that it sees, from number 0 on; 0 for none.
        needs: files that have to be there before it begins.
        limit_s: longest run.
        environment: variables beside those of this process.
    """

    name: str
    command: str
    cards: int = 1
    needs: tuple[str, ...] = ()
    limit_s: float = 600.0
    environment: dict[str, str] = field(default_factory=dict)

    def may_begin(self, free: int) -> bool:
        """Say whether so many free cards and the files that are there are enough."""
        return self.cards <= free and all(Path(path).exists() for path in self.needs)


@dataclass(slots=True)
class _Running:
    job: Job
    cards: list[int]
    process: subprocess.Popen[bytes]
    begun: float

    def end(self, now: float) -> int | None:
        """Return the exit code once there is one; ends what takes too long."""
        code = self.process.poll()
        if code is None and now - self.begun > self.job.limit_s:
            self.kill()
            return TIMED_OUT
        return code

    def kill(self) -> None:
        """End it and what it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Queue:
    """Jobs of a folder and the cards they share.

    Args:
        jobs: folder of the files; one is removed when its job begins.
        output: folder of the results.
        cards: numbers of the cards.
    """

    def __init__(self, jobs: Path, output: Path, cards: Sequence[int]) -> None:
        self._jobs = jobs
        self._output = output
        self._free = sorted(cards)
        self._cards = len(self._free)
        self._running: list[_Running] = []

    def step(self) -> bool:
        """Note what ended and begin what may; say whether anything runs or waits."""
        for one in list(self._running):
            code = one.end(time.monotonic())
            if code is not None:
                self._note(one, code)
        waiting = False
        for path in sorted(self._jobs.glob("*.json")):
            job = self._read(path)
            if job is not None and job.may_begin(len(self._free)):
                path.unlink()
                self._begin(job)
            else:
                waiting = True
        return bool(self._running) or waiting

    def kill(self) -> None:
        """End everything that runs."""
        for one in list(self._running):
            one.kill()
            self._note(one, TIMED_OUT)

    def _read(self, path: Path) -> Job | None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return None  # still being written
        job = Job(**found | {"needs": tuple(found.get("needs", ()))})
        if job.cards > self._cards:
            raise ValueError(f"{path.name}: wants {job.cards} cards, there are {self._cards}")
        return job

    def _begin(self, job: Job) -> None:
        folder = self._output / job.name
        folder.mkdir(parents=True, exist_ok=True)
        cards, self._free = self._free[: job.cards], self._free[job.cards :]
        own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards)), "RESULTS": str(folder)}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", job.command],
                env={**os.environ, **job.environment, **own},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(_Running(job, cards, process, time.monotonic()))

    def _note(self, one: _Running, code: int) -> None:
        self._running.remove(one)
        self._free = sorted([*self._free, *one.cards])
        seconds = round(time.monotonic() - one.begun, 1)
        told = {"code": code, "seconds": seconds, "cards": one.cards}
        (self._output / one.job.name / "result.json").write_text(json.dumps(told), encoding="utf-8")
        sys.stdout.write(f"{one.job.name}: exit code {code} after {seconds:g} s\n")
        sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where a job failed or did not begin."""
    parser = argparse.ArgumentParser(prog="python -m tuning.on_cards", description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cards", type=int, required=True, help="number of cards, from 0 on")
    parser.add_argument("--seconds", type=float, required=True, help="kills what runs then")
    arguments = parser.parse_args(argv)
    queue = Queue(arguments.jobs, arguments.output.resolve(), range(arguments.cards))
    end = time.monotonic() + arguments.seconds
    while (busy := queue.step()) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    queue.kill()
    results = arguments.output.glob("*/result.json")
    codes = [json.loads(path.read_text(encoding="utf-8"))["code"] for path in results]
    return int(busy or any(codes))


if __name__ == "__main__":
    sys.exit(main())
