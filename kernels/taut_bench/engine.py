"""vLLM with and without our kernels: ``python -m taut_bench.engine --output DIR``.

Writes a checkpoint of a model's shape (``--model``, Llama-3-8B's by default) with random weights
(``engine_checkpoint.py``), then starts one offline engine a mode, each in its own process, and
measures tokens a second at several batch sizes and lengths of prompts (``engine_measure.py``).
Random weights say nothing about quality, and little about equal answers. Files:
``engine-<scheme>.csv``, ``.md``, a plot, and for each mode the engine's log and kernel record.
``--profile`` adds each mode's decode steps by kernel (``engine_profile.py``), after its figures.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from taut_bench import cuda_device
from taut_bench.engine_measure import (
    BATCHES,
    CONTEXTS,
    JIT_MONITOR,
    Row,
    Settings,
    measure,
)
from taut_bench.engine_models import ENGINE_MODELS
from taut_bench.engine_modes import MODES, environment

TIMED_MODES = ("off", "prefer", "prefer+fused", "require+fused")
"""What is measured where nothing is asked for."""
_JIT_EVENT = " during inference: "
"""In every line of that monitor, warning or error, in front of the kernel's name."""


def _in_a_name(mode: str) -> str:
    """Return a mode as names of files have it: a borrowed machine hands back none with a ``+``."""
    return mode.replace("+", "-")


def _in_own_process(
    checkpoint: Path, mode: str, settings: Settings, directory: Path, profile: bool
) -> tuple[list[Row], list[str]]:
    """Measure one mode in a fresh process; its rows, and what there is to note."""
    from taut_bench import engine_profile

    log = directory / f"engine-{_in_a_name(mode)}.log"
    command = [sys.executable, "-m", "taut_bench.engine", "--worker", mode]
    command += ["--checkpoint", str(checkpoint), *settings.arguments()]
    by_kernel = directory / f"engine-{_in_a_name(mode)}-profile.csv"
    if profile:
        command += ["--profile-to", str(by_kernel)]
    variables = environment(mode, directory / f"engine-{_in_a_name(mode)}-kernels.json")
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "rows.json"
        command += ["--output", str(answer)]
        with log.open("w") as sink:
            code = subprocess.run(
                command, stdout=sink, stderr=subprocess.STDOUT, env=variables, check=False
            ).returncode
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        compiled = [line.partition(_JIT_EVENT)[2] for line in lines if _JIT_EVENT in line]
        if code:
            why = f"the engine ended with {code}"
            if compiled and settings.jit_monitor == "error":
                why += f" because {compiled[0].partition('. ')[0]} compiled after warm-up"
            return [], [f"- {mode}: not measured: {why}, see {log.name}"]
        rows = [Row(**row) for row in json.loads(answer.read_text(encoding="utf-8"))]
    notes = [
        f"- {mode}: {len(compiled)} kinds of kernel compiled after warm-up "
        f"(JIT monitor: {settings.jit_monitor}); started in {rows[0].start_s:.0f} s"
    ]
    return rows, notes + (engine_profile.report(mode, by_kernel) if profile else [])


