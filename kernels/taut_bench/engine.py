"""vLLM with and without our kernels: ``python -m taut_bench.engine --output DIR``.

Writes a checkpoint of Llama-3-8B's shape with random weights (``engine_checkpoint.py``), then
starts one offline engine a mode, each in its own process, and measures tokens a second at several
batch sizes. Random weights say nothing about quality, and little about equal answers. Files:
``engine-<scheme>.csv``, ``.md``, a plot, and for each mode the engine's log and kernel record.
``--profile`` adds each mode's decode steps by kernel (``engine_profile.py``), after its figures.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taut_bench import cuda_device
from taut_bench.engine_modes import MODES, engine_options, environment

TIMED_MODES = ("off", "prefer", "prefer+fused", "require+fused")
"""What is measured where nothing is asked for."""
BATCHES = (1, 16, 64, 256)
_PROMPT_TOKENS = 128
_ANSWER_TOKENS = 128
_PREFILL_SIZES = (128, 256, 384, 512)
"""Tokens of prefill steps with a CUDA graph: the first prompts to come are a small step. vLLM's own
sizes go to 512 in steps of 8 and 16; a start captures few of them sooner."""
_WARM_UPS = 6
"""Prefills nobody times: prompts come in steps of other sizes each time, and the first steps of a
size take longer (16 prompts: 93, 92, 78, 65, 64, 64 ms in turn on an H200), probably until cuBLAS
has loaded its kernels."""
JIT_MONITOR = ("warn", "error")
"""What vLLM's monitor of compilations after warm-up does: count them, or end the engine."""
_PROFILED_TOKENS = 24
"""Of an answer whose steps are profiled: a trace has every kernel of each."""
_GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
_ENGINE: dict[str, Any] = {
    "dtype": "auto",  # the checkpoint's own, as served: fp16 of GPTQ and AWQ
    "max_model_len": 1024,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.5,
    "skip_tokenizer_init": True,
    "seed": 0,
    "enable_prefix_caching": False,
}
"""Options of every engine."""
_JIT_EVENT = " during inference: "
"""In every line of that monitor, warning or error, in front of the kernel's name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell: tokens generated a second, and milliseconds of a decode step."""

    mode: str
    batch: int
    tokens_per_s: float
    decode_ms: float


def _row(mode: str, batch: int, repeats: int, seconds: Callable[[int], float]) -> Row:
    """Measure one batch size; ``seconds`` answers with so many tokens a prompt, and times it."""
    seconds(8)
    for _ in range(_WARM_UPS):
        seconds(1)
    whole = statistics.median(seconds(_ANSWER_TOKENS) for _ in range(repeats))
    prefill = statistics.median(seconds(1) for _ in range(repeats))
    step = (whole - prefill) / (_ANSWER_TOKENS - 1) * 1e3
    return Row(mode, batch, batch * _ANSWER_TOKENS / whole, step)


def measure(
    checkpoint: Path,
    mode: str,
    batches: Sequence[int],
    repeats: int = 3,
    jit_monitor: str = JIT_MONITOR[0],
    kv_cache_dtype: str = "auto",
    profile: Path | None = None,
) -> list[Row]:
    """Start an engine in this process and measure it.

    Args:
        checkpoint: of :func:`.engine_checkpoint.write`, or any other vLLM loads.
        mode: one of :data:`MODES`; ``TAUT_KERNELS`` already has its first part.
        batches: prompts at once; each is captured as a CUDA graph.
        repeats: the median counts.
        jit_monitor: of :data:`JIT_MONITOR`.
        kv_cache_dtype: of vLLM's option of that name.
        profile: the CSV for decode steps by kernel; none is written where it fails.

    Returns:
        One row a batch size.
    """
    import time

    import torch
    from vllm import LLM, SamplingParams

    from taut_bench import engine_profile

    traces = Path(tempfile.mkdtemp(prefix="taut-traces-")) if profile else None
    options = _ENGINE | engine_options(mode, sorted({*batches, *_PREFILL_SIZES}))
    llm = LLM(
        model=str(checkpoint),
        max_num_seqs=max(batches),
        jit_monitor_mode=jit_monitor,
        kv_cache_dtype=kv_cache_dtype,
        **options,
        **(engine_profile.options(traces) if traces else {}),
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, 1000, (max(batches), _PROMPT_TOKENS), generator=generator).tolist()

    def seconds(batch: int, answer: int) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt in tokens[:batch]]
        sampling = SamplingParams(max_tokens=answer, **_GREEDY)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    rows = [_row(mode, batch, repeats, functools.partial(seconds, batch)) for batch in batches]
    if profile and traces:
        calls = {b: functools.partial(seconds, b, _PROFILED_TOKENS) for b in batches}
        try:
            engine_profile.record_all(llm, mode, calls, traces, profile)
        except Exception as error:  # no profile is worth the figures before it
            sys.stdout.write(f"{mode}: the profile failed: {error}\n")
        finally:
            shutil.rmtree(traces, ignore_errors=True)
    return rows


