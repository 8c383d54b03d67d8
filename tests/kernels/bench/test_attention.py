"""The attention benchmark without a GPU: refusal, floors, gates, missing rivals, report."""

from __future__ import annotations

import csv
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_bench import attention, attention_cases, attention_rivals, plots, report
from taut_bench.attention_cases import DecodeGate, PromptGate, Shape, make_cached
from taut_bench.fused_rivals import UnavailableError
from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.tuner import timing
from tuning import attention_candidates, tune_attention

no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
RATES = attention.Rates(707e12, 4.24e12)


@no_device
@pytest.mark.parametrize("command", [attention, tune_attention])
def test_without_a_gpu_the_command_says_so(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--output", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_floors_are_the_larger_of_operations_and_bytes() -> None:
    decode = Shape("decode", 32, 4096)
    assert decode.bytes_read() == 32 * 4096 * 8 * 128 * 2 * 2
    assert attention.floor_us(decode, RATES) == pytest.approx(126.6, rel=1e-3)
    assert attention.floor_us(Shape("decode", 32, 4096, "fp8"), RATES) == pytest.approx(63.3, 1e-3)
    prompt = Shape("prefill", 1, 4096)
    # Half of the square, and half of the diagonal.
    assert prompt.flops() == 4 * 32 * 128 * (4096 * 4097 // 2)
    assert Shape("backward", 1, 4096).flops() * 2 == prompt.flops() * 7


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cases, "DEVICE", "cpu")
    monkeypatch.setattr(attention_cases, "_CHECKED_TOKENS", 64)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("cache", ["bf16", "fp8", "int8"])
def test_decode_gate_passes_our_op_and_stops_a_wrong_one(cache: str) -> None:
    cached = make_cached(Shape("decode", 3, 64, cache))
    found = attention_rivals.taut_decode(cached)()
    gate = DecodeGate(cached)
    assert gate.why_wrong(found, True) is None
    assert gate.why_wrong(found, False) is None
    assert "above the budget" in str(gate.why_wrong(found * 1.05, True))
    assert "above the budget" in str(gate.why_wrong(found * 1.1, False))


@pytest.mark.usefixtures("on_cpu")
def test_prompt_gate_passes_ours_and_torch_and_stops_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The backends of a GPU refuse a CPU: any that torch has will do.
    import contextlib

    monkeypatch.setattr(attention_rivals, "_backend", lambda name: contextlib.nullcontext())
    gate = PromptGate()
    assert gate.why_wrong(attention_rivals.FORWARD["taut"](gate.prompt)(), None, True) is None
    torch_o = attention_rivals.FORWARD["SDPA flash"](gate.prompt)()
    assert gate.why_wrong(torch_o, None, False) is None
    for name in ("taut", "SDPA flash"):
        o, (dq, dk, dv) = attention_rivals.STEP[name](gate.prompt)()
        assert gate.why_wrong(o.detach(), (dq, dk, dv), name == "taut") is None
        assert str(gate.why_wrong(None, (dq, dk * 1.1, dv), False)).startswith("dk: error")


@pytest.mark.usefixtures("on_cpu")
@no_device
def test_rivals_that_cannot_run_are_notes() -> None:
    cached = make_cached(Shape("decode", 1, 32, "int8"))
    with pytest.raises(UnavailableError):
        attention_rivals.fa3_decode(cached)
    with pytest.raises(UnavailableError, match="int8"):
        attention_rivals.vllm_triton_decode(cached)
    with pytest.raises(UnavailableError, match="forward only"):
        attention_rivals.STEP["FA3"](attention_cases.make_prompt(16))
    notes: list[str] = []
    names = ["taut", "FA3"]
    gate = attention._gate("decode", cached)
    assert attention._right_kernels("decode", names, cached, gate, "here", notes) == ["taut"]
    assert len(notes) == 1
    assert notes[0].startswith("FA3, here: not run: ")


class Wrapper:
    """FlashInfer's decode as it is documented: a plan of a step's tables, then a call a layer."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert workspace.dtype is torch.uint8
        assert (layout, use_tensor_cores) == ("NHD", True)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        *sizes: int, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert sizes == (attention_cases.HEADS, attention_cases.HEADS_K, 128, attention_cases.PAGE)
        assert last_page_len.tolist() == [attention_cases.PAGE] * (len(indptr) - 1)
        self._table = indices.view(len(indptr) - 1, -1)
        self._sm_scale, self._kind = sm_scale, kv_data_type

    def run(
        self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], k_scale: float,
        v_scale: float, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        assert caches[0].dtype is self._kind
        return xqa(q, caches, self._table, self._sm_scale * k_scale, v_scale, out)


def xqa(
    q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor,
    score_scale: float, value_scale: float, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attention of one token a sequence over whole pages."""
    k, v = (c[table.long()].flatten(1, 2).float().repeat_interleave(4, 2) for c in caches)
    weights = (torch.einsum("bhd,bthd->bht", q.float(), k) * score_scale).softmax(-1)
    return out.copy_(torch.einsum("bht,bthd->bhd", weights, v) * value_scale)


def _xqa(
    q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], workspace: torch.Tensor,
    table: torch.Tensor, lens: torch.Tensor, longest: int, *, bmm1_scale: float,
    bmm2_scale: float, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    assert lens.dtype is torch.uint32
    assert lens.tolist() == [longest] * len(q)
    return xqa(q, caches, table, bmm1_scale, bmm2_scale, out)


@pytest.mark.usefixtures("on_cpu")
@no_device
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["FlashInfer", "XQA"])
def test_flashinfer_gets_tables_and_scales(
    name: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, xqa_batch_decode_with_kv_cache=_xqa
    )
    monkeypatch.setattr(attention_rivals, "imported", lambda _: module)
    cached = make_cached(Shape("decode", 2, 64, cache))
    found = attention_rivals.DECODE[name](cached)()
    assert DecodeGate(cached).why_wrong(found, False) is None
    with pytest.raises(UnavailableError, match="int8"):
        attention_rivals.DECODE[name](make_cached(Shape("decode", 1, 32, "int8")))