def _write(rows: Sequence[Row], notes: Sequence[str], facts: str, path: Path) -> None:
    """Write the CSV at ``path`` and the Markdown beside it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    stock = {(row.context, row.batch): row for row in rows if row.mode == "off"}
    columns = "| mode | prompt | batch | tokens/s | decode step, ms | ratio |"
    lines = [f"Measured with {facts}.", "", columns, "|---|---|---|---|---|---|"]
    for row in rows:
        base = stock.get((row.context, row.batch))
        ratio = f"{row.tokens_per_s / base.tokens_per_s:.2f}" if base else "–"
        figures = f"{row.tokens_per_s:.0f} | {row.decode_ms:.2f} | {ratio}"
        lines.append(f"| {row.mode} | {row.context} | {row.batch} | {figures} |")
    lines += ["", *notes, ""]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    from taut_bench.engine_checkpoint import SCHEMES

    parser = argparse.ArgumentParser(prog="python -m taut_bench.engine", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the results")
    add("--mode", action="append", choices=MODES)
    add("--batch", action="append", type=int)
    add("--context", action="append", type=int, help="tokens of a prompt")
    add("--scheme", choices=SCHEMES, default=SCHEMES[0])
    add("--model", choices=ENGINE_MODELS, default="llama3-8b", help="whose shape it has")
    add("--layers", type=int, help="instead of the model's own number")
    add("--checkpoint", type=Path, help="instead of random weights")
    add("--tensor-parallel-size", type=int, default=1, help="cards that share the model")
    add("--memory", type=float, default=0.5, help="share of a card's memory for an engine")
    add(
        "--jit-monitor",
        choices=JIT_MONITOR,
        default=JIT_MONITOR[0],
        help="count compilations after warm-up, or let one end the engine",
    )
    add("--kv-cache-dtype", default="auto", help="of every mode, as vLLM spells it")
    add(
        "--profile",
        action="store_true",
        help="profile some steps of each mode, too, after its figures: where a step goes",
    )
    add("--worker", choices=MODES, help=argparse.SUPPRESS)
    add("--profile-to", type=Path, help=argparse.SUPPRESS)
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        batches=tuple(arguments.batch or BATCHES),
        contexts=tuple(arguments.context or CONTEXTS),
        jit_monitor=arguments.jit_monitor,
        kv_cache_dtype=arguments.kv_cache_dtype,
        ranks=arguments.tensor_parallel_size,
        memory=arguments.memory,
    )


def run(
    checkpoint: Path,
    modes: Sequence[str],
    settings: Settings,
    facts: str,
    path: Path,
    profile: bool = False,
) -> int:
    """Measure modes one after another and report them.

    Args:
        checkpoint: what the engines load.
        modes: of :data:`MODES`.
        settings: of every mode.
        facts: machine, versions and date.
        path: the CSV; the other files lie beside it.
        profile: write each mode's decode steps by kernel, too.

    Returns:
        The exit status: 1 where a mode was not measured.
    """
    from taut_bench import plots

    rows: list[Row] = []
    notes: list[str] = []
    measured = set()
    for mode in modes:
        found, said = _in_own_process(checkpoint, mode, settings, path.parent, profile)
        rows += found
        notes += said
        measured |= {row.mode for row in found}
        if rows:
            # After every mode: what was measured survives a run that is cut off.
            _write(rows, notes, facts, path)
    if rows:
        sys.stdout.write(path.with_suffix(".md").read_text(encoding="utf-8"))
        sys.stdout.write(plots.draw_or_say(path) + "\n")
    for mode in modes:
        if mode not in measured:
            sys.stderr.write(f"error: {mode} was not measured: see engine-{_in_a_name(mode)}.log\n")
    return 0 if measured == set(modes) else 1


def _name(arguments: argparse.Namespace) -> str:
    """Return the results' name: what differs from Llama-3-8B's shape on one card is in it."""
    parts = ["engine", arguments.scheme]
    if arguments.model != "llama3-8b":
        parts.append(arguments.model)
    if arguments.tensor_parallel_size > 1:
        parts.append(f"tp{arguments.tensor_parallel_size}")
    if arguments.kv_cache_dtype != "auto":
        parts.append(f"kv-{arguments.kv_cache_dtype}")
    return "-".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where a mode was not measured."""
    import torch

    arguments = _parser().parse_args(argv)
    if cuda_device.missing("taut_bench.engine"):
        return 2
    settings = _settings(arguments)
    if arguments.worker:
        rows = measure(arguments.checkpoint, arguments.worker, settings, arguments.profile_to)
        text = json.dumps([asdict(row) for row in rows])
        arguments.output.write_text(text, encoding="utf-8")
        return 0
    from taut_bench import engine_checkpoint, report

    arguments.output.mkdir(parents=True, exist_ok=True)
    facts = ", ".join(f"{key} {value}" for key, value in report.environment().items())
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = Path(scratch) / "checkpoint"
            sizes = dict(ENGINE_MODELS[arguments.model])
            sizes["num_hidden_layers"] = arguments.layers or sizes["num_hidden_layers"]
            engine_checkpoint.write(checkpoint, arguments.scheme, sizes)
            torch.cuda.empty_cache()
        path = arguments.output / f"{_name(arguments)}.csv"
        modes = arguments.mode or TIMED_MODES
        return run(checkpoint, modes, settings, facts, path, profile=arguments.profile)


if __name__ == "__main__":
    sys.exit(main())
