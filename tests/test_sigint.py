"""The suite hears Ctrl-C, and so do the commands it starts, whatever shell it was started from."""

from __future__ import annotations

import subprocess
import sys

IGNORED = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
DEAF = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_command_starts_with_sigint_heard() -> None:
    words = [sys.executable, "-c", IGNORED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_so_it_does_in_a_suite_that_was_started_with_sigint_ignored() -> None:
    test = f"{__file__}::{test_a_command_starts_with_sigint_heard.__name__}"
    words = [sys.executable, "-c", DEAF, "-m", "pytest", "-q", test]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
