"""What Dynamo and Inductor make of a callable, for real on the CPU, and how their code is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from taut_bench.instruments import explain, graph_breaks, triton_kernels
from taut_bench.instruments.graph_breaks import GraphBreak
from taut_bench.instruments.op_cases import OP_CASES, from_op
from taut_bench.instruments.subject import Subject

CPU = torch.device("cpu")


def branching(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.silu(x @ w)
    if y.sum() > 0:
        y = y + 1
    return y.softmax(-1)


@pytest.fixture(scope="module")
def broken() -> explain.Explanation:
    """A callable with one break, its gradients as well."""
    x = torch.ones(8, 16, requires_grad=True)
    return explain.explain(
        Subject("branching", branching, (x, torch.ones(16, 16)), CPU, backward=True)
    )


def test_break_has_its_line_and_reason(broken: explain.Explanation) -> None:
    (found,) = broken.breaks
    line = branching.__code__.co_firstlineno + 2
    assert found.where == f"{__file__}:{line} in branching"
    assert found.source == "if y.sum() > 0:"
    assert found.reason


def printing_first(x: torch.Tensor) -> torch.Tensor:
    print("before any operation")
    y = x + 1
    if y.sum() > 0:
        y = y * 2
    return y


def printing_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for number in range(3):
        x = x + 1
        print(number)
    return x


def test_breaks_that_end_no_graph_are_named_too() -> None:
    """`torch._dynamo.explain` alone reports one break of the first and none of the second."""
    x = torch.ones(4)
    first, second = explain.explain(Subject("f", printing_first, (x,), CPU)).breaks
    line = printing_first.__code__.co_firstlineno
    assert first.where == f"{__file__}:{line + 1} in printing_first"
    assert first.source.startswith('print("before any operation")')
    assert "print" in first.reason
    assert second.where == f"{__file__}:{line + 3} in printing_first"
    for _ in range(2):  # Dynamo's log is shorter for what it has said before
        found = explain.explain(Subject("f", printing_in_a_loop, (x,), CPU))
        assert (found.graphs, found.generated) == (0, ())
        (broken,) = found.breaks
        line = printing_in_a_loop.__code__.co_firstlineno
        assert broken.where.startswith(f"{__file__}:{line + 3}")
        assert broken.source.startswith("print(number)")
        assert "the whole function runs as Python" in broken.reason


def test_dynamos_log_is_as_it_was_before() -> None:
    log = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    before = (log.level, log.propagate, list(log.handlers))
    with graph_breaks.logged():
        assert log.isEnabledFor(logging.DEBUG)
    assert (log.level, log.propagate, list(log.handlers)) == before


SKIP = """Graph break: torch.compile cannot properly resume from this graph break, \
which results in a skip.
torch.compile will skip tracing the frame f (/me/m.py line 3) and fall back to eager.
The graph break occurred in the following user code:
  File "/me/m.py", line 5, in f
    x.tolist()
"""
AGAIN = """Graph break (user stack suppressed due to duplicate graph break) \
in user code at /me/m.py:7
Graph Break Reason: Failed to handle graph break gracefully. Skipping the function and falling \
back to eager.

Attempted to call x
  Explanation: Dynamo cannot.
  Hint: do not.
