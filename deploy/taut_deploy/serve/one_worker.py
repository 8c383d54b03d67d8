"""One worker started for a question and stopped when it is answered."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from taut_deploy.cache.golden_prompt import ask_until_ready
from taut_deploy.checkpoint import Golden
from taut_deploy.errors import WorkerError
from taut_deploy.progress import Say
from taut_deploy.serve.process import ChildSpec, RestartPolicy, SupervisedProcess

Answer = TypeVar("Answer")


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
    ready = asyncio.create_task(ask_until_ready(url, name, golden))
    try:
        await asyncio.wait({run, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        if not ready.done():
            raise WorkerError(
                f"no answer within {timeout_s:.0f} s (log: {child.log}); give a longer --timeout"
            )
        ready.result()
        process.mark_ready()
        return await asyncio.to_thread(question)
    finally:
        for task in (ready, run):
            task.cancel()
        await asyncio.gather(ready, run, return_exceptions=True)
