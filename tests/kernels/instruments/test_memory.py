"""The peak of a step against a count by hand, and who is said to hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taut_bench.instruments import memory, memory_snapshot
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.subject import Subject
from taut_bench.instruments.trace import parse

CPU = torch.device("cpu")
N = 1000
BYTES = 4 * N


def chain(x: torch.Tensor) -> torch.Tensor:
    first = torch.exp(x)
    second = torch.sin(first)
    del first
    return torch.cos(second)  # second and third


def hoarding(x: torch.Tensor) -> torch.Tensor:
    kept = [torch.exp(x), torch.sin(x), torch.cos(x)]
    return torch.cat(kept)  # three parts and their copy


@pytest.mark.parametrize(
    ("call", "peak", "kept", "allocated"),
    [
        (torch.exp, BYTES, BYTES, BYTES),
        (chain, 2 * BYTES, BYTES, 3 * BYTES),
        (hoarding, 6 * BYTES, 3 * BYTES, 6 * BYTES),
        (lambda x: x.view(10, 100), 0, 0, 0),
    ],
)
def test_peak_is_that_counted_by_hand(call: Any, peak: int, kept: int, allocated: int) -> None:
    found = memory.measure(Subject("f", call, (torch.ones(N),), CPU))
    assert (found.peak, found.kept, found.allocated) == (peak, kept, allocated)
    assert found.before == BYTES
    assert sum(holding.size for holding in found.holdings) == peak


def test_holdings_name_line_and_operation() -> None:
    found = memory.measure(Subject("hoarding", hoarding, (torch.ones(N),), CPU))
    largest = found.holdings[0]
    assert (largest.origin.op, largest.size, largest.blocks) == ("aten::cat", 3 * BYTES, 1)
    line = hoarding.__code__.co_firstlineno + 2
    assert largest.origin.line == f"{__file__}:{line} in hoarding"
    assert {holding.origin.op for holding in found.holdings[1:]} == {
        "aten::exp",
        "aten::sin",
        "aten::cos",
    }


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 64, bias=False)
        self.down = torch.nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_holdings_name_the_module() -> None:
    model = torch.nn.Sequential(Block(), Block())
    found = memory.measure(Subject("model", model, (torch.ones(8, 16),), CPU))
    # Two of 8·64 are live while ReLU runs; in the second block the first one's result is too.
    assert found.peak == 4 * (2 * 8 * 64 + 8 * 16)
    assert found.by_module() == {"1.up": 2048, "1": 2048, "0.down": 512}
    assert found.before == 4 * (2 * 2 * 16 * 64 + 8 * 16)


def test_gradients_stay_and_are_said_to_come_from_backward() -> None:
    found = memory.measure(Subject("block", Block(), (torch.ones(8, 16),), CPU, backward=True))
    weights = 2 * 4 * 16 * 64
    # The step's result and the gradients of both weights.
    assert found.kept == weights + 4 * 8 * 16
    held = sum(one.size for one in found.holdings if one.origin.line == "backward")
    assert held >= 4 * 16 * 64


def test_steps_do_not_add_up() -> None:
    subject = Subject("block", Block(), (torch.ones(8, 16),), CPU, backward=True)
    assert memory.measure(subject).peak == memory.measure(subject).peak


def test_comparison_says_what_fusing_saves() -> None:
    x = torch.ones(N)
    before = memory.measure(Subject("before", hoarding, (x,), CPU))
    after = memory.measure(Subject("after", torch.exp, (x,), CPU))
    text = memory.comparison(before, after)
    assert "peak: 0.02 MB before, 4000 B after: 6.00 times less" in text
    assert "0.02 MB more" in memory.comparison(after, before)
    assert "after: the same" in memory.comparison(after, after)


def test_text_lists_the_largest_first() -> None:
    found = memory.measure(Subject("hoarding", hoarding, (torch.ones(N),), CPU))
    text = memory.text(found, rows=1)
    assert "peak 0.02 MB" in text
    assert "aten::cat" in text
    assert "3 more in the JSON" in text


def allocation(time: float, size: int, address: int, device: int = 0) -> dict[str, Any]:
    args = {"Bytes": size, "Addr": address, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "ts": time, "tid": 1, "args": args}


def span(name: str, start: float, duration: float) -> dict[str, Any]:
    keys = {"ph": "X", "cat": "user_annotation", "tid": 1}
    return {**keys, "name": name, "ts": start, "dur": duration}


def test_only_blocks_of_the_step_and_the_device_count() -> None:
    trace = parse(
        {
            "traceEvents": [
                span("taut.memory.step", 10, 100),
                span("taut.memory|aten::mm|block.0|/home/me/a|b.py:3 in f", 20, 10),
                allocation(5, 999, 1),  # before the step
                allocation(15, -999, 1),  # and gone within it
                allocation(25, 100, 2),
                allocation(40, 50, 3),
                allocation(41, 7000, 4, device=1),
                allocation(50, -100, 2),
                allocation(60, 60, 2),  # an address used again
                allocation(200, 5000, 5),  # after it
            ]
        }
    )
    found = memory.attribute(Subject("f", torch.relu, (), CPU), trace)
    assert (found.peak, found.kept, found.allocated, found.allocations) == (150, 110, 210, 3)
    first, second = found.holdings
    assert first.origin == memory.Origin("/home/me/a|b.py:3 in f", "block.0", "aten::mm")
    assert (second.size, second.origin.line) == (50, "outside an operation")
    assert found.timeline == ((15.0, 100), (30.0, 150), (40.0, 50), (50.0, 110))


def block(action: str, address: int, size: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
    keys = ("filename", "line", "name")
    return {
        "action": action,
        "addr": address,
        "size": size,
        "frames": [dict(zip(keys, frame, strict=True)) for frame in frames],
    }


def test_snapshot_is_replayed_to_its_peak() -> None:
    torch_frame = ("/site-packages/torch/nn/modules/linear.py", 9, "forward")
    snapshot = {
        "device_traces": [
            [block("alloc", 1, 999)],
            [
                block("segment_alloc", 0, 4096),
                block("alloc", 1, 100, torch_frame, ("/home/me/model.py", 12, "forward")),
                block("free_requested", 1, 100),
                block("free_completed", 1, 100),
                block("alloc", 1, 300, ("/home/me/model.py", 12, "forward")),
                block("alloc", 2, 200, torch_frame),
                block("free_completed", 77, 5000),  # from before the record
                block("free_completed", 2, 200),
                block("alloc", 3, 100),
            ],
        ],
        "segments": [{"device": 0, "total_size": 7}, {"device": 1, "total_size": 4096}],
    }
    found = memory_snapshot.peak_of(snapshot, 1)
    assert found.size == 500
    assert found.by_line == {
        "/home/me/model.py:12 in forward": 300,
        "/site-packages/torch/nn/modules/linear.py:9 in forward": 200,
    }
    assert (found.segments, found.cut) == (4096, False)


def test_snapshot_needs_a_gpu(tmp_path: Any) -> None:
    subject = Subject("f", torch.exp, (torch.ones(2),), CPU)
    with pytest.raises(InstrumentError, match="needs a CUDA device, not cpu"):
        memory_snapshot.record(subject, tmp_path / "snapshot.pickle")


@pytest.mark.gpu
def test_snapshot_and_peak_on_a_gpu(tmp_path: Any) -> None:
    cuda = torch.device("cuda")
    # Multiples of the allocator's 512 bytes.
    x = torch.ones(2**20, device=cuda)
    subject = Subject("hoarding", hoarding, (x,), cuda)
    found = memory_snapshot.record(subject, tmp_path / "snapshot.pickle")
    assert found.size == 6 * x.nbytes
    assert memory.measure(subject).peak == 6 * x.nbytes
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0
