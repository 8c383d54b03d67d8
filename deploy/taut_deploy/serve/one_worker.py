"""One worker started for a question and stopped when it is answered."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from taut_deploy.cache.golden_prompt import ask_until_ready
from taut_deploy.checkpoint import Golden
from taut_deploy.errors import WorkerError
from taut_deploy.progress import Say
from taut_deploy.serve.process import ChildSpec, RestartPolicy, SupervisedProcess

Answer = TypeVar("Answer")


async def until_ready(
    process: SupervisedProcess,
    run: asyncio.Task[None],
    ready: Coroutine[Any, Any, object],
    limit_s: float,
    late: str,
) -> None:
    """Wait until a process that was started is ready, and mark it so.

    Args:
        process: the child.
        run: its :meth:`~SupervisedProcess.run`.
        ready: ends when it is ready.
        limit_s: longest wait, seconds.
        late: message where that is over.

    Raises:
        WorkerError: it ended before, or is not ready in time.
    """
    waiting = asyncio.create_task(ready)
    try:
        await asyncio.wait({run, waiting}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        if not waiting.done():
            raise WorkerError(late)
        waiting.result()
        process.mark_ready()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def ask_one_worker(
    child: ChildSpec,
    url: str,
    name: str,
    golden: Golden | None,
    question: Callable[[], Answer],
    *,
    timeout_s: float,
    say: Say,
) -> Answer:
    """Start a worker, wait for its first correct token, ask it, and stop it.

    Args:
        child: how it is started.
        url: where it will listen.
        name: of its model on the API.
        golden: a prompt whose first token is known; None takes any answer.
        question: called in a thread once it answers; what it returns or raises is passed on.
        timeout_s: longest wait for the first correct token.
        say: prints one line for the user.

    Raises:
        WorkerError: the worker ended, answered wrongly or not in time.
    """
    process = SupervisedProcess(child, say, RestartPolicy(failures_before_ready=1))
    run = asyncio.create_task(process.run())
    late = f"no answer within {timeout_s:.0f} s (log: {child.log}); give a longer --timeout"
    try:
        await until_ready(process, run, ask_until_ready(url, name, golden), timeout_s, late)
        return await asyncio.to_thread(question)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
