"""``taut bench serve``: servers in turn, what is reported, and what is refused."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from taut_deploy.bench import serve, serve_report, server_process
from taut_deploy.bench.serve import Throughput
from taut_deploy.cli import app
from taut_deploy.errors import TautError


@contextmanager
def server(asked: list[str], name: str, status: int = 200, most: int = 1000) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(name)
            tokens = min(most, max(body["max_tokens"], body["min_tokens"]))
            answer = json.dumps({"usage": {"completion_tokens": tokens}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["bench", "serve", *arguments])
    if isinstance(found.exception, TautError):
        return 2, str(found.exception)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout


def test_servers_are_asked_in_turn_and_every_file_is_written(tmp_path: Path) -> None:
    asked: list[str] = []
    with server(asked, "a") as a, server(asked, "b") as b:
        code, out = run(
            *("--target", f"stock={a}/=m", "--target", f"ours={b}=m", "--rounds", "3"),
            *("--concurrency", "1", "--concurrency", "2", "--tokens", "8"),
            *("--output", str(tmp_path / "new")),
        )
    assert code == 0
    # A round to warm up and three to count, at one request and at two.
    assert asked == ["a", "b"] * 4 + ["a", "a", "b", "b"] * 4
    rows = list(csv.DictReader((tmp_path / "new" / "serve.csv").open()))
    assert [(row["label"], row["concurrency"]) for row in rows] == [
        ("stock", "1"),
        ("ours", "1"),
        ("stock", "2"),
        ("ours", "2"),
    ]
    for row in rows:
        spread = [float(row[name]) for name in ("lowest", "p20", "median", "p80", "highest")]
        assert spread == sorted(spread)
        assert (row["tokens"], row["rounds"]) == ("8", "3")
        assert row["CPU"]
        assert row["GPU"]
        assert row["date"]
    text = (tmp_path / "new" / "serve.md").read_text()
    assert text in out
    assert text.startswith("Measured with CPU ")
    assert "8 tokens an answer, 3 rounds in turn" in text
    assert (tmp_path / "new" / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_are_over_the_first_server_at_as_many_requests() -> None:
    rows = [
        Throughput(label, at_once, 8, median, median, median, median, median, 1)
        for at_once, pair in ((1, (10.0, 15.0)), (4, (40.0, 20.0)))
        for label, median in zip(("stock", "ours"), pair, strict=True)
    ]
    text = serve_report.markdown(rows, {"CPU": "2 x test"})
    assert "| ours | 1 | 15.0 (15.0 to 15.0) | 15.0 to 15.0 | 1.50 | – |" in text
    assert "| ours | 4 | 20.0 (20.0 to 20.0) | 20.0 to 20.0 | 0.50 | – |" in text
    assert text.startswith("Measured with CPU 2 x test; 8 tokens an answer, 1 rounds in turn.")


def test_fifths_of_rounds() -> None:
    load = serve.Load(1, 6, 8)
    found = serve._summary("a", load, [6.0, 1.0, 3.0, 2.0, 5.0, 4.0], [9.0, 7.0, 8.0])
    assert (found.lowest, found.p20, found.median, found.p80, found.highest) == (1, 2, 3.5, 5, 6)
    assert found.cpu_ms == 8.0
    alone = serve._summary("a", load, [7.0], [])
    assert alone.cpu_ms is None
    assert {alone.lowest, alone.p20, alone.median, alone.p80, alone.highest} == {7.0}


def test_json_has_the_same_figures() -> None:
    with server([], "a") as a:
        code, out = run("--target", f"a={a}=m", "--rounds", "2", "--concurrency", "1", "--json")
    (row,) = json.loads(out)
    assert code == 0
    assert (row["label"], row["rounds"], row["tokens"]) == ("a", 2, 64)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert "expected LABEL=URL=MODEL" in run("--target", "x")[1]
    two = ("--target", "a=http://127.0.0.1:9=m", "--target", "a=http://127.0.0.1:10=m")
    assert run(*two) == (2, "--target a=http://127.0.0.1:10=m: another one has this label")
    (tmp_path / "file").write_text("")
    code, out = run(*two[:2], "--output", str(tmp_path / "file" / "x"))
    assert (code, "Not a directory" in out) == (2, True), "before anything is measured"
    with server([], "a", status=500) as a:
        code, out = run("--target", f"a={a}=m", "--rounds", "1")
    assert (code, "answered 500" in out) == (2, True)


def test_a_key_that_is_none_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAUT_API_KEY", "two keys")
    asked: list[str] = []
    with server(asked, "a") as a:
        refused = run("--target", f"a={a}=m", "--rounds", "1")
    assert refused == (2, "TAUT_API_KEY: expected one key, a line of printable ASCII")
    assert asked == []


def test_a_machine_without_a_card_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert serve_report.describe_host()["GPU"] == "none here"
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.159.04'\n")
    fake.chmod(0o755)
    facts = serve_report.describe_host()
    assert (facts["GPU"], facts["driver"]) == ("NVIDIA H200", "580.159.04")


def test_a_server_that_ends_before_its_tokens_is_refused() -> None:
    with server([], "a", most=5) as a:
        code, out = run("--target", f"a={a}=m", "--rounds", "1", "--tokens", "8")
    assert (code, "answered 5 of 8 tokens" in out, "--tokens" in out) == (2, True, True)


_BUSY = """
import http.server, json, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        child.stdin.write(b"\\n"); child.stdin.flush(); child.stdout.readline()
        answer = json.dumps({"usage": {"completion_tokens": 4}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_): pass
WORK = '''
import sys, time
for line in sys.stdin:
    end = time.process_time() + 0.4
    while time.process_time() < end: pass
    print("done", flush=True)
'''
child = subprocess.Popen([sys.executable, "-c", WORK], stdin=-1, stdout=-1)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_the_cpu_time_of_a_token_counts_a_server_s_children() -> None:
    """A child burns 400 ms an answer of 4 tokens: 100 ms a token, read to 10 ms a process."""
    with subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE, text=True) as busy:
        try:
            assert busy.stdout is not None
            url = f"http://localhost:{int(busy.stdout.readline())}"
            arguments = ("--concurrency", "1", "--rounds", "1", "--tokens", "4", "--json")
            code, out = run("--target", f"a={url}=m", *arguments)
        finally:
            for process in psutil.Process(busy.pid).children():
                process.kill()
            busy.kill()
    assert code == 0
    assert 95 < json.loads(out)[0]["cpu_ms"] < 130


def test_a_server_elsewhere_has_no_cpu_time_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_process.server_at("http://192.0.2.7:8000") is None
    assert server_process.server_at("http://127.0.0.1:1") is None
    monkeypatch.setattr(serve, "server_at", lambda _: None)
    with server([], "a") as url:
        (found,) = serve.measure([serve.Target("a", url, "m")], serve.Load(1, 4, 2))
    assert found.cpu_ms is None


@pytest.mark.parametrize(("command", "whole"), [("serve", True), ("logs", False)])
def test_behind_a_gateway_of_taut_serve_its_workers_count(
    command: str, whole: bool, tmp_path: Path
) -> None:
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    listen += "print(s.getsockname()[1], flush=True); input()"
    script = tmp_path / "taut"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {listen!r}])")
    with subprocess.Popen(
        [sys.executable, str(script), command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None and starter.stdin is not None
        port = int(starter.stdout.readline())
        found = server_process.server_at(f"http://127.0.0.1:{port}")
        assert found is not None
        assert (found.pid == starter.pid) is whole
        starter.stdin.write("\n")