"""


@pytest.mark.parametrize(
    ("message", "where", "reason"),
    [
        (SKIP, "/me/m.py:5 in f", "torch.compile cannot properly resume from this graph break"),
        (AGAIN, "/me/m.py:7", "Attempted to call x: Dynamo cannot. (the whole function"),
    ],
)
def test_messages_of_the_log_are_read(message: str, where: str, reason: str) -> None:
    found = graph_breaks.read(message)
    assert found is not None
    assert found.where == where
    assert found.reason.startswith(reason)


def test_other_messages_are_none() -> None:
    assert graph_breaks.read("torch.compile does something else") is None


def test_a_break_is_there_once() -> None:
    frame = SimpleNamespace(filename="/me/m.py", lineno=5, name="f", line="  x.tolist()")
    reasons = [
        SimpleNamespace(reason="tolist\nand more", user_stack=[frame]),
        SimpleNamespace(reason="", user_stack=[]),
    ]
    known = GraphBreak("why", "/me/m.py:5 in f", "x.tolist()")
    nowhere = GraphBreak("unknown", "unknown", "")
    assert graph_breaks.merged([known, known], reasons) == [known, nowhere]
    alone = GraphBreak("tolist", "/me/m.py:5 in f", "x.tolist()")
    assert graph_breaks.merged([], reasons) == [alone, nowhere]


def test_graphs_are_counted_in_both_directions(broken: explain.Explanation) -> None:
    assert broken.graphs == 2
    directions = [graph.direction for graph in broken.aten]
    assert directions.count("forward") == directions.count("backward") == 2
    assert "aten.mm" in broken.aten[0].code


def test_generated_code_is_that_of_this_machine(broken: explain.Explanation) -> None:
    assert {one.language for one in broken.generated} == {"c++"}
    assert [one.graph for one in broken.generated] == [
        "0_forward",
        "1_forward",
        "1_backward",
        "0_backward",
    ]
    first = broken.generated[0]
    assert first.launches == len(first.kernels) == 1
    assert first.library == ("mm",)
    assert "extern_kernels.mm(" in first.code
    assert broken.not_compiled is None


def test_guards_and_the_host_read_are_named(broken: explain.Explanation) -> None:
    assert any("L['x']" in guard for guard in broken.guards)
    assert "reads a value on the host" in str(broken.not_capturable)
    line = branching.__code__.co_firstlineno + 2
    assert f"{__file__}:{line} in branching" in str(broken.not_capturable)


def test_text_and_files_hold_it_all(broken: explain.Explanation, tmp_path: Path) -> None:
    text = explain.text(broken)
    assert "2 graphs" in text
    assert "break 1" in text
    assert "no GPU" in text
    files = explain.write_files(broken, tmp_path / "new")
    names = [file.name for file in files]
    assert names[:2] == ["forward_0.py", "forward_1.py"]
    assert len([name for name in names if name.startswith("generated_")]) == len(broken.generated)
    assert "guards.txt" in names
    assert all(file.stat().st_size for file in files)
    json.dumps(broken.as_json())


def test_an_op_of_ours_is_one_call_that_inductor_leaves_alone() -> None:
    found = explain.explain(from_op("silu_mul", {"M": 2, "N": 8}, CPU))
    assert (found.graphs, len(found.breaks)) == (1, 0)
    (code,) = found.generated
    assert code.library == ("taut.silu_mul.default",)
    assert (code.language, code.launches) == ("none", 0)
    assert found.not_capturable is None


CPU_ONLY = {"w4a16_gemm_cpu", "int8_gemm_cpu", "int8_linear_cpu", "weight_only_linear_cpu"}


def test_every_op_names_kernels_that_exist() -> None:
    assert set(triton_kernels.KERNELS) == set(OP_CASES) - CPU_ONLY
    for op in triton_kernels.KERNELS:
        assert triton_kernels.variants_of(op), op


TRITON = '''
# AOT ID: ['3_backward']
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', """
def triton_poi_fused_add_0(in_ptr0):
    triton_poi_fused_add_0(1)
""")
triton_red_fused_sum_1 = async_compile.triton('triton_red_fused_sum_1', """ """)

class Runner:
    def call(self, args):
        triton_poi_fused_add_0.run(arg0_1, buf0, 64, stream=stream0)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        buf2 = torch.ops.taut.rms_norm.default(buf1, arg2_1, None, 1e-05)
        triton_poi_fused_add_0.run(buf2, buf3, 64, stream=stream0)
        triton_red_fused_sum_1.run(buf3, buf4, 1, 64, stream=stream0)
        return (buf4, )

def benchmark_compiled_module():
    triton_poi_fused_add_0.run(0)
'''


def test_triton_code_is_read() -> None:
    found = explain.read_code(TRITON)
    assert (found.graph, found.language) == ("3_backward", "triton")
    assert found.kernels == ("triton_poi_fused_add_0", "triton_red_fused_sum_1")
    assert found.launches == 3, "definitions and the benchmark below are no launches"
    assert found.library == ("mm", "taut.rms_norm.default")


@pytest.mark.gpu
def test_generated_code_on_a_gpu_is_triton() -> None:
    cuda = torch.device("cuda")
    subject = Subject("f", lambda x: x.exp() + 1, (torch.ones(64, device=cuda),), cuda)
    (code,) = explain.explain(subject).generated
    assert (code.language, code.launches) == ("triton", 1)
