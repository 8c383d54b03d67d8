"""The roofline: arithmetic on made-up ceilings, the cache, and a real run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from taut_bench.instruments import ceilings, roofline, roofline_plot, stopwatch
from taut_bench.instruments.ceilings import Ceilings
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.op_cases import from_op
from taut_bench.instruments.subject import Subject
from taut_bench.instruments.work import Work

CPU = torch.device("cpu")
FP32 = torch.float32
# 100 bytes and 1000 FLOPs a second: the ridge is at 10 FLOPs a byte.
MADE_UP = Ceilings("made up", 100.0, {"float32": 1000.0}, {"int8": "no such product"}, "2026-11-21")


@pytest.mark.parametrize(
    ("work", "seconds", "bound", "floor", "fraction"),
    [
        (Work(100, 60, 40), 2.0, "memory", 1.0, 0.5),
        (Work(4000, 60, 40), 8.0, "compute", 4.0, 0.5),
        (Work(1000, 60, 40), 1.0, "memory", 1.0, 1.0),
        (Work(0, 50, 50), 4.0, "memory", 1.0, 0.25),
    ],
)
def test_points_lie_where_the_ceilings_put_them(
    work: Work, seconds: float, bound: str, floor: float, fraction: float
) -> None:
    row = roofline.place("point", work, seconds, MADE_UP, FP32)
    assert (row.bound, row.floor_seconds, row.fraction) == (bound, floor, fraction)


def test_a_ceiling_that_was_not_measured_does_not_bind() -> None:
    row = roofline.place("point", Work(10**9, 100, 0), 2.0, MADE_UP, torch.int8)
    assert (row.bound, row.floor_seconds) == ("memory", 1.0)
    assert "no int8 matrix rate (no such product)" in roofline.ceilings_line(MADE_UP, torch.int8)
    assert MADE_UP.ridge(torch.int8) is None


def test_attainable_bends_at_the_ridge() -> None:
    assert MADE_UP.ridge(FP32) == 10.0
    assert MADE_UP.attainable(5.0, FP32) == 500.0
    assert MADE_UP.attainable(20.0, FP32) == 1000.0


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the measuring, and notes what was measured."""
    done: list[str] = []

    def copy(device: torch.device) -> float:
        done.append("copy")
        return 100.0

    def matrix(device: torch.device, dtype: torch.dtype) -> float:
        done.append(ceilings.dtype_name(dtype))
        if dtype is torch.int8:
            raise RuntimeError("no int8 here\nand more")
        return 1000.0

    monkeypatch.setattr(ceilings, "_copy_rate", copy)
    monkeypatch.setattr(ceilings, "_matrix_rate", matrix)
    monkeypatch.setattr(ceilings, "_load", lambda device: 0.0)
    return done


def test_ceilings_are_kept_and_extended(tmp_path: Path, measurements: list[str]) -> None:
    cache = tmp_path / "deep" / "ceilings.json"
    first = ceilings.measured(CPU, [FP32], cache)
    assert ceilings.measured(CPU, [FP32], cache) == first
    assert measurements == ["copy", "float32"]
    both = ceilings.measured(CPU, [FP32, torch.int8], cache)
    assert measurements == ["copy", "float32", "int8"]
    assert both.not_measured == {"int8": "no int8 here"}
    ceilings.measured(CPU, [torch.int8], cache)
    assert len(measurements) == 3, "a dtype without a product is not tried again"
    ceilings.measured(CPU, [FP32], cache, again=True)
    assert measurements[3:] == ["copy", "float32"]


def test_ceilings_of_a_busy_machine_are_used_and_not_kept(
    tmp_path: Path, measurements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_load", lambda device: 2.0)
    said: list[str] = []
    found = ceilings.measured(CPU, [FP32], tmp_path / "c.json", say=said.append)
    assert found.copy_bytes_per_s == 100.0
    assert any("busy (load 2.0 a CPU)" in line for line in said)
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"x": {"unknown": 1}}', '{"x": 3}'])
def test_damaged_cache_is_named(tmp_path: Path, text: str) -> None:
    cache = tmp_path / "ceilings.json"
    cache.write_text(text)
    with pytest.raises(InstrumentError, match=r"ceilings\.json: unreadable .* delete it"):
        ceilings.measured(CPU, [FP32], cache)


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, measurements: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InstrumentError, match="cannot be written"):
        ceilings.measured(CPU, [FP32], tmp_path / "file" / "ceilings.json")


