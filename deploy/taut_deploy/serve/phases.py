"""What a starting worker is doing, read from its log; a start takes minutes."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from taut_deploy.progress import Say
from taut_deploy.serve.process import SupervisedProcess

# What vLLM prints when a phase begins, in the order of a start. The later line in the log counts.
_PHASES = (
    (re.compile(r"Initializing a V1 LLM engine|init engine"), "starting the engine"),
    (re.compile(r"Starting to load model|Loading (safetensors|weights)"), "loading weights"),
    (re.compile(r"torch\.compile|Dynamo bytecode|Compiling a graph"), "compiling"),
    (re.compile(r"taut: compil(?!e cache)|Warming up model|warm-?up", re.IGNORECASE), "warming up"),
    (re.compile(r"[Cc]aptur(ing|e).*(CUDA )?graphs?"), "capturing CUDA graphs"),
    (re.compile(r"Starting vLLM (API )?server|Started server process"), "opening its port"),
)
_TAIL_BYTES = 64 << 10
_LONGEST_SILENCE_S = 30.0


class StartPhases:
    """Says what each worker is doing: when that changes, and twice a minute.

    Args:
        workers: that are starting.
        say: prints one line for the user.
        clock: seconds.
    """

    def __init__(
        self,
        workers: Sequence[SupervisedProcess],
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._say = say
        self._clock = clock
        self._began = clock()
        self._said: dict[str, tuple[str, float]] = {}

    def report(self) -> None:
        """Look at the logs, and say what is new or has not been said for long."""
        now = self._clock()
        for worker in self._workers:
            name = worker.spec.name
            phase = phase_of(worker.spec.log)
            before, when = self._said.get(name, ("", now))
            if phase != before or now - when >= _LONGEST_SILENCE_S:
                self._said[name] = (phase, now)
                self._say(f"{name}: {phase} ({now - self._began:.0f} s)")


def phase_of(log: Path) -> str:
    """Say what the process that writes ``log`` is doing.

    Args:
        log: output of a worker.

    Returns:
        A few words; ``"importing vLLM"`` before it said anything of its own.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "starting"
    for line in reversed(lines):
        # Engine options in a line, graphs to capture among them, stand behind what it is about.
        found = [
            (match.start(), words) for pattern, words in _PHASES if (match := pattern.search(line))
        ]
        if found:
            return min(found)[1]
    return "importing vLLM"
