"""What every suite starts with."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take SIGINT again where the shell that started the suite has it ignored.

    A shell without job control starts background commands that way (POSIX: asynchronous lists),
    `execve` hands an ignored signal on, and Python then leaves it ignored: a command under test
    would not hear the Ctrl-C a test sends, and the test would wait for it in vain.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
