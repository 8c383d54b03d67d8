"""Forms of the 8-bit products' kernels, compiled before :mod:`.tune_scaled_mm` times them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Iterable
from concurrent.futures.process import BrokenProcessPool

import torch
import triton
from torch import Tensor

from taut_bench.scaled_mm_layer import OUT_DTYPE
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm.dispatch import launch, launch_block, make_arrivals
from taut_kernels.gemm.scaled_mm.tile import BLOCK_GROUP, ScaledMmTile
from taut_kernels.tuner.refusal import first_line

Job = tuple[str, ScaledMmTile]
"""Op and tile to compile."""


def launch_product(
    op: str,
    tile: ScaledMmTile,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    arrivals: Tensor,
) -> Tensor:
    """Run a product of any kind, without zero points and bias."""
    scales = (x_scale, weight_scale)
    if op == fp8.BLOCK_OP:
        return launch_block(tile, x, weight, *scales, None, arrivals, OUT_DTYPE)
    return launch(tile, x, weight, *scales, None, None, None, arrivals, OUT_DTYPE)


def _compile(job: Job) -> str | None:
    """Compile one form into Triton's cache; a line where it does not compile."""
    op, tile = job
    K = 2 * tile.block_k * tile.split_k
    dtype = torch.int8 if op == "w8a8_gemm" else torch.float8_e4m3fn
    x = torch.zeros(tile.block_m, K, dtype=torch.int8, device="cuda").view(dtype)
    weight = torch.zeros(tile.block_n, K, dtype=torch.int8, device="cuda").view(dtype)
    of_blocks = op == fp8.BLOCK_OP
    groups = K // BLOCK_GROUP if of_blocks else 1
    x_scale = torch.ones(tile.block_m, groups, device="cuda")
    w_scale = torch.ones(1 if of_blocks else tile.block_n, groups, device="cuda")
    arrivals = make_arrivals(tile.block_n, x.device)
    try:
        launch_product(op, tile, x, weight, x_scale, w_scale, arrivals)
        torch.cuda.synchronize()
    except (triton.CompilationError, triton.OutOfResources, RuntimeError) as error:
        return f"{op} {tile}: {first_line(error)}"
    return None


class Compilers:
    """Processes that compile forms into Triton's cache; each form once."""

    def __init__(self, processes: int) -> None:
        """Start ``processes`` compilers."""
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=context)
        self._done: set[Job] = set()

    def compile(self, jobs: Iterable[Job]) -> None:
        """Compile every new (op, tile); print what does not compile."""
        start = time.monotonic()
        new = [job for job in dict.fromkeys(jobs) if job not in self._done]
        if not new:
            return
        self._done |= set(new)
        try:
            for line in self._pool.map(_compile, new):
                if line:
                    say(f"does not compile: {line}")
        except BrokenProcessPool as error:
            say(f"a compiler died ({error}): what is missing is compiled when it is timed")
        say(f"compiled {len(new)} forms in {time.monotonic() - start:.1f} s")

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
