"""vLLM with and without our kernels: ``python -m taut_bench.engine --output DIR``.

Writes a checkpoint of a model's shape (``--model``, Llama-3-8B's by default) with random weights
(``engine_checkpoint.py``), then starts one offline engine a mode, side by side, each in its own
process (``engine_process.py``). They take turns, cell by cell, in both orders
(``engine_turns.py``): tokens a second at several batch sizes and lengths of prompts
(``engine_measure.py``). Random weights say nothing about quality, and little about equal answers.
Files: ``engine-<scheme>.csv``, ``.md``, a plot, each mode's log and kernel record. ``--profile``
adds each mode's decode steps by kernel (``engine_profile.py``), after its figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from taut_bench import cuda_device
from taut_bench.engine_measure import BATCHES, CONTEXTS, JIT_MONITOR, Settings
from taut_bench.engine_models import ENGINE_MODELS
from taut_bench.engine_modes import HUMMING, MODES, unready
from taut_bench.engine_process import (
    EngineEndedError,
    EngineProcess,
    in_a_name,
    serve,
)
from taut_bench.engine_turns import Turns, write

TIMED_MODES = ("off", "prefer", "prefer+fused", "require+fused")
"""What is measured where nothing is asked for."""
_JIT_EVENT = " during inference: "
"""In every line of that monitor, warning or error, in front of the kernel's name."""


def _compiled(engine: EngineProcess) -> list[str]:
    """Return what vLLM's monitor says was compiled after warm-up."""
    lines = engine.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.partition(_JIT_EVENT)[2] for line in lines if _JIT_EVENT in line]


def _why(engine: EngineProcess, status: str, settings: Settings) -> str:
    """Return the note on an engine that ended by itself."""
    why, compiled = f"the engine ended with {status}", _compiled(engine)
    if compiled and settings.jit_monitor == "error":
        why += f" because {compiled[0].partition('. ')[0]} compiled after warm-up"
    return f"- {engine.mode}: not measured: {why}, see {engine.log.name}"


def _parser() -> argparse.ArgumentParser:
    from taut_bench.engine_checkpoint import SCHEMES

    parser = argparse.ArgumentParser(prog="python -m taut_bench.engine", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the results")
    add("--mode", action="append", choices=(*MODES, HUMMING))
    add("--batch", action="append", type=int)
    add("--context", action="append", type=int, help="tokens of a prompt")
    add("--scheme", choices=SCHEMES, default=SCHEMES[0])
    add("--model", choices=ENGINE_MODELS, default="llama3-8b", help="whose shape it has")
    add("--layers", type=int, help="instead of the model's own number")
    add("--checkpoint", type=Path, help="instead of random weights")
    add("--tensor-parallel-size", type=int, default=1, help="cards that share the model")
    add("--turns", type=int, default=2, help="times each cell is measured, in turns of order")
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
    add("--worker", choices=(*MODES, HUMMING), help=argparse.SUPPRESS)
    add("--channel", type=int, help=argparse.SUPPRESS)
    add("--profile-to", type=Path, help=argparse.SUPPRESS)
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        batches=tuple(arguments.batch or BATCHES),
        contexts=tuple(arguments.context or CONTEXTS),
        jit_monitor=arguments.jit_monitor,
        kv_cache_dtype=arguments.kv_cache_dtype,
        ranks=arguments.tensor_parallel_size,
    )


def run(
    checkpoint: Path,
    modes: Sequence[str],
    settings: Settings,
    facts: str,
    path: Path,
    *,
    profile: bool = False,
    turns: int = 2,
) -> int:
    """Measure modes in turns and report them.

    Args:
        checkpoint: what the engines load.
        modes: of :data:`MODES`, or :data:`HUMMING`.
        settings: of every mode.
        facts: machine, versions and date.
        path: the CSV; the other files lie beside it.
        profile: write each mode's decode steps by kernel, too.
        turns: times each cell is measured; every other one in reverse order of the modes.

    Returns:
        The exit status: 1 where a mode was not measured.
    """
    from taut_bench import plots

    engines = [EngineProcess(checkpoint, mode, settings, path.parent, profile) for mode in modes]
    measured, notes, starts = Turns(), [], {}
    for engine in engines:
        try:
            starts[engine.mode] = engine.ready()
        except EngineEndedError as ended:
            measured.failed[engine.mode] = str(ended)
    for turn in range(turns):
        measured.take(engines, settings, turn)
        if rows := measured.rows(modes):
            # After every turn: what was measured survives a run that is cut off.
            write(rows, [f"- {turn + 1} of {turns} turns"], facts, path)
    for engine in engines:
        notes += _closed(engine, measured, settings, starts, profile)
    if rows := measured.rows(modes):
        write(rows, notes, facts, path)
        sys.stdout.write(path.with_suffix(".md").read_text(encoding="utf-8"))
        sys.stdout.write(plots.draw_or_say(path) + "\n")
    for mode in measured.failed:
        sys.stderr.write(f"error: {mode} was not measured: see engine-{in_a_name(mode)}.log\n")
    return 1 if measured.failed else 0


def _closed(
    engine: EngineProcess,
    measured: Turns,
    settings: Settings,
    starts: dict[str, float],
    profile: bool,
) -> list[str]:
    """End an engine; return what there is to note."""
    from taut_bench import engine_profile

    try:
        engine.close()
    except EngineEndedError as ended:
        measured.failed.setdefault(engine.mode, str(ended))
    if engine.mode in measured.failed:
        return [_why(engine, measured.failed[engine.mode], settings)]
    note = (
        f"- {engine.mode}: {len(_compiled(engine))} kinds of kernel compiled after warm-up "
        f"(JIT monitor: {settings.jit_monitor}); started in {starts[engine.mode]:.0f} s, "
        "all modes side by side"
    )
    return [note, *(engine_profile.report(engine.mode, engine.by_kernel) if profile else [])]


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
        place = arguments.checkpoint, arguments.worker
        serve(arguments.channel, *place, settings, arguments.profile_to)
        return 0
    modes = arguments.mode or TIMED_MODES
    if unready(modes):
        return 2
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
        extra = {"profile": arguments.profile, "turns": arguments.turns}
        return run(checkpoint, modes, settings, facts, path, **extra)


if __name__ == "__main__":
    sys.exit(main())
