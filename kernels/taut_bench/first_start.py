"""What a first start compiles, and how long: ``python -m taut_bench.first_start``.

The kernels that a worker with Llama-3-8B in W4A16 (symmetric groups of 128, bf16) warms up: its
four layers', decode attention's, norms', activation's and RoPE's, by the plugin's own warm-ups.
Layers and attention are asked for first, as where a model is made: on the products' account. For
each number of compilers side by side (:mod:`taut_kernels.launch.compile_ahead`) in a process of its
own with an empty Triton cache. Loading weights, vLLM's own kernels and graphs are not in it. Writes
``first_start.csv`` and ``first_start.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton

from taut_bench import cuda_device, report, shapes
from taut_bench.w4a16_format import GROUP_SIZE
from taut_kernels.gemm.w4a16.lookup import ONE_OF_EACH
from taut_kernels.gemm.w4a16.plan import Weight
from taut_kernels.launch import compile_ahead, launcher
from taut_kernels.tuner import w4a16_layer
from taut_kernels.vllm_plugin import warm_up, warm_up_decode

COMPILERS = (1, 8)
SHAPES = ("qkv", "o", "gate_up", "down")
"""In the order in which layers are loaded; those of equal K share forms."""
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM = 4096, 14336, 32, 8, 128
_PAGE, _SEQUENCES = 16, 256
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        compilers: beside each other.
        what: was warmed up.
        forms: that Triton compiled for it.
        seconds: it took.
    """

    compilers: int
    what: str
    forms: int
    seconds: float


def _call(weight: Weight, K: int) -> None:
    """Run a layer once for each choice its op makes."""
    for M in ONE_OF_EACH:
        x = torch.zeros(M, K, dtype=_DTYPE, device="cuda")
        torch.ops.taut.w4a16_gemm.default(x, *weight, GROUP_SIZE)


def _load(
    calls: Sequence[Callable[[], None]], form: warm_up_decode.DecodeForm, device: torch.device
) -> None:
    """Ask for every layer's forms, as layers do when they are made, then load one by one."""
    for at, call in enumerate(calls):
        compile_ahead.ask(call, at)
    warm_up_decode.ask_decode(form, _SEQUENCES, device)
    for call in calls:
        compile_ahead.warmed_up(call)


def _warm_ups(device: torch.device) -> dict[str, Callable[[], object]]:
    layers = [
        w4a16_layer.make_layer(*shapes.PRODUCTS[name], GROUP_SIZE, 8, _DTYPE) for name in SHAPES
    ]
    calls = [partial(_call, layer.packed(1)[0], layer.K) for layer in layers]
    form = warm_up_decode.DecodeForm(_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE, 0, _DTYPE, _DTYPE)
    rotation = warm_up.Rotation(
        _HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, neox=True, dtype=_DTYPE, apart=True
    )
    widths = warm_up.Widths(
        norms=frozenset({(_HIDDEN, _DTYPE)}),
        activations=frozenset({(_INTERMEDIATE, _DTYPE)}),
        quantised=frozenset(),
        rotations=frozenset({rotation}),
    )
    gpu = launcher.gpu_name(device)
    return {
        "products": lambda: _load(calls, form, device),
        "decode attention": lambda: warm_up_decode.compile_decode(form, _SEQUENCES, device),
        "fused ops": lambda: compile_ahead.warmed_up(
            lambda: warm_up.compile_all(widths, device, gpu)
        ),
    }


def measure(compilers: int) -> list[Row]:
    """Warm everything up in this process, whose Triton cache is empty.

    Args:
        compilers: beside each other.
    """
    compile_ahead.THREADS = compilers
    compiled: list[None] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **_: compiled.append(None)
    rows = []
    for what, run in _warm_ups(torch.device("cuda", 0)).items():
        compiled.clear()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        rows.append(Row(compilers, what, len(compiled), time.perf_counter() - start))
    return rows


def _in_a_process(compilers: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "taut_bench.first_start", "--inside"]
        run = subprocess.run(
            [*command, str(compilers)],
            env=os.environ | {"TRITON_CACHE_DIR": cache},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return [Row(**row) for row in json.loads(run.stdout.splitlines()[-1])]


def write(rows: Sequence[Row], facts: str, output: Path) -> None:
    """Write ``first_start.csv`` and ``first_start.md``.

    Args:
        rows: of :func:`measure`.
        facts: with what they were measured.
        output: a directory, made where it is missing.

    Raises:
        OSError: they cannot be written.
    """
    columns = ("compilers", "what", "forms", "seconds")
    cells = [(str(r.compilers), r.what, str(r.forms), f"{r.seconds:.1f}") for r in rows]
    report.write_csv(output / "first_start.csv", columns, cells)
    text = f"{facts}\n\n{report.markdown_table(columns, cells)}"
    (output / "first_start.md").write_text(text, encoding="utf-8")


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("compilers must be at least 1")
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m taut_bench.first_start")
    parser.add_argument("--output", type=Path, help="directory for the results")
    parser.add_argument(
        "--compilers", type=_counts, metavar="N,…", default=list(COMPILERS), help="default: 1,8"
    )
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if cuda_device.missing("taut_bench.first_start"):
        return 2
    if arguments.inside is not None:
        sys.stdout.write(json.dumps([asdict(row) for row in measure(arguments.inside)]) + "\n")
        return 0
    if arguments.output is None:
        parser.error("the following arguments are required: --output")
    rows: list[Row] = []
    facts = report.measured_with(f"{len(os.sched_getaffinity(0))} cores, an empty cache each time")
    for compilers in arguments.compilers:
        rows += _in_a_process(compilers)
        write(rows, facts, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
