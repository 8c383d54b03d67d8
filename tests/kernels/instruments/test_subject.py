"""Subjects: callables by reference, ops by name, and one line for every mistake."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.op_cases import OP_CASES, from_op
from taut_bench.instruments.subject import (
    Subject,
    described_if_of_a_step,
    from_reference,
    resolve_device,
)

CPU = torch.device("cpu")
SOURCE = """
import torch

class Doubler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        return {"y": x * self.weight}

class Sized(torch.nn.Module):
    def __init__(self, size):
        super().__init__()

def add(x, y=1):
    return x + y

def failing(x):
    return x.view(5)

def example_inputs():
    return torch.ones(4)

def named_inputs(device):
    return {"x": torch.ones(4, device=device), "y": 3}

def wrong_inputs():
    return [torch.ones(4)]

def failing_inputs():
    raise KeyError("nothing")

def once(x, calls=[]):
    calls.append(1)
    if len(calls) > 1:
        raise RuntimeError("only once")
    return x

def leaving(x):
    raise SystemExit(5)

def lazy(x):
    yield x

async def later(x):
    return x

def training(x):
    w = torch.ones(4, requires_grad=True)
    (x * w).sum().backward()

class Picky(torch.nn.Module):
    def __init__(self):
        raise ValueError("no configuration")

seven = 7
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "subjects.py"
    path.write_text(SOURCE)
    return str(path)


def test_callable_of_a_file_takes_the_inputs_beside_it(source: str) -> None:
    subject = from_reference(f"{source}:add", None, CPU)
    assert torch.equal(subject.step(), torch.full((4,), 2.0))


def test_factory_may_return_keywords_and_take_the_device(source: str) -> None:
    subject = from_reference(f"{source}:add", f"{source}:named_inputs", CPU)
    assert torch.equal(subject.step(), torch.full((4,), 4.0))


def test_module_class_is_made_and_its_gradient_is_taken(source: str) -> None:
    subject = from_reference(f"{source}:Doubler", None, CPU, backward=True)
    subject.step()
    subject.step()
    (weight,) = subject.parameters()
    assert torch.equal(weight.grad, torch.ones(4)), "gradients of two steps must not add up"


def test_step_without_backward_builds_no_graph(source: str) -> None:
    subject = from_reference(f"{source}:Doubler", None, CPU)
    assert not subject.step()["y"].requires_grad


@pytest.mark.parametrize(
    ("callable_name", "inputs", "message"),
    [
        ("nothing", None, "has no 'nothing'"),
        ("seven", None, "not callable, but int"),
        ("Sized", None, "cannot be made without arguments"),
        ("Picky", None, "making it raises ValueError at .*: no configuration"),
        ("add", "wrong_inputs", "must return a tensor, a tuple or a dict, got list"),
        ("add", "failing_inputs", "raises KeyError at"),
        ("add", "absent", "has no 'absent'"),
    ],
)
def test_wrong_references_are_named(
    source: str, callable_name: str, inputs: str | None, message: str
) -> None:
    factory = f"{source}:{inputs}" if inputs else None
    with pytest.raises(InstrumentError, match=message) as caught:
        from_reference(f"{source}:{callable_name}", factory, CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_colon", "expected module:function"),
        ("/nowhere/file.py:f", "no such file"),
        ("no_such_module_here:f", "no module named 'no_such_module_here'"),
        ("torch.nn.functional:relu", "no inputs; name a factory"),
        (".beside:f", "'.beside' is no module's name"),
        ("models/mine:f", "'models/mine' is no module's name"),
        ("sys:absent", "sys has no 'absent'"),
    ],
)
def test_unknown_modules_are_named(reference: str, message: str) -> None:
    with pytest.raises(InstrumentError, match=message):
        from_reference(reference, None, CPU)


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:", r"broken\.py, line 1: invalid syntax"),
        ("import absent_package_x", "imports 'absent_package_x', not found"),
        ("from os import absent", r"raises ImportError at .*broken\.py:1: cannot import"),
        ("\n1 / 0", r"raises ZeroDivisionError at .*broken\.py:2: division by zero"),
        ("raise SystemExit(0)", r"raises SystemExit at .*broken\.py:1: 0"),
    ],
)
def test_code_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, as_module: bool
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    reference = "broken:f" if as_module else f"{path}:f"
    with pytest.raises(InstrumentError, match=message) as caught:
        from_reference(reference, None, CPU)
    assert "\n" not in str(caught.value)


def test_factory_that_does_not_say_what_it_takes_is_called(source: str) -> None:
    with pytest.raises(InstrumentError, match="--inputs torch:randn: raises TypeError"):
        from_reference(f"{source}:add", "torch:randn", CPU)


