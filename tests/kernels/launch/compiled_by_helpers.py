"""Run by test_compile_processes.py: warms fused ops up on a pretended card, helpers beside it.

Prints as JSON for how many forms Triton's cache had what was asked for, and for how many not.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from launch_recorder import pretend_card
from triton import knobs

from taut_kernels.launch import compile_ahead, compile_processes, launcher
from taut_kernels.vllm_plugin import warm_up

BF16 = torch.bfloat16


def main(count: int) -> None:
    pretend_card()
    launcher._current_device = lambda: 0
    form = launcher.Launcher.form
    launcher.Launcher.form = lambda self, key, device: form(self, key, 0)
    asked: list[bool] = []

    def note(*, cache_hit: bool, **_: Any) -> None:
        asked.append(cache_hit)

    knobs.compilation.listener = note
    compile_ahead.THREADS = count
    helpers = compile_processes._helpers = compile_processes.Helpers(count)
    while not all(one.poll(0) for one in helpers.starting):
        assert helpers.process.poll() is None
        time.sleep(0.1)
    widths = warm_up.Widths(
        frozenset({(576, BF16)}), frozenset({(1536, BF16)}), frozenset({torch.float8_e4m3fn})
    )
    with compile_ahead._asking():
        warm_up.compile_all(widths, torch.device("meta"), "NVIDIA H200")
    json.dump({"found": sum(asked), "compiled": len(asked) - sum(asked)}, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
