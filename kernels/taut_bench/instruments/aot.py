"""Compile every kernel × tile ahead of time, without a GPU, and refuse what would run badly.

``python -m taut_bench.instruments.aot --target sm_80 --target sm_90 [--json]`` exits 1 when a
variant does not compile, spills registers to local memory, or wants more shared memory than the
target has. It compiles in as many processes as there are cores (``--jobs``); ``--every N`` takes a
sample: the first tile of every form, and every Nth variant. Registers and spills are read from the
cubin with the ``cuobjdump`` that comes with Triton; shared memory from the compiler's metadata.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.experimental.gluon._runtime import GluonASTSource

from taut_bench.instruments.forms import (
    attention,
    loss,
    primitives,
    rowwise,
    scaled_mm,
    training,
    w4a16,
)
from taut_bench.instruments.recorder import KernelVariant

FAMILIES = (w4a16, scaled_mm, rowwise, training, loss, attention, primitives)
SHARED_MEMORY_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
"""Most shared memory a program may use (CUDA C++ Programming Guide, compute capabilities)."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class AotResult:
    """What one variant compiled to.

    Attributes:
        target: ``sm_80`` or ``sm_90``.
        label: op, dtype and options.
        tile: how the tile's class prints it.
        registers: per thread.
        spill_bytes: local memory per thread; the kernels use none of their own, so all of it is
            spills.
        shared_bytes: per program.
        failure: one line, or None where the variant is good.
    """

    target: str
    label: str
    tile: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    failure: str | None


def every_variant() -> Iterator[KernelVariant]:
    """Yield the variants of every op in the package."""
    for family in FAMILIES:
        yield from family.kernel_variants()


def source_of(variant: KernelVariant) -> ASTSource:
    """Return what Triton compiles for a variant."""
    names = variant.kernel.arg_names
    source = GluonASTSource if variant.kernel.is_gluon() else ASTSource
    return source(
        fn=variant.kernel,
        signature=variant.signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): known for name, known in variant.attributes.items()},
    )


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and local bytes per thread of the kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = _USAGE.search(output)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {output.strip()[:200]!r}")
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


def _judge(
    spill_bytes: int, shared_bytes: int, target: str, allowed_spill_bytes: int = 0
) -> str | None:
    if spill_bytes > allowed_spill_bytes:
        return f"spills {spill_bytes} bytes a thread"
    if shared_bytes > SHARED_MEMORY_BYTES[target]:
        limit = SHARED_MEMORY_BYTES[target]
        return f"wants {shared_bytes} bytes of shared memory, {target} has {limit}"
    return None


def compile_variant(variant: KernelVariant) -> AotResult:
    """Compile one variant for its target.

    Args:
        variant: what to compile.

    Returns:
        The result; ``failure`` holds the first line of a compiler error.
    """
    name, target = str(variant.tile), variant.target
    gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    try:
        with variant.assembler():
            compiled: Any = triton.compile(source_of(variant), target=gpu, options=variant.options)
    except (CompilationError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return AotResult(target, variant.label, name, 0, 0, 0, f"does not compile: {reason}")
    registers, spill_bytes = _resource_usage(compiled.asm["cubin"])
    shared_bytes = int(compiled.metadata.shared)
    failure = _judge(spill_bytes, shared_bytes, target, variant.allowed_spill_bytes)
    return AotResult(target, variant.label, name, registers, spill_bytes, shared_bytes, failure)


def chosen(target: str, every: int | None = 1) -> list[int]:
    """Number the variants of a target, or a sample of them.

    Args:
        target: a key of `SHARED_MEMORY_BYTES`.
        every: 1 for all; N for the first tile of every form and size (they share a label) and every
            Nth; 0 for the first of every form, whatever its sizes; None for the first of every
            kernel, whatever its form.

    Returns:
        Places in :func:`every_variant`, ascending.
    """
    seen: set[object] = set()
    found = []
    of_target = ((i, v) for i, v in enumerate(every_variant()) if target == v.target)
    for count, (place, variant) in enumerate(of_target):
        kernel, _ = variant.form
        kind = kernel if every is None else variant.label if every else variant.form
        if (every and count % every == 0) or kind not in seen:
            found.append(place)
        seen.add(kind)
    return found


@cache
def _variants() -> list[KernelVariant]:
    return list(every_variant())


def _compile_in_worker(place: int) -> AotResult:
    """Compile a variant by its place: kernels do not pickle."""
    return compile_variant(_variants()[place])


def compile_all(
    targets: Iterable[str], *, every: int | None = 1, jobs: int = 1
) -> Iterator[AotResult]:
    """Compile the variants of targets, one result at a time, in their order.

    Args:
        targets: keys of `SHARED_MEMORY_BYTES`.
        every: as of :func:`chosen`.
        jobs: processes; 1 compiles in this one.
    """
    work = [place for target in targets for place in chosen(target, every)]
    if jobs == 1:
        variants = list(every_variant())
        yield from (compile_variant(variants[place]) for place in work)
        return
    spawn = multiprocessing.get_context("spawn")  # torch has threads, which a fork would lose
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        yield from pool.map(_compile_in_worker, work, chunksize=4)


def _line(result: AotResult) -> str:
    return (
        f"{result.target}  {result.label:<38} {result.tile:<16} {result.registers:>3} registers  "
        f"{result.shared_bytes:>6} B shared  {result.failure or 'ok'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m taut_bench.instruments.aot", description=__doc__
    )
    parser.add_argument("--target", action="append", choices=sorted(SHARED_MEMORY_BYTES))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args(argv)
    if min(arguments.every, arguments.jobs) < 1:
        parser.error("--every and --jobs must be at least 1")
    targets = arguments.target or sorted(SHARED_MEMORY_BYTES)
    results = []
    for result in compile_all(targets, every=arguments.every, jobs=arguments.jobs):
        results.append(result)
        if not arguments.json:
            sys.stdout.write(_line(result) + "\n")
            sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 1 if any(result.failure for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