def test_trying_out_names_the_line_that_raised(source: str) -> None:
    subject = from_reference(f"{source}:failing", None, CPU)
    with pytest.raises(InstrumentError, match=r"raises RuntimeError at .*subjects\.py:20: shape"):
        subject.try_out()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("once", r"only once \(its second run: an instrument repeats a step\)"),
        ("leaving", r"raises SystemExit at .*subjects\.py:\d+: 5"),
        ("lazy", "returns a generator, whose code has not run"),
        ("later", "returns a coroutine, whose code has not run"),
        ("training", r"a step runs under torch\.no_grad\(\)"),
    ],
)
def test_callables_that_cannot_be_measured_are_named(source: str, name: str, message: str) -> None:
    subject = from_reference(f"{source}:{name}", None, CPU)
    with pytest.raises(InstrumentError, match=message):
        subject.try_out()


def test_exception_of_a_later_step_is_told_from_others(source: str) -> None:
    subject = from_reference(f"{source}:failing", None, CPU)
    with pytest.raises(RuntimeError) as of_a_step:
        subject.step()
    found = described_if_of_a_step(of_a_step.value)
    assert found is not None
    assert found.startswith("a later step raises RuntimeError at ")
    with pytest.raises(RuntimeError) as other:
        torch.ones(4).view(5)
    assert described_if_of_a_step(other.value) is None


def test_backward_without_a_gradient_is_refused() -> None:
    subject = Subject("f", lambda x: x + 1, (torch.ones(2),), CPU, backward=True)
    with pytest.raises(InstrumentError, match="--backward needs an output with a gradient"):
        subject.try_out()


def test_devices() -> None:
    assert resolve_device("cpu") == CPU
    with pytest.raises(InstrumentError, match="--device tpu: use auto, cpu or cuda"):
        resolve_device("tpu")
    if torch.cuda.is_available():
        assert resolve_device("cuda").type == "cuda"
    else:
        with pytest.raises(InstrumentError, match="no CUDA device"):
            resolve_device("cuda")


SMALL = {"M": 3, "N": 64, "K": 128, "G": 64, "H": 32, "Ht": 64, "V": 96}
SMALL |= {"Hq": 2, "Hk": 1, "D": 64}


@pytest.mark.parametrize("op", sorted(OP_CASES))
def test_every_op_runs_at_small_sizes(op: str) -> None:
    sizes = {name: SMALL[name] for name in OP_CASES[op].sizes if name in SMALL}
    from_op(op, sizes, CPU).try_out()
    if OP_CASES[op].call is not None:
        # The widest type: fp32 where the op takes it.
        subject = from_op(op, sizes, CPU, OP_CASES[op].dtypes[-1], backward=True)
        subject.try_out()
        assert all(leaf.grad is not None for leaf in subject.leaves())


@pytest.mark.parametrize(
    ("op", "rungs"), [("matmul", 4), ("transpose", 5), ("conv2d", 2), ("reduce", 3)]
)
def test_every_rung_of_a_ladder_is_a_subject(op: str, rungs: int) -> None:
    sizes = {name: SMALL[name] for name in OP_CASES[op].sizes if name in SMALL}
    if op == "conv2d":
        sizes = {"B": 1, "C": 8, "side": 4, "N": 8}
    for rung in range(1, rungs + 1):
        subject = from_op(op, sizes | {"version": rung}, CPU)
        assert subject.args[-1] == f"v{rung}"
        assert f"version={rung}" in subject.name
        subject.try_out()
    with pytest.raises(InstrumentError, match=rf"version=9: the rungs are 1.*, {rungs}$"):
        from_op(op, sizes | {"version": 9}, CPU)


@pytest.mark.parametrize(
    ("op", "sizes", "dtype", "message"),
    [
        (
            "nothing",
            {},
            None,
            "nothing: no such op; known are attention, avg_pool2d, cache_write, conv2d",
        ),
        ("rms_norm", {"K": 3}, None, "--shape K=3: rms_norm has M=1024,N=4096,residual=0"),
        ("rms_norm", {"M": 0}, None, "--shape M=0: must be positive"),
        ("w4a16_gemm", {"K": 100}, None, "must be a multiple of 64"),
        ("matmul", {"bias": 1, "version": 2}, None, "--shape bias=1: needs version=4, got 2"),
        ("conv2d", {"C": 5, "version": 2}, None, "C and N must be multiples of 8"),
        ("paged_decode", {"M": 20, "page": 10}, None, "pages of a power of two of at least 16"),
        ("w4a16_gemm", {}, torch.float32, "--dtype float32: w4a16_gemm takes bfloat16, float16"),
    ],
)
def test_ops_refuse_what_they_cannot_do(
    op: str, sizes: dict[str, int], dtype: torch.dtype | None, message: str
) -> None:
    with pytest.raises(InstrumentError, match=message):
        from_op(op, sizes, CPU, dtype)
