"""Processes of one run, one for each device: started, listened to, ended together."""

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from taut_deploy.compress.child_process import context_for, end_with_parent
from taut_deploy.errors import OutputError, TautError
from taut_deploy.idle_threads import sleeping

# (rank, devices, tell, what else) -> what rank 0 gives back
RankFunction = Callable[..., Any]
_LOOPBACK = Path("/sys/class/net/lo")
# How long a process that is left alone waits for the others in an exchange.
_PATIENCE = timedelta(minutes=30)
# How long a killed process takes to be seen, after the others noticed that it is gone.
_GRACE_SECONDS = 5.0


def run_ranks(
    function: RankFunction, devices: Sequence[str], given: Sequence[Any], told: Callable[..., None]
) -> Any:
    """Run a function in a process for each device, all of one group of ``torch.distributed``.

    Args:
        function: of an importable module; called with its rank, all devices, what tells the caller
            something, and ``given``.
        devices: one for each process.
        given: what can be pickled.
        told: called with what rank 0 tells.

    Returns:
        What the function gave back on rank 0.

    Raises:
        TautError: what one of the processes raised.
        OutputError: a process ended without a word.
    """
    context = context_for(devices)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="taut-ranks-") as folder:
        meeting = str(Path(folder) / "meeting")
        try:
            for rank in range(len(devices)):
                listen, tell = context.Pipe(duplex=False)
                arguments = (function, rank, tuple(devices), meeting, tell, tuple(given))
                process: BaseProcess = context.Process(target=_enter, args=arguments, daemon=True)
                with sleeping():
                    process.start()
                tell.close()  # so that its end is seen here
                processes.append(process)
                pipes.append(listen)
            return _listen(pipes, processes, devices, told)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _listen(
    pipes: list[Connection],
    processes: list[BaseProcess],
    devices: Sequence[str],
    told: Callable[..., None],
) -> Any:
    """Hand on what is told until all are done; what rank 0 gave back."""
    found: Any = None
    waiting = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    while waiting:
        open_pipes = [pipe for pipe in pipes if id(pipe) in waiting]
        for ready in wait(open_pipes):
            rank = waiting.get(id(ready), -1)
            kind, value = _heard(ready, processes, rank, devices)  # type: ignore[arg-type]
            if kind == "told":
                told(*value)
            elif kind == "refused":
                raise value
            elif kind == "broken":
                _look_for_the_dead(open_pipes, processes, devices)
                raise RuntimeError(f"the process of {devices[rank]} failed:\n{value}")
            else:
                found = value if rank == 0 else found
                del waiting[id(ready)]
    return found


def _heard(
    pipe: Connection, processes: list[BaseProcess], rank: int, devices: Sequence[str]
) -> tuple[str, Any]:
    try:
        heard: tuple[str, Any] = pipe.recv()
    except (EOFError, ConnectionError) as error:
        process = processes[rank]
        process.join(_GRACE_SECONDS)
        raise OutputError(
            f"--devices: process {rank}, of {devices[rank]}, ended with code {process.exitcode}, "
            "most likely for want of memory; run again, it goes on from the last saved state"
        ) from error
    return heard


def _look_for_the_dead(
    pipes: Sequence[Connection], processes: list[BaseProcess], devices: Sequence[str]
) -> None:
    """Raise for a process that ended without a word: the others fail for want of it.

    Raises:
        OutputError: names it.
    """
    for rank, process in enumerate(processes):
        process.join(_GRACE_SECONDS / len(processes))
        if process.exitcode is not None and process.exitcode < 0:
            raise OutputError(
                f"--devices: process {rank}, of {devices[rank]}, was killed by signal "
                f"{-process.exitcode}, most likely for want of memory; run again, it goes on from "
                "the last saved state"
            )


def _enter(
    function: RankFunction,
    rank: int,
    devices: tuple[str, ...],
    meeting: str,
    pipe: Connection,
    given: tuple[Any, ...],
) -> None:
    end_with_parent()
    try:
        _meet(rank, devices, meeting)
        found = function(rank, devices, lambda *what: pipe.send(("told", what)), *given)
        pipe.send(("done", found if rank == 0 else None))
    except TautError as error:
        pipe.send(("refused", error))
    except BaseException:  # told in the parent, which is the one to raise
        pipe.send(("broken", traceback.format_exc()))


def _meet(rank: int, devices: tuple[str, ...], meeting: str) -> None:
    import torch

    on_cards = devices[rank] != "cpu"
    if on_cards:
        torch.cuda.set_device(torch.device(devices[rank]))
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
        if _LOOPBACK.exists():  # all are on this machine, whatever its name resolves to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)
    torch.distributed.init_process_group(
        "nccl" if on_cards else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=len(devices),
        timeout=_PATIENCE,
    )
