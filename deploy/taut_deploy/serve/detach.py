"""``taut serve --detach``: the same process, with nobody waiting for it."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from taut_deploy.errors import WorkerError
from taut_deploy.files import write_text_atomically
from taut_deploy.progress import Say
from taut_deploy.serve.running import OUTPUT
from taut_deploy.serve.settings import ServeSettings
from taut_deploy.serve.supervise import is_ready

_POLL_S = 0.5
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def serve_detached(settings: ServeSettings, directory: Path, say: Say) -> None:
    """Start ``taut serve`` in a session of its own and return when it is ready.

    What it says goes to ``serve.log`` and, until it is ready, to the user. Until then Ctrl-C,
    SIGTERM and a terminal that is closed end it.

    Args:
        settings: what to serve; the models are prepared already.
        directory: of its configuration and logs.
        say: prints one line for the user.

    Raises:
        WorkerError: it ended before it was ready.
        SystemExit: a signal told this process to end; so has what it started.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "serve.yaml"
    write_text_atomically(file, yaml.safe_dump(settings.model_dump(mode="json")))
    log = directory / OUTPUT
    argv = [sys.executable, "-m", "taut_deploy", "serve", "--config", str(file), "--detached"]
    with _noting_signals() as noted:
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        url = f"http://{settings.host}:{settings.port}/health/ready"
        try:
            _wait_until_ready(process, url, log, say, noted)
        except BaseException:
            process.terminate()
            process.wait()
            raise


@contextlib.contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Note the signals that would end this process, for as long as it has somebody to end first.

    Noted and not raised: between the start of a process and the moment its number is known an
    exception would leave it alone. A signal that is ignored (``nohup``) stays so.
    """
    noted: list[int] = []
    wanted = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: noted.append(n)) for number in wanted}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, say: Say, noted: list[int]
) -> None:
    said = 0
    while True:
        if noted:
            say(f"told to end by {signal.Signals(noted[0]).name}; ending what was started")
            raise SystemExit(128 + noted[0])
        ended = process.poll() is not None
        ready = not ended and is_ready(url)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines[said:]:
            say(line.removeprefix("taut: "))
        said = len(lines)
        if ended:
            reason = lines[-1].removeprefix("taut: ") if lines else "it said nothing"
            raise WorkerError(f"it ended before it was ready: {reason} (log: {log})")
        if ready and any("ready. Try:" in line for line in lines):
            return
        time.sleep(_POLL_S)
