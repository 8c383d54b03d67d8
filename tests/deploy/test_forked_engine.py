"""An engine as a fork of what imported vLLM: what it takes along, and when each process ends.

Each test runs a script that forks, as a worker does: this process has threads by now.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SCRIPT = '''
import json, multiprocessing, os, signal, sys, time
from taut_deploy.worker import forked_engine

IMPORTED = []


def tell(file):
    """The engine."""
    told = {
        "imported": IMPORTED,
        "NEW": os.environ.get("NEW"),
        "GONE": os.environ.get("GONE"),
        "of C": os.popen("echo $NEW").read().strip(),
        "SIGTERM": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "method": multiprocessing.get_start_method(),
        "name": multiprocessing.current_process().name,
        "server": os.getppid(),
        "files": sorted(os.readlink("/proc/self/fd/" + n) for n in os.listdir("/proc/self/fd")
                        if os.path.exists("/proc/self/fd/" + n)),
    }
    with open(file + ".new", "w") as out:
        json.dump(told, out)
    os.rename(file + ".new", file)


def wait(file):
    tell(file)
    time.sleep(600)


def fail(file):
    tell(file)
    sys.exit(7)


if __name__ == "__main__":
    IMPORTED.append("before the fork")
    os.environ["GONE"] = "1"
    forked_engine.fork_here()
    opened_later = open(sys.argv[1] + ".later", "w")
    IMPORTED.append("after it")
    os.environ["NEW"] = "value"
    del os.environ["GONE"]
    target = {"tell": tell, "wait": wait, "fail": fail}[sys.argv[2]]
    engine = forked_engine.EngineContext().Process(target=target, name="e", args=(sys.argv[1],))
    engine.start()
    if sys.argv[3:] == ["terminate"]:
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
        engine.terminate()
    engine.join()
    print(engine.exitcode)
'''


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    script = folder / "server.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(folder / "told.json"), *words]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def told(folder: Path) -> dict[str, object]:
    file, until = folder / "told.json", time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    found: dict[str, object] = json.loads(file.read_text())
    return found


def ends(pid: object, limit_s: float = 30) -> bool:
    """Whether a process is gone, or soon is; what is left of it for its parent does not count."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_engine_has_what_was_imported_and_the_environment_of_its_start(tmp_path):
    output, _ = start(tmp_path, "tell").communicate(timeout=60)
    found = told(tmp_path)
    assert output == "0\n"
    assert found["imported"] == ["before the fork"]
    assert (found["NEW"], found["GONE"], found["of C"]) == ("value", None, "value")
    assert found["SIGTERM"], "it can be ended, unlike its parent"
    assert (found["method"], found["name"]) == ("spawn", "e")
    assert str(tmp_path / "told.json.later") not in found["files"]


@pytest.mark.parametrize(("words", "code"), [(("fail",), 7), (("wait", "terminate"), -15)])
def test_server_is_told_how_its_engine_ended(tmp_path, words, code):
    output, _ = start(tmp_path, *words).communicate(timeout=60)
    assert output == f"{code}\n"
    assert ends(told(tmp_path)["server"])


def test_fork_that_waits_outlives_a_signal_to_all_and_ends_with_those_it_serves(tmp_path):
    server = start(tmp_path, "wait")
    waiting = int(str(told(tmp_path)["server"]))
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(waiting, number)
    assert not ends(waiting, 1), "an engine's exit code goes through it"
    (engine,) = Path(f"/proc/{waiting}/task/{waiting}/children").read_text().split()
    server.kill()
    server.wait()
    os.kill(int(engine), signal.SIGKILL)
    assert ends(engine)
    assert ends(waiting)


def test_server_that_starts_no_engine_leaves_nothing(tmp_path):
    script = (
        "from multiprocessing import forkserver; from taut_deploy.worker import forked_engine; "
        "forked_engine.fork_here(); print(forkserver._forkserver._forkserver_pid)"
    )
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True)
    assert ends(done.stdout.strip())
