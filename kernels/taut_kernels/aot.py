"""Compile every kernel × tile ahead of time, without a GPU, and refuse what would run badly.

``python -m taut_kernels.aot --target sm_80 --target sm_90 [--json]`` exits 1 when a variant does
not compile, spills registers to local memory, or wants more shared memory than the target has.
Registers and spills are read from the cubin with the ``cuobjdump`` that comes with Triton; shared
memory from the compiler's metadata.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.experimental.gluon._runtime import GluonASTSource

from taut_kernels._variant import KernelVariant
from taut_kernels.attention import variants as attention_variants
from taut_kernels.fused import training_variants
from taut_kernels.fused import variants as fused_variants
from taut_kernels.gemm import (
    scaled_mm_variants,
    w4a16_decode_ring_variants,
    w4a16_decode_variants,
    w4a16_wgmma_ring_variants,
    w4a16_wgmma_variants,
)
from taut_kernels.loss import variants as loss_variants
from taut_kernels.primitives import variants as primitive_variants

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
    yield from w4a16_decode_variants.kernel_variants()
    yield from w4a16_decode_ring_variants.kernel_variants()
    yield from w4a16_wgmma_variants.kernel_variants()
    yield from w4a16_wgmma_ring_variants.kernel_variants()
    yield from scaled_mm_variants.kernel_variants()
    yield from fused_variants.kernel_variants()
    yield from training_variants.kernel_variants()
    yield from loss_variants.kernel_variants()
    yield from attention_variants.kernel_variants()
    yield from primitive_variants.kernel_variants()


def _source(variant: KernelVariant) -> ASTSource:
    signature = {name: f"*{element}" for name, element in variant.pointers.items()}
    signature |= {name: f"tensordesc<{kind}>" for name, kind in variant.descriptors.items()}
    signature |= dict.fromkeys(variant.integers, "i32")
    signature |= dict.fromkeys(variant.floats, "fp32")
    signature |= dict.fromkeys(variant.constants, "constexpr")
    names = variant.kernel.arg_names
    aligned = (*variant.pointers, *variant.divisible_by_16)
    source = GluonASTSource if variant.kernel.is_gluon() else ASTSource
    return source(
        fn=variant.kernel,
        signature={name: signature[name] for name in names},
        constexprs=variant.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
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


def compile_variant(variant: KernelVariant, target: str) -> AotResult:
    """Compile one variant.

    Args:
        variant: what to compile.
        target: a key of `SHARED_MEMORY_BYTES`.

    Returns:
        The result; ``failure`` holds the first line of a compiler error.
    """
    name = str(variant.tile)
    gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    try:
        compiled: Any = triton.compile(_source(variant), target=gpu, options=variant.options)
    except (CompilationError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return AotResult(target, variant.label, name, 0, 0, 0, f"does not compile: {reason}")
    registers, spill_bytes = _resource_usage(compiled.asm["cubin"])
    shared_bytes = int(compiled.metadata.shared)
    failure = _judge(spill_bytes, shared_bytes, target, variant.allowed_spill_bytes)
    return AotResult(target, variant.label, name, registers, spill_bytes, shared_bytes, failure)


def compile_all(targets: Iterable[str]) -> Iterator[AotResult]:
    """Compile every variant for every target it runs on, one result at a time."""
    for target in targets:
        for variant in every_variant():
            if target not in variant.targets:
                continue
            yield compile_variant(variant, target)


def _line(result: AotResult) -> str:
    return (
        f"{result.target}  {result.label:<38} {result.tile:<16} {result.registers:>3} registers  "
        f"{result.shared_bytes:>6} B shared  {result.failure or 'ok'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m taut_kernels.aot", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(SHARED_MEMORY_BYTES))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args(argv)
    results = []
    for result in compile_all(arguments.target or sorted(SHARED_MEMORY_BYTES)):
        results.append(result)
        if not arguments.json:
            sys.stdout.write(_line(result) + "\n")
            sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 1 if any(result.failure for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
