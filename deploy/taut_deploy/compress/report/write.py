"""Puts a report into the checkpoint it is about."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taut_deploy.checkpoint import Manifest
from taut_deploy.compress.plan import CompressionPlan
from taut_deploy.compress.report.content import make_report
from taut_deploy.compress.report.render import html, markdown
from taut_deploy.files import COMPRESSION_REPORT, write_text_atomically


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
