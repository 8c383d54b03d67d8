"""The command line of a worker says what its spec says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from taut_deploy import cli
from taut_deploy.commands import worker as command
from taut_deploy.worker import WorkerSpec, worker_command

SPECS = {
    "all left open": WorkerSpec(Path("m")),
    "all said": WorkerSpec(
        Path("a model"),
        name="n",
        host="0.0.0.0",
        port=17,
        max_model_len=64,
        kv_cache_dtype="fp8",
        kernels="off",
        fused_ops=True,
        decode_attention=False,
        kv_cache_gib=3,
        shutdown_timeout_s=5,
        cache=Path("v"),
        tune_budget_s=7.5,
        extra=("--max-num-seqs", "4", "--enforce-eager"),
    ),
    "refused": WorkerSpec(Path("m"), fused_ops=False, decode_attention=True),
}


@pytest.mark.parametrize("which", SPECS)
def test_the_command_reads_what_was_written(which, monkeypatch):
    made: list[WorkerSpec] = []
    monkeypatch.setattr(command, "exec_worker", made.append)
    monkeypatch.delenv("TAUT_COMPILE_CACHE", raising=False)
    argv = worker_command(SPECS[which])
    assert argv[:3] == (sys.executable, "-m", "taut_deploy")
    cli.app(list(argv[3:]), standalone_mode=False)
    assert made == [SPECS[which]]
