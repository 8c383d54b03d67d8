"""Whether our int8 product beats vLLM's on this CPU, measured once and kept.

Kept beside what Inductor keeps: a compiled graph calls the product that was chosen when it was
saved, so a start that loads the graph must choose the same. This module imports vLLM.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from vllm import _custom_ops

from taut_kernels.gemm.scaled_mm import cpu_linear
from taut_kernels.launch.atomic_write import write_whole

_MEASURED = (3072, 576)
"""Features of the product that is measured."""
_COPIES, _ROUNDS = 8, 12
"""Weights in turn, 14 MB of them: none stays in a core's own cache. The least time counts."""
_FASTER_ONE, _SLOWER_MANY, _MANY = 0.9, 1.5, 64
"""Ours serves from nine tenths of vLLM's time at one token on, at most half more at 64 tokens."""


def why_faster() -> str | None:
    """Say by how much ours is faster, None where vLLM's stays; measures where nothing is kept."""
    kept = _place()
    try:
        return kept.read_text(encoding="utf-8") or None
    except FileNotFoundError:
        pass
    reason = _measure()
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(kept, reason or "")
    return reason


def _place() -> Path:
    of_cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    stable = [line for line in of_cpu.splitlines() if not line.startswith(("cpu MHz", "processor"))]
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    known = (*stable, limit, str(cpu_linear.has_vnni()), cpu_linear.SOURCE.read_text("utf-8"))
    key = hashlib.sha256("\n".join(known).encode()).hexdigest()[:20]
    return Path(cache_dir()) / "taut" / f"int8-{key}.txt"


def _measure() -> str | None:
    one, many = (_times(M) for M in (1, _MANY))
    if one[0] > _FASTER_ONE * one[1] or many[0] > _SLOWER_MANY * many[1]:
        return None
    return f"vLLM's int8 product takes {one[1] / one[0]:.2f} times as long at one token on this CPU"


def _times(M: int) -> tuple[float, float]:
    """Measure a product of M rows, CPU time of this thread: ours and vLLM's, quantisation in it."""
    (N, K), generator = _MEASURED, torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator, dtype=torch.float32).bfloat16()
    scale = torch.full((N, 1), 0.01, dtype=torch.float32)
    codes = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    turned, flat, vnni = codes.t(), scale.reshape(-1), cpu_linear.has_vnni()

    def stock(handler: _custom_ops.CPUDNNLGEMMHandler) -> None:
        x_q, x_scale, zero = _custom_ops.onednn_scaled_int8_quant(x, None, None, True)
        y = torch.empty((M, N), dtype=x.dtype)
        _custom_ops.onednn_scaled_mm(handler, x_q, y, x_scale, zero, None, None)

    def ours(weight: Tensor, sums: Tensor) -> None:
        torch.ops.taut.int8_linear_cpu(x, weight, flat, sums, None, None, None, True, vnni)

    make = _custom_ops.create_onednn_scaled_mm
    theirs = [partial(stock, make(turned, scale, x.dtype, True, False, 32)) for _ in range(_COPIES)]
    packed = [partial(ours, *cpu_linear.pack(codes)) for _ in range(_COPIES)]
    return _least(packed), _least(theirs)


def _least(calls: Sequence[Callable[[], None]]) -> float:
    def once() -> float:
        start = time.thread_time()
        for call in calls:
            call()
        return time.thread_time() - start

    return min(once() for _ in range(_ROUNDS))
