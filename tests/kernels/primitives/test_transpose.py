"""`taut::transpose`, rung by rung: interpreter, op contract, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from taut_bench import testing
from taut_kernels.primitives import transpose, transposition
from taut_kernels.primitives.transpose_tiles import VERSIONS

INTERPRET = Path(__file__).with_name("interpret_primitives.py")
interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="Triton 3.6 interpreter with NumPy 2: only 0-dimensional arrays can be converted",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@interpreter
def test_interpreted_kernels(run_checks: Any) -> None:
    process = run_checks(INTERPRET, "transposes", env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == ["transposes", "88"]


def test_result_is_contiguous_memory_of_its_own() -> None:
    x = draw(3, 4, 5, dtype=torch.bfloat16)
    for view in (x, x.transpose(1, 2), x[:, :1]):
        y = transpose(view)
        assert torch.equal(y, view.transpose(1, 2))
        assert y.is_contiguous()
        assert y.data_ptr() != view.data_ptr()


def test_op_contract() -> None:
    for x in (draw(5, 7, dtype=torch.float16), draw(2, 5, 7, dtype=torch.float32)[:, :, 1:]):
        for version in ("v1", "v5"):
            torch.library.opcheck(torch.ops.taut.transpose.default, (x, version))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return transpose(x + 1) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = draw(rows, 7, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(2, 2, dtype=torch.int32)}, "x must be bfloat16, float16 or float32"),
    ({"x": torch.zeros(2)}, r"x must have shape \[R, C\] or \[B, R, C\]"),
    ({"x": torch.zeros(70000, 1, 1)}, "x must have at most 65535 matrices"),
    ({"x": torch.zeros(2, 2, requires_grad=True)}, "x requires grad"),
    ({"version": "v9"}, "version must be one of v1, v2, v3, v4, v5, got 'v9'"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_rejects_bad_inputs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transpose(**{"x": torch.zeros(2, 2)} | change)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 9, 16), "multiples of 4 rows and columns with v5, got 9 and 16"),
        (torch.zeros(1, 8, 16).transpose(1, 2), "contiguous rows at multiples of 4"),
        (torch.zeros(1, 8, 17)[:, :, :16], "contiguous rows at multiples of 4"),
        (torch.zeros(200)[1:129].view(1, 8, 16), "start at a multiple of 16 bytes"),
    ],
)
def test_the_copy_engine_says_what_it_does_not_take(x: torch.Tensor, message: str) -> None:
    assert transposition.why_not_described(torch.zeros(1, 8, 16)) is None
    assert message in str(transposition.why_not_described(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", VERSIONS)
def test_gpu_kernels_move_every_element(version: str, dtype: torch.dtype) -> None:
    shapes = [(1, 1), (64, 64), (1000, 72), (33, 4097), (5, 264, 136), (3, 1, 5000), (0, 5)]
    inputs = [draw(*shape, dtype=dtype, device="cuda") for shape in shapes]
    inputs += [inputs[2].t(), inputs[4][:, 3:, 1:], inputs[4][:, ::2, ::3], inputs[2][:, 8:64]]
    count = 0
    for x in inputs:
        batched = x if x.dim() == 3 else x[None]
        if version == "v5" and x.numel() and transposition.why_not_described(batched):
            with pytest.raises(ValueError, match="with v5"):
                transpose(x, version=version)
            continue
        with testing.nan_poison():
            y = transpose(x, version=version)
        assert torch.equal(y, x.transpose(-2, -1)), x.shape
        count += 1
    assert count >= 4


@pytest.mark.gpu
def test_gpu_graph_replays_on_new_data() -> None:
    x = draw(256, 512, dtype=torch.bfloat16, device="cuda")
    for version in VERSIONS:
        transpose(x, version=version)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = transpose(x, version=version)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, x.t()), version
