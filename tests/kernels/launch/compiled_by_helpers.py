"""Run by test_compile_processes.py: warms kernels up on a pretended card, helpers beside it.

Of fused ops, which are written in Triton, and of a product, which is written in Gluon.

Prints as JSON for how many forms Triton's cache had what was asked for, and for how many not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from launch_recorder import pretend_card
from triton import knobs

from taut_bench import testing
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.launch import compile_ahead, compile_processes, launcher
from taut_kernels.vllm_plugin import warm_up

BF16 = torch.bfloat16


def main(count: int) -> None:
    pretend_card()
    launcher._current_device = lambda: 0
    form = launcher.Launcher.form
    launcher.Launcher.form = lambda self, key, device: form(self, key, 0)
    hits: list[bool] = []

    def note(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    knobs.compilation.listener = note
    compile_ahead.THREADS = count
    compile_processes._WORTH_IT = 1
    widths = warm_up.Widths(
        frozenset({(576, BF16)}), frozenset({(1536, BF16)}), frozenset({torch.float8_e4m3fn})
    )
    case = testing.make_w4a16_case(48, 128, 832, 64, dtype=BF16)
    operands = [
        each.to("meta") if isinstance(each, torch.Tensor) else each for each in case.operands()
    ]
    tile = WgmmaRingTile(64, 1, 1, 1, 1, 4, False, parts=2, running=1, tma=True)

    def run() -> None:
        warm_up.compile_all(widths, torch.device("meta"), "NVIDIA H200")
        w4a16_launch.launch(tile, *operands)

    asked = compile_ahead._ask(run)
    assert asked
    assert not compile_ahead._asked
    for each in asked:
        each.result()
    assert all(each.kernel is not None for each in compile_ahead._ask(run)), "asked for once"
    json.dump({"found": sum(hits), "compiled": len(hits) - sum(hits)}, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