def test_report_names_the_best_rival_and_our_own_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    wide, narrow = Shape("decode", 32, 4096), Shape("decode", 32, 4096, "fp8")
    cells = [(wide, "taut", 150.0), (narrow, "taut", 75.0), (narrow, "FA3", 90.0)]
    rows = [
        attention.Row(shape, kernel, timing.Timing(us, us, us), RATES)
        for shape, kernel, us in cells
    ]
    attention.write(rows, ["vLLM: no module"], RATES, tmp_path)
    text = (tmp_path / "attention.md").read_text()
    assert "ratio 1.20 (FA3); own 2.00" in text
    assert "- vLLM: no module" in text
    with (tmp_path / "attention.csv").open() as file:
        first = next(csv.DictReader(file))
    assert (first["kernel"], first["us"], first["unit"]) == ("taut", "150.000", "GB/s")
    assert float(first["share"]) == pytest.approx(126.6 / 150, rel=1e-3)
    points, x, ours = plots.read(tmp_path / "attention.csv")
    assert (x, ours) == ("tokens", "taut")
    assert [point.panel for point in points[:2]] == [
        "decode bf16 B=32, µs",
        "decode fp8 B=32, µs",
    ]


def test_candidates_are_many_and_distinct() -> None:
    for tiles in (
        list(attention_candidates.forward_candidates()),
        list(attention_candidates.backward_candidates()),
        list(attention_candidates.decode_candidates(1)),
        list(attention_candidates.decode_candidates(2)),
    ):
        assert 15 <= len(tiles) == len(set(tiles)) <= 60
    tile = attention_tiles.DecodeTile(16, 1, 4, 4, 256)
    assert attention_candidates.resident(tile, 2) == 7  # 28 KiB and the system's, of 228
    assert tile in attention_candidates.splits_candidates(tile)


def test_table_rows_hold_the_fastest_and_can_be_read() -> None:
    slow, fast = (
        attention_tiles.AttentionTile(64, 64, 4, 2),
        attention_tiles.AttentionTile(128, 64, 8, 3),
    )
    cached = attention_tiles.DecodeTile(32, 4, 3, 4, 256)
    results = [
        tune_attention.Result("forward", 16, "large", 9.0, slow),
        tune_attention.Result("forward", 16, "large", 7.0, fast),
        tune_attention.Result("decode", 8, "small", 3.0, cached),
    ]
    import json

    document = {"gpu": "card", "source": "", "rows": tune_attention.table_rows(results)}
    tiles = attention_tiles.parse(json.dumps(document), "table.json").choices
    assert tiles == {
        ("forward", 128, 2, "large"): fast,
        ("decode", 128, 1, "small"): cached,
    }


