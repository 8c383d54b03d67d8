"""``taut serve --detach``, ``ps``, ``logs`` and ``stop``: what a terminal that closes leaves."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from serving import Served, post, run_taut, status_of

from taut_deploy.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_detached_serve_is_listed_logged_and_stopped(served: Served, tmp_path: Path) -> None:
    port = free_port()

    def taut(*words: str) -> str:
        done = run_taut(*words, timeout_s=600, home=tmp_path / "home")
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout + done.stderr

    checkpoint = str(served.checkpoint)
    options = ("--model", checkpoint, "--port", str(port), "--detach")
    taut("serve", *options, "--", "--enforce-eager")
    (record,) = json.loads(taut("ps", "--json"))
    try:
        assert (record["port"], record["ready"], record["detached"]) == (port, True, True)
        assert f"{record['pid']}  http://127.0.0.1:{port}  ready" in taut("ps")
        (model,) = record["models"]
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4}
        status, answer = post(f"http://127.0.0.1:{port}/v1/completions", body | {"temperature": 0})
        assert (status, answer["choices"][0]["text"].startswith(" Paris")) == (200, True)
        assert "ready" in taut("logs")
        (worker,) = (name for name in record["children"] if name != "gateway")
        assert "vLLM" in taut("logs", "--name", worker, "--lines", "1000")
        children = psutil.Process(record["pid"]).children(recursive=True)
    finally:
        said = taut("stop", str(port))
    assert f"stopped http://127.0.0.1:{port}" in said
    assert status_of(f"http://127.0.0.1:{port}/health/ready") == 0
    assert "nothing runs" in taut("ps")
    assert psutil.wait_procs(children, timeout=30)[1] == []
