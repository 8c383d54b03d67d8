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

from taut_kernels._variant import KernelVariant
from taut_kernels.gemm import w4a16, w4a16_decode_variants
from taut_kernels.tiles import TileConfig
from taut_kernels.tiles_decode import DecodeTile

SHARED_MEMORY_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
"""Most shared memory a program may use (CUDA C++ Programming Guide, compute capabilities)."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class AotResult:
    """What one variant compiled to.

    Attributes:
        target: ``sm_80`` or ``sm_90``.
        label: op, dtype and options.
        tile: ``block_m×block_n/warps/stages``, or for the decode kernel rows, warps along N × K,
            splits, and depths.
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
    yield from w4a16.kernel_variants()
    yield from w4a16_decode_variants.kernel_variants()


def _name(tile: TileConfig | DecodeTile) -> str:
    if isinstance(tile, TileConfig):
        return f"{tile.block_m}x{tile.block_n}/{tile.num_warps}w/{tile.num_stages}s"
    rows = f"{tile.rows}r/{tile.row_warps}x{tile.k_warps}w/k{tile.split_k}"
    return f"{rows}/d{tile.depth}.{tile.x_depth}.{tile.batch}{'f' if tile.fence else ''}"


def _options(tile: TileConfig | DecodeTile) -> dict[str, int | None]:
    """Return what the launcher passes to the compiler beside the constants."""
    if isinstance(tile, TileConfig):
        return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}


def _source(variant: KernelVariant) -> ASTSource:
    signature = {name: f"*{element}" for name, element in variant.pointers.items()}
    signature |= dict.fromkeys(variant.integers, "i32")
    signature |= dict.fromkeys(variant.constants, "constexpr")
    names = variant.kernel.arg_names
    aligned = (*variant.pointers, *variant.divisible_by_16)
    return ASTSource(
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
    name, options = _name(variant.tile), _options(variant.tile)
    gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    try:
        compiled: Any = triton.compile(_source(variant), target=gpu, options=options)
    except (CompilationError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return AotResult(target, variant.label, name, 0, 0, 0, f"does not compile: {reason}")
    registers, spill_bytes = _resource_usage(compiled.asm["cubin"])
    shared_bytes = int(compiled.metadata.shared)
    failure = _judge(spill_bytes, shared_bytes, target, variant.allowed_spill_bytes)
    return AotResult(target, variant.label, name, registers, spill_bytes, shared_bytes, failure)


def compile_all(targets: Iterable[str]) -> Iterator[AotResult]:
    """Compile every variant for every target, one result at a time."""
    for target in targets:
        for variant in every_variant():
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
