"""What a CUDA graph demands: found without a device where it can be, by name where it is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from taut_bench.instruments import cuda_graph
from taut_bench.instruments.cuda_graph import (
    CaptureError,
    addresses_of,
    capture,
    check_addresses,
    check_replay,
    why_not_capturable,
)
from taut_bench.instruments.op_cases import from_op
from taut_bench.instruments.subject import Subject

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def branching(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (branching, "aten::_local_scalar_dense reads a value on the host"),
        (lambda x: x * x.max().item(), "aten::_local_scalar_dense reads a value on the host"),
        (lambda x: x.nonzero(), "aten::nonzero has a shape that depends on values"),
        (lambda x: x[x > 0], "has a shape that depends on values"),
        (lambda x: x.to("meta"), "moves data between cpu and meta"),
    ],
)
def test_calls_that_break_a_graph_are_named(call: Callable[..., Any], reason: str) -> None:
    found = why_not_capturable(Subject("f", call, (torch.ones(4),), CPU))
    assert found is not None
    assert reason in found


def test_calls_that_do_not_are_accepted() -> None:
    call = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    assert why_not_capturable(Subject("f", call, (torch.ones(2, 4),), CPU)) is None
    assert why_not_capturable(from_op("rms_norm", {"M": 2, "N": 64}, CPU)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_inputs_that_a_replay_cannot_copy_are_named() -> None:
    for x in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)])):
        subject = Subject("f", torch.relu, (x,), torch.device("cuda", 0))
        reason = cuda_graph._why_not_on_device(subject)
        assert reason == "tensor input 0 is sparse or nested: a replay copies dense tensors only"


def test_gradients_are_left_to_torch() -> None:
    subject = Subject("f", torch.nn.Linear(4, 4), (torch.ones(2, 4),), CPU, backward=True)
    assert "make_graphed_callables" in str(why_not_capturable(subject))


def test_capture_on_a_cpu_says_that_there_is_no_gpu() -> None:
    with pytest.raises(CaptureError, match="f: a CUDA graph needs a CUDA device, not cpu"):
        capture(Subject("f", torch.relu, (torch.ones(2),), CPU))


def test_replay_pairs_tensors_to_copy() -> None:
    old, new = torch.zeros(2, 3), torch.ones(2, 3)
    (pair,) = check_replay(((old, 1), {"scale": 2.0}), ((new, 1), {"scale": 2.0}))
    assert pair[0] is old
    assert pair[1] is new


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        (((torch.zeros(3, 2), 1), {}), r"tensor 0 is \(3, 2\).*captured was \(2, 3\)"),
        (((torch.zeros(2, 3).bfloat16(), 1), {}), "tensor 0 is .* torch.bfloat16"),
        (((torch.zeros(3, 2).t(), 1), {}), r"strides \(1, 2\)"),
        (((torch.zeros(2, 3), 2), {}), "argument 1 is 2 but 1 was captured"),
        (((3, 1), {}), "argument 0 must be a tensor, got int"),
        (((torch.zeros(2, 3),), {}), "another structure"),
        (((torch.zeros(2, 3), 1), {"more": 1}), "another structure"),
    ],
)
def test_replay_refuses_what_a_graph_cannot_take(offered: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        check_replay(((torch.zeros(2, 3), 1), {}), offered)


def test_weights_that_moved_are_named() -> None:
    layer = torch.nn.Linear(4, 4)
    captured = addresses_of(layer)
    check_addresses(captured, layer)
    layer.weight.data.fill_(2.0)
    check_addresses(captured, layer)
    layer.bias = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(CaptureError, match="bias was replaced or moved after the capture"):
        check_addresses(captured, layer)
    assert addresses_of(None) == {}


@pytest.mark.gpu
def test_replay_computes_on_new_inputs() -> None:
    layer = torch.nn.Linear(64, 64, device=CUDA)
    graph = capture(Subject("layer", layer, (torch.zeros(8, 64, device=CUDA),), CUDA))
    x = torch.randn(8, 64, device=CUDA)
    assert torch.equal(graph.replay(x), layer(x))
    with pytest.raises(CaptureError, match="captured was"):
        graph.replay(torch.zeros(9, 64, device=CUDA))
    layer.weight = torch.nn.Parameter(torch.zeros(64, 64, device=CUDA))
    with pytest.raises(CaptureError, match="weight was replaced"):
        graph.replay(x)


@pytest.mark.gpu
def test_capture_names_what_breaks_it_on_a_device() -> None:
    x = torch.ones(4, 4, device=CUDA)
    kept: list[torch.Tensor] = []

    def hoarding(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.clone())
        return x + 1

    with pytest.raises(CaptureError, match="keeps 512 bytes allocated"):
        capture(Subject("hoarding", hoarding, (x,), CUDA))
    with pytest.raises(CaptureError, match="reads a value on the host"):
        capture(Subject("branching", branching, (x,), CUDA))
    with pytest.raises(CaptureError, match="tensor input 0 is on cpu"):
        capture(Subject("mixed", lambda x: x, (x.cpu(),), CUDA))
    expanded = torch.ones(4, device=CUDA).expand(4, 4)
    with pytest.raises(CaptureError, match="make it contiguous"):
        capture(Subject("expanded", torch.relu, (expanded,), CUDA))


@pytest.mark.gpu
def test_our_ops_can_be_captured() -> None:
    for op in ("rms_norm", "silu_mul", "w4a16_gemm", "rope"):
        subject = from_op(op, {}, CUDA)
        assert why_not_capturable(subject) is None
        capture(subject).replay()
