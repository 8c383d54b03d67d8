"""What runs, what it is doing, and how it is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from taut_deploy.errors import WorkerError
from taut_deploy.serve.phases import StartPhases, phase_of
from taut_deploy.serve.running import (
    RunningServe,
    choose,
    end,
    forget_running,
    note_running,
    running,
)


def noted(run: Path, port: int) -> RunningServe:
    directory = run / str(port)
    directory.mkdir(parents=True)
    note_running(directory, "127.0.0.1", port, ["m"], ["gateway", "m-0"], detached=False)
    ((_, record),) = [one for one in running(run) if one[1].port == port]
    return record


def test_this_process_is_found_and_forgotten(tmp_path):
    record = noted(tmp_path, 8000)
    assert record.pid == os.getpid()
    assert record.alive
    assert record.url == "http://127.0.0.1:8000"
    forget_running(tmp_path / "8000")
    assert running(tmp_path) == []


def test_a_process_that_is_gone_and_one_of_the_same_number_are_not_believed(tmp_path):
    record = noted(tmp_path, 8000)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for stale in (
        replace(record, pid=child.pid),
        replace(record, started_ticks=record.started_ticks + 1),
    ):
        (tmp_path / "8000" / "serve.json").write_text(json.dumps(asdict(stale)))
        assert running(tmp_path) == []
    for damaged in ('{"pid": 1', '{"pid": "1"}', "[]"):
        (tmp_path / "8000" / "serve.json").write_text(damaged)
        assert running(tmp_path) == []


def test_which_one_is_meant(tmp_path):
    with pytest.raises(WorkerError, match="no 'taut serve' of this TAUT_HOME runs;"):
        choose(tmp_path, None)
    noted(tmp_path, 8001)
    assert choose(tmp_path, None)[0] == tmp_path / "8001"
    noted(tmp_path, 8000)
    with pytest.raises(WorkerError, match="several run, on ports 8000, 8001; give the port"):
        choose(tmp_path, None)
    assert choose(tmp_path, 8001)[1].port == 8001
    with pytest.raises(WorkerError, match="runs on port 9;"):
        choose(tmp_path, 9)


def process(code: str) -> tuple[subprocess.Popen[bytes], RunningServe]:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return child, RunningServe(child.pid, int(stat[19]), "127.0.0.1", 1, [], [], detached=True)


def test_stop_sends_what_ctrl_c_would_and_waits():
    child, record = process("import time; print('up', flush=True); time.sleep(60)")
    end(record, 10)
    assert child.wait() == -15


def test_stop_says_so_when_it_still_runs():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True)"
    child, record = process(f"{deaf}; time.sleep(60)")
    with pytest.raises(WorkerError, match=f"process {child.pid} still runs after 0 s"):
        end(record, 0.3)
    child.kill()
    child.wait()


DETACH = """
import sys
from pathlib import Path
from types import SimpleNamespace
from taut_deploy.serve import detach

folder = Path(sys.argv[1])
detach.sys = SimpleNamespace(executable=str(folder / "serve"))
settings = SimpleNamespace(model_dump=lambda mode: {}, host="127.0.0.1", port=1)
detach.serve_detached(settings, folder / "run", lambda line: print(line, flush=True))
"""


def test_detach_that_is_told_to_end_while_it_waits_leaves_no_child(tmp_path):
    number = signal.SIGTERM
    program = tmp_path / "serve"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/number; exec sleep 60\n")
    program.chmod(0o755)
    waiting = subprocess.Popen(
        [sys.executable, "-c", DETACH, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    child = 0
    try:
        for _ in range(600):
            if (tmp_path / "number").is_file() and (tmp_path / "number").read_text().endswith("\n"):
                break
            time.sleep(0.05)
        child = int((tmp_path / "number").read_text())
        waiting.send_signal(number)
        said, _ = waiting.communicate(timeout=20)
        assert waiting.returncode == 128 + number
        assert said == f"told to end by {number.name}; ending what was started\n"
        assert not psutil.pid_exists(child)
    finally:
        waiting.kill()
        if child and psutil.pid_exists(child):
            os.kill(child, signal.SIGKILL)


LINES = [
    ("INFO [core.py] Initializing a V1 LLM engine (v0.32.0) with config: …", "starting the engine"),
    (
        "INFO [core.py] Initializing a V1 LLM engine (v0.32.0) with config: compilation_config="
        "{'cudagraph_capture_sizes': [], 'cudagraph_copy_inputs': False}",
        "starting the engine",
    ),
    ("INFO [model_runner.py] Starting to load model /m...", "loading weights"),
    ("Loading safetensors checkpoint shards:   0% Completed", "loading weights"),
    ("INFO [backends.py] Dynamo bytecode transform time: 3.9 s", "compiling"),
    ("INFO Capturing CUDA graphs (decode, FULL): 30%", "capturing CUDA graphs"),
    ("INFO [launcher.py] Started server process [1]", "opening its port"),
]


def test_the_log_tells_the_phase(tmp_path):
    log = tmp_path / "w.log"
    assert phase_of(log) == "starting"
    log.write_text("taut: compile cache /c/cpu-01: warm\nWARNING: something else\n")
    assert phase_of(log) == "importing vLLM"
    for line, phase in LINES:
        with log.open("a") as file:
            file.write(f"{line}\nsome other words\n")
        assert phase_of(log) == phase


def test_a_phase_is_said_when_it_begins_and_every_half_minute(tmp_path):
    worker = SimpleNamespace(spec=SimpleNamespace(name="m-0", log=tmp_path / "w.log"))
    now, said = [0.0], []
    phases = StartPhases([worker], said.append, clock=lambda: now[0])
    (tmp_path / "w.log").write_text(LINES[0][0])
    for second in range(100):
        now[0] = float(second)
        if second == 20:
            (tmp_path / "w.log").write_text(LINES[2][0])
        phases.report()
    assert said == [
        "m-0: starting the engine (0 s)",
        "m-0: loading weights (20 s)",
        "m-0: loading weights (50 s)",
        "m-0: loading weights (80 s)",
    ]