def _in_a_name(mode: str) -> str:
    """Return a mode as names of files have it: a borrowed machine hands back none with a ``+``."""
    return mode.replace("+", "-")


def _in_own_process(
    checkpoint: Path,
    mode: str,
    batches: Sequence[int],
    directory: Path,
    jit_monitor: str,
    kv_cache_dtype: str,
    profile: bool,
) -> tuple[list[Row], list[str]]:
    """Measure one mode in a fresh process; its rows, and what there is to note."""
    from taut_bench import engine_profile

    log = directory / f"engine-{_in_a_name(mode)}.log"
    command = [sys.executable, "-m", "taut_bench.engine", "--worker", mode]
    command += ["--checkpoint", str(checkpoint), "--jit-monitor", jit_monitor]
    command += ["--kv-cache-dtype", kv_cache_dtype]
    command += [argument for batch in batches for argument in ("--batch", str(batch))]
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
            if compiled and jit_monitor == "error":
                why += f" because {compiled[0].partition('. ')[0]} compiled after warm-up"
            return [], [f"- {mode}: not measured: {why}, see {log.name}"]
        rows = [Row(**row) for row in json.loads(answer.read_text(encoding="utf-8"))]
    monitor = f"JIT monitor: {jit_monitor}"
    notes = [f"- {mode}: {len(compiled)} kinds of kernel compiled after warm-up ({monitor})"]
    return rows, notes + (engine_profile.report(mode, by_kernel) if profile else [])


def _write(rows: Sequence[Row], notes: Sequence[str], facts: str, path: Path) -> None:
    """Write the CSV at ``path`` and the Markdown beside it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    stock = {row.batch: row for row in rows if row.mode == "off"}
    lines = [f"Measured with {facts}.", "", "| mode | batch | tokens/s | decode step, ms | ratio |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        base = stock.get(row.batch)
        ratio = f"{row.tokens_per_s / base.tokens_per_s:.2f}" if base else "–"
        figures = f"{row.tokens_per_s:.0f} | {row.decode_ms:.2f} | {ratio}"
        lines.append(f"| {row.mode} | {row.batch} | {figures} |")
    lines += ["", *notes, ""]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    from taut_bench.engine_checkpoint import SCHEMES

    parser = argparse.ArgumentParser(prog="python -m taut_bench.engine", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--scheme", choices=SCHEMES, default=SCHEMES[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--checkpoint", type=Path, help="instead of random weights")
    parser.add_argument(
        "--jit-monitor",
        choices=JIT_MONITOR,
        default=JIT_MONITOR[0],
        help="count compilations after warm-up, or let one end the engine",
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="of every mode, as vLLM spells it")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="profile some steps of each mode, too, after its figures: where a step goes",
    )
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--profile-to", type=Path, help=argparse.SUPPRESS)
    return parser


def run(
    checkpoint: Path,
    modes: Sequence[str],
    batches: Sequence[int],
    facts: str,
    path: Path,
    jit_monitor: str = JIT_MONITOR[0],
    kv_cache_dtype: str = "auto",
    profile: bool = False,
) -> int:
    """Measure modes one after another and report them.

    Args:
        checkpoint: what the engines load.
        modes: of :data:`MODES`.
        batches: prompts at once.
        facts: machine, versions and date.
        path: the CSV; the other files lie beside it.
        jit_monitor: of :data:`JIT_MONITOR`.
        kv_cache_dtype: of vLLM's option of that name.
        profile: write each mode's decode steps by kernel, too.

    Returns:
        The exit status: 1 where a mode was not measured.
    """
    from taut_bench import plots

    rows: list[Row] = []
    notes: list[str] = []
    measured = set()
    for mode in modes:
        found, said = _in_own_process(
            checkpoint, mode, batches, path.parent, jit_monitor, kv_cache_dtype, profile
        )
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where a mode was not measured."""
    import torch

    arguments = _parser().parse_args(argv)
    if cuda_device.missing("taut_bench.engine"):
        return 2
    batches = arguments.batch or list(BATCHES)
    if arguments.worker:
        rows = measure(
            arguments.checkpoint,
            arguments.worker,
            batches,
            jit_monitor=arguments.jit_monitor,
            kv_cache_dtype=arguments.kv_cache_dtype,
            profile=arguments.profile_to,
        )
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
            sizes = engine_checkpoint.LLAMA_3_8B | {"num_hidden_layers": arguments.layers}
            engine_checkpoint.write(checkpoint, arguments.scheme, sizes)
            torch.cuda.empty_cache()
        cached = arguments.kv_cache_dtype
        suffix = "" if cached == "auto" else f"-kv-{cached}"
        csv_path = arguments.output / f"engine-{arguments.scheme}{suffix}.csv"
        modes = arguments.mode or TIMED_MODES
        return run(
            checkpoint,
            modes,
            batches,
            facts,
            csv_path,
            arguments.jit_monitor,
            cached,
            profile=arguments.profile,
        )


if __name__ == "__main__":
    sys.exit(main())
