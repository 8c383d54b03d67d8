"""What a call costs the host outside a CUDA graph: ``python -m taut_bench.host_cost``.

Ours and its rivals in one process, and ours in parts, each of them everything the next one has not:
torch's dispatcher before an op that does nothing, the same with the op's allocations, the function
behind the dispatcher, its launches alone, and the C function beneath Triton's launcher alone. Every
figure is the least of some rounds' means. Operands are bound beforehand and outputs dropped;
vLLM's norms and activations write to memory they are given, ours allocate it. Writes
``host_cost.csv`` and ``host_cost.md``.
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_bench import (
    cuda_device,
    fused_cases,
    fused_rivals,
    report,
    scaled_mm_layer,
    scaled_mm_rivals,
    shapes,
    w4a16_rivals,
)
from taut_bench.host_cost_parts import PARTS, Call, Case, parts
from taut_bench.w4a16_format import GROUP_SIZE
from taut_kernels.activation import silu_mul
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.norm import rms_norm
from taut_kernels.rope import op as rope
from taut_kernels.tuner import timing, w4a16_layer, w4a16_stock
from taut_kernels.tuner.refusal import REFUSED, first_line

FOUR_BITS = ("cuBLAS", "Marlin", "Machete")
FORMS = ("rms_norm", "add_rms_norm", "rms_norm_fp8", "silu_mul", "rope")
_CALLS = 100
"""In a round: with three launches each, a third of what a card's queue holds."""
_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: of the case.
        tokens: M.
        what: ``taut``, a rival, or one of :data:`PARTS`.
        us: of the host.
    """

    name: str
    tokens: int
    what: str
    us: float


def measure(case: Case, rounds: int, notes: list[str]) -> Iterator[Row]:
    """Yield a case's figures: ours, its rivals', and the parts of ours.

    Args:
        case: what to call.
        rounds: of which the least counts.
        notes: where reasons go why a rival has none.
    """
    ours = functools.partial(case.op, *case.operands)
    calls: dict[str, Call] = {"taut": ours}
    for name, prepare in case.rivals.items():
        try:
            calls[name] = prepare()
            calls[name]()
        except REFUSED as error:
            calls.pop(name, None)
            notes.append(f"{name} on {case.name}, M={case.tokens}: not run: {first_line(error)}")
    for what, call in (calls | parts(case)).items():
        us = timing.host_cost(call, _CALLS, rounds)
        yield Row(case.name, case.tokens, what, us)


def four_bits(names: Sequence[str], tokens: Sequence[int]) -> Iterator[Case]:
    """Yield W4A16's calls (groups of 128, symmetric, bf16).

    Args:
        names: shapes of :data:`.shapes.PRODUCTS`.
        tokens: numbers of rows.
    """
    op, function = torch.ops.taut.w4a16_gemm.default, w4a16._launch_w4a16_gemm
    for name in names:
        layer = w4a16_layer.make_layer(
            *shapes.PRODUCTS[name], GROUP_SIZE, max(tokens), torch.bfloat16
        )
        operands = w4a16_stock.operands(layer)
        for M in tokens:
            x = layer.x[:M]
            rivals = {
                rival: lambda rival=rival, layer=layer, x=x: functools.partial(
                    w4a16_rivals.PREPARE[rival](layer), x
                )
                for rival in FOUR_BITS
            }
            yield Case(f"w4a16 {name}", M, op, function, (x, *operands), rivals)


def _cutlass(layer: scaled_mm_layer.Layer, M: int) -> Call:
    # Not the rivals' own call, which cuts the layer's tokens anew every time.
    ops = scaled_mm_rivals._vllm("_custom_ops")
    operands = (layer.x[:M], layer.weight.t(), layer.x_scale[:M], layer.weight_scale)
    return functools.partial(ops.cutlass_scaled_mm, *operands, scaled_mm_layer.OUT_DTYPE)


def eight_bits(kind: str, tokens: Sequence[int]) -> Iterator[Case]:
    """Yield the calls of an 8-bit product of Llama-3-8B's o.

    Args:
        kind: of :data:`.scaled_mm_layer.KINDS`.
        tokens: numbers of rows.
    """
    name = scaled_mm_layer.KINDS[kind]
    layer = scaled_mm_layer.make_layer(name, *shapes.PRODUCTS["o"], max(tokens))
    arrivals = w8a8.make_arrivals(layer.weight.shape[0], layer.weight.device)
    last: tuple[Any, ...] = (None, arrivals, scaled_mm_layer.OUT_DTYPE)
    function: Callable[..., Any] = fp8._launch_fp8_gemm
    op = torch.ops.taut.fp8_gemm.default
    if name == w8a8.OP:
        op, function = torch.ops.taut.w8a8_gemm.default, w8a8._launch_w8a8_gemm
        last = (None, None, *last)
    for M in tokens:
        operands = (layer.x[:M], layer.weight, layer.x_scale[:M], layer.weight_scale, *last)
        rivals = {"CUTLASS": lambda M=M: _cutlass(layer, M)}
        yield Case(f"{kind} o", M, op, function, operands, rivals)


def _fused_rope(operands: fused_cases.Operands) -> Case:
    # Cut beforehand, which the benchmark of times does in every call.
    q, k = operands.q, operands.k
    heads = [each.unflatten(1, (-1, fused_cases.HEAD_DIM)) for each in (q, k)]  # type: ignore[no-untyped-call]

    def prepare() -> Call:
        fused_rivals.imported("vllm._custom_ops")
        given = (operands.positions, q, k, fused_cases.HEAD_DIM, operands.cache, True)
        return functools.partial(torch.ops._C.rotary_embedding, *given)

    given = (operands.positions, *heads, operands.cache, True)
    op = torch.ops.taut.rope.default
    return Case("rope", q.shape[0], op, rope._launch_rope, given, {"vLLM": prepare})


def fused(name: str, tokens: int) -> Case:
    """Return a fused form's call at the width it has in Llama-3-8B.

    Args:
        name: of :data:`.fused_cases.FORMS`; bf16 or dynamic fp8.
        tokens: numbers of rows.
    """
    form = fused_cases.FORMS[name]
    N = form.width(shapes.MODELS[shapes.LLAMA3_8B])
    operands = fused_cases.make_operands(form, N, tokens)
    if form.op == "rope":
        return _fused_rope(operands)
    ops, x = torch.ops.taut, operands.x
    function: Callable[..., Any] = rms_norm._launch_rms_norm
    given: tuple[Any, ...] = (x, operands.weight, operands.residual, fused_cases.EPSILON)
    op = ops.rms_norm.default
    if form.op == "silu_mul":
        op, function = ops.silu_mul.default, silu_mul._launch_silu_mul
        given = (x, *form.activation)
    elif form.out != "same":
        op, function = ops.rms_norm_quant.default, rms_norm._launch_rms_norm_quant
        given = (*given, fused_cases.quantised_dtype(form))

    def prepare() -> Call:
        return functools.partial(fused_rivals.PREPARE["vLLM"](form, [operands]), 0)

    return Case(name, tokens, op, function, given, {"vLLM": prepare})


def cases() -> Iterator[Case]:
    """Yield every case, each layer made when its first one is asked for."""
    yield from four_bits(list(shapes.LLAMA3_8B_PRODUCTS), (1, 16, 64))
    for kind in scaled_mm_layer.KINDS:
        yield from eight_bits(kind, (1, 64))
    for name in FORMS:
        yield fused(name, 1)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the host's processor by name.

    Args:
        cpuinfo: Linux's list of processors.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(rows: Sequence[Row], notes: Sequence[str], facts: str, output: Path) -> None:
    """Write ``host_cost.csv`` and ``host_cost.md``.

    Args:
        rows: every figure.
        notes: what was not measured, and why.
        facts: with what they were measured.
        output: a directory.

    Raises:
        OSError: they cannot be written.
    """
    cells = [(row.name, row.tokens, row.what, f"{row.us:.3f}") for row in rows]
    report.write_csv(output / "host_cost.csv", ("call", "M", "what", "us"), cells)
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row.name, row.tokens), {})[row.what] = row.us
    columns = ("call", "M", "taut", "rivals", *PARTS)
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [_line(name, tokens, figures) for (name, tokens), figures in found.items()]
    said = "\n".join(f"- {note}" for note in dict.fromkeys(notes))
    text = f"{facts}\n\nµs of the host a call\n\n" + "\n".join(lines) + f"\n\n{said}\n"
    (output / "host_cost.md").write_text(text, encoding="utf-8")


def _line(name: str, tokens: int, figures: Mapping[str, float]) -> str:
    theirs = [what for what in figures if what not in ("taut", *PARTS)]
    rivals = ", ".join(f"{what} {figures[what]:.1f}" for what in theirs) or "–"
    taut, *ours = (f"{figures[p]:.1f}" if p in figures else "–" for p in ("taut", *PARTS))
    return f"| {' | '.join([name, str(tokens), taut, rivals, *ours])} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m taut_bench.host_cost")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument(
        "--rounds", type=int, default=_ROUNDS, help="of which the least counts (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    if cuda_device.missing("taut_bench.host_cost"):
        return 2
    one = torch.zeros(1, device="cuda")
    yardstick = timing.host_cost(lambda: torch.add(one, 1), _CALLS, arguments.rounds)
    facts = report.measured_with(
        f"least of {arguments.rounds} rounds of {_CALLS} calls; host {processor()}, where"
        f" torch.add of one element costs {yardstick:.2f} µs"
    )
    sys.stdout.write(f"{facts}\n")
    rows: list[Row] = []
    notes: list[str] = []
    for case in cases():
        for row in measure(case, arguments.rounds, notes):
            rows.append(row)
            sys.stdout.write(f"{row.name} M={row.tokens} {row.what}: {row.us:.2f}\n")
        sys.stdout.flush()
        # After every case: what was measured survives a run that is cut off.
        write(rows, notes, facts, arguments.output)
    sys.stdout.writelines(f"{note}\n" for note in dict.fromkeys(notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