@pytest.mark.usefixtures("on_cpu")
def test_tuning_leaves_wrong_tiles_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (
        attention_tiles.DecodeTile(16, 1, 2, 4, 256),
        attention_tiles.DecodeTile(32, 1, 2, 4, 256),
    )

    def launch(tile: attention_tiles.DecodeTile, q: torch.Tensor, *caches: Any) -> torch.Tensor:
        *caches, settings = caches
        o: torch.Tensor = torch.ops.taut.paged_decode(q, *caches, *settings)
        return o * 2 if tile == bad else o

    def measure(subjects: list[timing.Subject], **_: Any) -> list[timing.Timing]:
        calls: list[Callable[[int], object]] = [subject.call for subject in subjects]
        assert all(call(0) is not None for call in calls)
        return [timing.Timing(5.0, 5.0, 5.0) for _ in subjects]

    monkeypatch.setattr(tune_attention.decode, "launch", launch)
    monkeypatch.setattr(timing, "measure", measure)
    times = tune_attention._decode_times([good, bad], "fp8", [(2, 64), (1, 32)])
    assert times == {good: [5.0, 5.0]}
    assert f"WRONG decode fp8 {bad} B=2 T=64" in capsys.readouterr().out


def run_once(subjects: list[timing.Subject], *_: Any, **__: Any) -> list[timing.Timing]:
    for subject in subjects:
        subject.call(0)
    return [timing.Timing(5.0, 5.0, 5.0) for _ in subjects]


@pytest.fixture
def pretended_device(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the clock and the card, with our ops' references."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    for clock in ("measure", "measure_eager"):
        monkeypatch.setattr(timing, clock, run_once)
    monkeypatch.setattr(timing, "capture", lambda subject, calls: subject.call(0))
    monkeypatch.setattr(timing, "copy_ceiling", lambda: 4e12)
    monkeypatch.setattr(attention, "product_rate", lambda: 7e14)


@no_device
@pytest.mark.usefixtures("pretended_device")
def test_the_whole_benchmark_runs_and_notes_what_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = (Shape("prefill", 1, 64), Shape("backward", 1, 64), Shape("decode", 2, 64, "fp8"))
    monkeypatch.setattr(attention, "SHAPES", shapes)
    monkeypatch.setattr(timing, "ROTATED_BYTES", 2**20)
    assert attention.main(["--output", str(tmp_path)]) == 0
    with (tmp_path / "attention.csv").open() as file:
        found = {(row["part"], row["kernel"]) for row in csv.DictReader(file)}
    assert {(shape.part, "taut") for shape in shapes} <= found
    text = (tmp_path / "attention.md").read_text()
    assert "- FA3, decode fp8 B=2 T=64: not run: " in text
    assert attention.main(["--output", str(tmp_path), "--part", "decode", "--kernel", "taut"]) == 0


def test_what_no_graph_holds_is_a_note_and_ours_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(subject: timing.Subject, calls: int) -> None:
        if subject.name != "cuDNN":
            raise RuntimeError("not while capturing\nmore")

    monkeypatch.setattr(timing, "capture", refuse)
    rivals = [timing.Subject(name, lambda i: None, 1) for name in ("FA3", "cuDNN")]
    notes: list[str] = []
    assert attention._capturable(rivals, "here", notes) == rivals[1:]
    assert notes == ["FA3, here: not in a CUDA graph: not while capturing"]
    with pytest.raises(RuntimeError, match="not while capturing"):
        attention._capturable([timing.Subject("taut", lambda i: None, 1)], "here", notes)


@no_device
@pytest.mark.usefixtures("pretended_device")
def test_tuning_runs_from_candidates_to_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(tile: attention_tiles.DecodeTile, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        *caches, settings = rest
        o: torch.Tensor = torch.ops.taut.paged_decode(q, *caches, *settings)
        return o

    monkeypatch.setattr(tune_attention.decode, "launch", launch)
    monkeypatch.setattr(tune_attention, "compile_all", lambda _, jobs, processes: list(jobs))
    small = {"small": ((1, 32),), "large": ((2, 64),)}
    monkeypatch.setattr(tune_attention, "DECODE_SHAPES", small)
    one = {size: list(attention_candidates.decode_candidates(size))[:1] for size in (1, 2)}
    monkeypatch.setattr(tune_attention, "decode_candidates", one.__getitem__)
    assert tune_attention.main(["--output", str(tmp_path), "--kernel", "decode"]) == 0
    table = attention_tiles.parse((tmp_path / "table.json").read_text(), "table.json")
    assert len(table.choices) == 4
    assert "WRONG" not in capsys.readouterr().out
