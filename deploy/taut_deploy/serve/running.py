"""Which ``taut serve`` processes run: one small file each, good while its process lives."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from taut_deploy.documents import read_json
from taut_deploy.errors import TautError, WorkerError
from taut_deploy.files import write_json_atomically

RECORD = "serve.json"
OUTPUT = "serve.log"
"""What ``taut serve --detach`` says while nobody looks."""
_POLL_S = 0.1


@dataclass(frozen=True)
class RunningServe:
    """One ``taut serve``.

    Args:
        pid: of the process.
        started_ticks: when the kernel says that it began, so that a later process of the same
            number is not taken for it.
        host: the gateway's address.
        port: the gateway's port.
        models: public names.
        children: names of the gateway and the workers; each has a log of that name.
        detached: whether it was started with ``--detach``.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    pid: int
    started_ticks: int
    host: str
    port: int
    models: list[str]
    children: list[str]
    detached: bool

    @property
    def url(self) -> str:
        """Of the gateway."""
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return _started_ticks(self.pid) == self.started_ticks


_READ = TypeAdapter(RunningServe)


def note_running(
    directory: Path, host: str, port: int, models: list[str], children: list[str], *, detached: bool
) -> None:
    """Write down that this process serves.

    Args:
        directory: of its configuration and logs.
        host: the gateway's address.
        port: the gateway's port.
        models: public names.
        children: names of its processes.
        detached: whether nobody waits for it.
    """
    ticks = _started_ticks(os.getpid())
    if ticks is None:  # no /proc: such a process cannot be told from a later one
        return
    record = RunningServe(os.getpid(), ticks, host, port, models, children, detached)
    write_json_atomically(directory / RECORD, asdict(record))


def forget_running(directory: Path) -> None:
    """Remove what :func:`note_running` wrote."""
    (directory / RECORD).unlink(missing_ok=True)


def running(run: Path) -> list[tuple[Path, RunningServe]]:
    """Every ``taut serve`` of this home that is alive, with its directory, by port.

    Args:
        run: the home's directory of runs.
    """
    found = []
    for file in sorted(run.glob(f"*/{RECORD}")):
        try:
            record = _READ.validate_json(json.dumps(read_json(file, WorkerError), allow_nan=False))
        except (ValidationError, TautError, ValueError):
            continue  # half a file of a killed process is no process
        if record.alive:
            found.append((file.parent, record))
    return sorted(found, key=lambda one: one[1].port)


def choose(run: Path, port: int | None) -> tuple[Path, RunningServe]:
    """Return the one that is meant.

    Args:
        run: the home's directory of runs.
        port: the gateway's port; None: the only one.

    Raises:
        WorkerError: none runs there, or several do and no port was given.
    """
    found = running(run)
    if port is not None:
        found = [one for one in found if one[1].port == port]
    if not found:
        where = "" if port is None else f" on port {port}"
        raise WorkerError(f"no 'taut serve' of this TAUT_HOME runs{where}; see 'taut ps'")
    if len(found) > 1:
        ports = ", ".join(str(record.port) for _, record in found)
        raise WorkerError(f"several run, on ports {ports}; give the port")
    return found[0]


def end(record: RunningServe, timeout_s: float, tick: Callable[[], None] = lambda: None) -> None:
    """Ask a ``taut serve`` to end as Ctrl-C would, and wait for it.

    Args:
        record: what to end.
        timeout_s: longest wait, seconds.
        tick: called while waiting.

    Raises:
        WorkerError: it still runs then.
    """
    os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while record.alive:
        if time.monotonic() > deadline:
            raise WorkerError(
                f"process {record.pid} still runs after {timeout_s:.0f} s; live streams are let "
                "finish: wait, or kill it"
            )
        tick()
        time.sleep(_POLL_S)


def _started_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``; None where there is no such process, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
