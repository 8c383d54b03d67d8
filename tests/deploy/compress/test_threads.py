"""Threads by work: the same result from any number of them, and no collapse beside other load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from taut_deploy.compress.calibrate.observe import observe_block
from taut_deploy.compress.threads import over_batches, single_thread

SCRIPT = """
import json, sys, time
import torch
from taut_deploy.compress.calibrate.observe import observe_block

torch.set_num_threads(int(sys.argv[1]))

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(256, 512, bias=False)
        self.down = torch.nn.Linear(512, 256, bias=False)
    def forward(self, x):
        for _ in range(8):
            scaled = x / (1 + x.abs().mean(-1, keepdim=True))
            x = x + self.down(torch.nn.functional.silu(self.up(scaled)))
        return x

torch.manual_seed(0)
block, hidden = Block(), torch.randn(24, 256, 256)
observe_block(block, hidden[:2], {}, 2)
print("ready", flush=True)
sys.stdin.readline()
wall, cpu = time.monotonic(), time.process_time()
observe_block(block, hidden, {}, 2)
print(json.dumps({"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}))
"""


class Tiny(nn.Module):
    """Two layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_statistics_are_those_of_one_thread(two_threads):
    torch.manual_seed(0)
    block, hidden = Tiny(), torch.randn(13, 8, 16)
    side_by_side = observe_block(block, hidden, {}, 2)
    torch.set_num_threads(1)
    in_a_row = observe_block(block, hidden, {}, 2)
    for one, other in zip(side_by_side, in_a_row, strict=True):
        assert one.layers == other.layers
        assert one.tokens == other.tokens == 13 * 8
        assert torch.equal(one.hessian, other.hessian)
        assert torch.equal(one.sample, other.sample)
        assert torch.equal(one.absmax, other.absmax)


def test_results_come_in_order_and_every_operation_has_one_thread(two_threads):
    hidden = torch.arange(20.0).reshape(10, 1, 2)
    seen = list(
        over_batches(lambda part: (part, torch.get_num_threads()), hidden, 3, nn.Linear(2, 2))
    )
    assert torch.equal(torch.cat([part for part, _ in seen]), hidden)
    assert {threads for _, threads in seen} == {1}
    assert torch.get_num_threads() == 2


def test_large_products_are_shared_by_all_threads(two_threads):
    # 2 x 2048 tokens x 4096 x 4096 operations, more than half a second of one core.
    large = nn.Linear(4096, 4096, bias=False, device="meta")
    hidden = torch.zeros(2, 2048, 1).expand(2, 2048, 4096)
    seen = list(over_batches(lambda part: torch.get_num_threads(), hidden, 1, large))
    assert seen == [2, 2]
    with single_thread(2 * 2048 * 4096 * 4096):
        assert torch.get_num_threads() == 2
    with single_thread(2 * 512 * 576 * 1536):
        assert torch.get_num_threads() == 1


def test_a_failure_in_one_batch_is_raised(two_threads):
    def fail(part: torch.Tensor) -> torch.Tensor:
        if bool((part == 4).any()):
            raise ValueError("batch 4")
        return part

    with pytest.raises(ValueError, match="batch 4"):
        list(over_batches(fail, torch.arange(8.0).reshape(8, 1, 1), 1, nn.Linear(1, 1)))
    assert torch.get_num_threads() == 2


@contextmanager
def competitors() -> Iterator[None]:
    """One busy process for each core."""
    argv = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(argv) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_other_load_costs_neither_cpu_time_nor_more_than_its_share():
    def measure(threads: int) -> dict[str, float]:
        argv = [sys.executable, "-c", SCRIPT, str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(argv, text=True, **pipes) as process:
            # Its imports, which nothing is measured of, need no competitors.
            assert process.stdout.readline() == "ready\n"
            with competitors():
                told, _ = process.communicate("go\n")
        assert process.returncode == 0
        return json.loads(told)

    # One thread cannot wait for another: what it takes is the work and its share of the machine.
    # Two took 1.5 to 1.7 times its time beside such load, and 8 to 10 times while every operation
    # was shared by both.
    alone, several = measure(1), measure(2)
    assert several["cpu"] < 2.5 * alone["cpu"], (alone, several)
    assert several["wall"] < 2.5 * alone["wall"], (alone, several)
