"""Puts a report into the checkpoint it is about."""

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from taut_deploy.checkpoint import Manifest
from taut_deploy.compress.plan import CompressionPlan
from taut_deploy.compress.report.content import make_report
from taut_deploy.compress.report.render import html, markdown
from taut_deploy.compress.workspace import Workspace
from taut_deploy.files import COMPRESSION_REPORT, write_json_atomically, write_text_atomically


def write_log(
    workspace: Workspace, seconds: float, seconds_by_block: Mapping[str, float]
) -> dict[str, Any]:
    """Write wall-clock facts, kept out of the manifest so that equal runs give equal checkpoints.

    Args:
        workspace: of the run.
        seconds: that this run took.
        seconds_by_block: of the blocks that it compressed.
    """
    log = {
        "seconds": round(seconds, 3),
        "seconds_by_block": dict(seconds_by_block),
        "resumed": workspace.resumed,
        "host": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json_atomically(workspace.directory / "compression_log.json", log)
    return log


def write_report(
    directory: Path, manifest: Manifest, plan: CompressionPlan, log: Mapping[str, Any]
) -> None:
    """Write ``report.md``, which is sealed with the checkpoint, and ``report.html``.

    Args:
        directory: of the checkpoint, its shards written.
        manifest: not sealed yet.
        plan: of the run.
        log: wall-clock facts, as ``compression_log.json`` has them.

    Raises:
        OutputError: the disk cannot take them.
    """
    size = sum(shard.stat().st_size for shard in directory.glob("*.safetensors"))
    report = make_report(manifest, plan, size, log)
    write_text_atomically(directory / COMPRESSION_REPORT, markdown(report))
    write_text_atomically(directory / "report.html", html(report))