def test_real_ceilings_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_CPU_RUNS", 1)
    monkeypatch.setattr(ceilings, "_CPU_SECONDS", 0.0)
    monkeypatch.setattr(ceilings, "_COPY_BYTES", 2**22)
    found = ceilings.measured(CPU, [torch.bfloat16])
    assert found.copy_bytes_per_s > 0
    assert found.matrix_flops_per_s["bfloat16"] > 0


def mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu().sum(1)


@pytest.fixture(scope="module")
def analysed() -> roofline.Roofline:
    torch.set_num_threads(1)
    subject = Subject("mlp", mlp, (torch.randn(32, 64), torch.randn(64, 128)), CPU)
    return roofline.analyse(subject, MADE_UP)


def test_analysis_times_every_kind_of_operation(analysed: roofline.Roofline) -> None:
    assert {row.name for row in analysed.by_op} == {"aten::mm", "aten::relu", "aten::sum"}
    assert all(row.seconds > 0 for row in analysed.by_op)
    assert analysed.whole.flops == analysed.eager.flops == 2 * 32 * 64 * 128 + 2 * 32 * 128
    assert analysed.eager.moved > analysed.whole.moved
    assert analysed.timing.low <= analysed.timing.median <= analysed.timing.high


def test_table_and_json_hold_the_points(analysed: roofline.Roofline) -> None:
    text = roofline.table(analysed, MADE_UP, rows=2)
    assert "| mlp |" in text
    assert "its operations one by one" in text
    assert "1 more kinds of operation" in text
    assert analysed.as_json()["whole"]["flops"] == analysed.whole.flops


def test_an_op_has_one_line_and_the_ceiling_of_its_products() -> None:
    subject = from_op("w8a8_gemm", {"M": 2, "N": 64, "K": 64}, CPU)
    assert roofline.matrix_dtype(subject) is torch.int8
    text = roofline.table(roofline.analyse(subject, MADE_UP), MADE_UP)
    assert "one by one" not in text


def test_inputs_are_rotated_through_more_than_a_cache() -> None:
    x = torch.arange(12.0).view(3, 4).t()
    subject = Subject("f", torch.relu, (x,), CPU)
    copies = stopwatch._rotated(subject, 5 * 48 - 1)
    assert len(copies) == 5
    tensors = [copy.args[0] for copy in copies]
    assert len({tensor.data_ptr() for tensor in (x, *tensors)}) == 6
    assert all(torch.equal(t, x) and t.stride() == x.stride() for t in tensors)
    assert stopwatch._rotated(subject, 48) == [subject]
    assert len(stopwatch._rotated(subject, 10**9)) == 64
    module = Subject("m", torch.nn.ReLU(), (x,), CPU)
    assert stopwatch._rotated(module, 10**9) == [module]


def test_infinite_intensity_is_none_in_json() -> None:
    nothing = Subject("empty", lambda: torch.empty(3), (), CPU)
    result = roofline.analyse(nothing, MADE_UP)
    assert result.as_json()["whole"]["intensity"] == 0.0
    row = roofline.place("f", Work(10, 0, 0), 1.0, MADE_UP, FP32)
    assert roofline._row_json(row)["intensity"] is None


def test_plot_is_a_png(tmp_path: Path, analysed: roofline.Roofline) -> None:
    path = tmp_path / "new" / "roofline.png"
    roofline_plot.write_png([analysed], MADE_UP, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InstrumentError, match="cannot be written"):
        roofline_plot.write_png([analysed], MADE_UP, path / "below" / "a-file.png")


def test_plot_without_a_point_is_drawn_too(tmp_path: Path) -> None:
    copy = Subject("copy", lambda x: x.clone(), (torch.ones(8),), CPU)
    result = roofline.analyse(copy, MADE_UP)
    assert result.whole.flops == 0
    roofline_plot.write_png([result], MADE_UP, tmp_path / "copy.png")
    assert (tmp_path / "copy.png").stat().st_size > 0


@pytest.mark.gpu
def test_kernel_on_a_gpu_is_timed_in_a_graph_under_real_ceilings() -> None:
    cuda = torch.device("cuda")
    limits = ceilings.measured(cuda, [torch.bfloat16])
    result = roofline.analyse(from_op("rms_norm", {"M": 8192}, cuda), limits)
    assert result.timing.method.startswith("CUDA graph of ")
    assert result.whole.bound == "memory"
    assert 0.3 < result.whole.fraction < 1.3
