"""The rule by which a W4A16 layer is ours, and the tables it reads."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_bench import model_sizes, w4a16_format
from taut_kernels.gemm.w4a16 import verdict as measured_w4a16
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.launch import tile_tables
from tuning import measured_table, merge_tiles

RESULTS = Path(__file__).parents[1] / "runs"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def _row(**change: Any) -> dict[str, Any]:
    row = {"N": 64, "K": 128, "M": [1, 256], "us": [2.0, 4.0], "vllm_us": [4.0, 4.0]}
    return row | change


def _parse(*rows: dict[str, Any]) -> measured_w4a16.Shapes:
    text = json.dumps({"gpu": "card", "source": "here", "rows": list(rows)})
    return measured_w4a16.parse(text, "t.json")


@pytest.mark.parametrize(
    ("ratios", "decode", "overall", "wins"),
    [
        ({1: 2.0, 256: 1.0}, 2.0, math.sqrt(2), True),
        ({1: 2.0, 64: 0.5, 65: 1.0}, 1.0, 1.0, True),  # 64 still is decode
        ({1: 0.9, 256: 4.0}, 0.9, math.sqrt(3.6), False),  # slower in decode: no gain makes it good
        ({1: 1.2, 256: 0.5}, 1.2, math.sqrt(0.6), False),  # prefill costs more than decode gains
        # Prefill counts half, at however many M it was measured.
        ({1: 1.5, 128: 0.8, 256: 0.8, 1024: 0.8, 4096: 0.8}, 1.5, math.sqrt(1.2), True),
    ],
)
def test_the_rule(ratios: dict[int, float], decode: float, overall: float, wins: bool) -> None:
    measured = measured_w4a16.Measured(ratios)
    assert measured.decode == pytest.approx(decode)
    assert measured.overall == pytest.approx(overall)
    assert measured.wins is wins


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([_row(M=[1, 2])], "t.json: N=64 K=128: needs an M of at most 64 and one above"),
        ([_row(us=[1.0])], "M, us and vllm_us must be of one length"),
        ([_row(bits=4)], "a row needs exactly"),
        ([_row(us=[0.0, 1.0])], "N=64 K=128"),
        ([_row(vllm_us=[0.0, 1.0])], "times must be positive"),
        ([_row(M=[1, 1])], "an M is there twice"),
        ([_row(), _row()], "t.json: N=64 K=128 is there twice"),
        ([_row(format="g32")] * 2, "t.json: format=g32 N=64 K=128 is there twice"),
        ([_row(format="g16")], "t.json: format=g16 N=64 K=128: format must be one of"),
    ],
)
def test_a_table_that_cannot_be_judged_is_refused(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _parse(*rows)


def test_reasons_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _parse(
        _row(),
        _row(N=80, vllm_us=[1.0, 4.0]),
        _row(N=96, M=[1, 32, 256], us=[1.0, 1.0, 1.0], vllm_us=[4.0, 0.8, 0.9]),
    )
    monkeypatch.setattr(measured_w4a16, "tables", lambda: {"card": table})
    ask, note = measured_w4a16.why_not_preferred, measured_w4a16.slower_in_places
    assert ask("card", 64, 128) is None
    assert ask("card", 64, 256) == "64×256 not measured against vLLM's kernels on card"
    assert ask("other", 64, 128) == "not measured against vLLM's kernels on other"
    assert ask("card", 80, 128) == (
        "slower than vLLM's kernels: 0.50 of their speed up to 64 tokens, 0.71 over all"
    )
    assert ask("card", 96, 128) is None
    assert (
        note("card", 96, 128) == "slower than vLLM's at 32, 256 tokens (0.80 to 0.90 of its speed)"
    )
    assert note("card", 80, 128) == "slower than vLLM's at 1 tokens (0.50 of its speed)"
    for gpu, N in (("card", 64), ("card", 1), ("other", 96), (None, 96)):
        assert note(gpu, N, 128) is None


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ((64, 128, torch.bfloat16, False), None),
        ((64, 32, torch.bfloat16, True), "not in groups of 32 with zero points in bf16"),
        ((64, 128, torch.float16, False), "not in symmetric groups of 128 in fp16"),
        ((64, -1, torch.bfloat16, False), "not in one symmetric group a channel in bf16"),
        ((80, 128, torch.bfloat16, False), "slower than vLLM's at 1 tokens (0.50 of its speed)"),
        ((80, 64, torch.bfloat16, False), "1 tokens (0.50 of its speed); timed in symmetric"),
        ((1, 32, torch.float16, True), None),
    ],
)
def test_a_format_nobody_timed_is_said(
    layer: tuple[int, int, torch.dtype, bool], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _parse(_row(K=256), _row(N=80, K=256, vllm_us=[1.0, 9.0]))
    monkeypatch.setattr(measured_w4a16, "tables", lambda: {"card": table})
    N, group_size, dtype, has_zeros = layer
    for gpu in ("card", None):
        found = measured_w4a16.remark(gpu, N, 256, group_size, dtype, has_zeros=has_zeros)
        if gpu is None or said is None:
            assert found is None
        else:
            assert said in str(found)


SMALL = "groups of 32 not measured against vLLM's kernels on card"


@pytest.mark.parametrize(
    ("measured", "refused"),
    [
        # Only in the default, which wins: everything stands as it but groups of 32.
        ({"g128": 4.0}, {"g32": SMALL, "g32-zp": SMALL}),
        # A row of its own decides, and of groups of 32 either stands for the other.
        (
            {"g128": 1.0, "g64": 4.0, "g32-zp": 4.0},
            dict.fromkeys(("g128", "g64-zp", "g128-zp"), "slower"),
        ),
        ({"g128": 4.0, "g128-zp": 1.0}, {"g128-zp": "slower", "g32": SMALL, "g32-zp": SMALL}),
        ({"g128": 4.0, "g32": 1.0}, {"g32": "slower", "g32-zp": "slower"}),
        ({"g128": 4.0, "g32": 1.0, "g32-zp": 4.0}, {"g32": "slower"}),
        ({"g32": 4.0}, dict.fromkeys(("g128", "g64", "g64-zp", "g128-zp"), "64×128 not measured")),
    ],
)
def test_a_format_stands_by_its_own_row_or_by_one_that_may_stand_for_it(
    measured: dict[str, float], refused: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        _row(vllm_us=[us, 4.0]) | ({} if name == "g128" else {"format": name})
        for name, us in measured.items()
    ]
    table = _parse(*rows)
    monkeypatch.setattr(measured_w4a16, "tables", lambda: {"card": table})
    for weights in WeightFormat:
        reason = measured_w4a16.why_not_preferred("card", 64, 128, weights)
        if weights in refused:
            assert refused[weights] in str(reason)
        else:
            assert reason is None, weights


def test_what_is_said_of_a_layer_is_of_the_row_it_stands_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, fast = [1.0, 9.0], [8.0, 9.0]
    table = _parse(
        _row(K=256),
        _row(K=256, format="g32-zp", vllm_us=slow),
        _row(K=256, format="g128-zp", vllm_us=fast),
        _row(K=256, N=80, vllm_us=slow),
    )
    monkeypatch.setattr(measured_w4a16, "tables", lambda: {"card": table})

    def ask(N: int, group: int, zeros: bool, dtype: torch.dtype = torch.bfloat16) -> str | None:
        return measured_w4a16.remark("card", N, 256, group, dtype, has_zeros=zeros)

    places = "slower than vLLM's at 1 tokens (0.50 of its speed)"
    timed = "timed in groups of 32 with zero points in bf16, not in"
    assert ask(64, 32, True) == places
    assert (
        ask(64, 32, True, torch.float16)
        == f"{places}; {timed} groups of 32 with zero points in fp16"
    )
    assert ask(64, 32, False) == f"{places}; {timed} symmetric groups of 32 in bf16"
    assert ask(64, 128, True) is None
    assert ask(64, -1, True) == (
        "timed in groups of 128 with zero points in bf16, not in one group a channel with zero"
        " points in bf16"
    )
    assert ask(64, 64, True) == (
        "timed in symmetric groups of 128 in bf16, not in groups of 64 with zero points in bf16"
    )
    # Asked for without a row: what is slower in other groups says nothing of it.
    assert ask(80, 32, False) == (
        "timed in symmetric groups of 128 in bf16, not in symmetric groups of 32 in bf16"
    )
    of_rows = measured_w4a16.slower_in_places
    assert of_rows("card", 64, 256, WeightFormat.G32) == places
    assert of_rows("card", 80, 256, WeightFormat.G32) is None


def test_a_card_is_not_judged_by_the_figures_of_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tile_tables.TWINS[H100] == H200
    monkeypatch.setattr(measured_w4a16, "tables", lambda: {H200: _parse(_row(vllm_us=[1.0, 9.0]))})
    reason = measured_w4a16.why_not_preferred(H100, 64, 128)
    assert reason == f"not measured against vLLM's kernels on {H100}"
    assert measured_w4a16.slower_in_places(H100, 64, 128) is None
    assert measured_w4a16.slower_in_places(H200, 64, 128) is not None


def test_both_cards_have_verdicts() -> None:
    assert set(measured_w4a16.tables()) == {H100, H200}


@pytest.mark.parametrize(
    ("gpu", "slow"),
    [
        (H200, "768, 1024, 1344, 2048, 4096 tokens (0.90 to 0.98 of its speed)"),
        (H100, "512, 768, 1024, 1536, 1664, 2048, 4096 tokens (0.92 to 1.00 of its speed)"),
    ],
    ids=["h200", "h100"],
)
def test_nearly_every_measured_shape_is_ours_on_both_cards(gpu: str, slow: str) -> None:
    shapes = [key[:2] for key in measured_w4a16.tables()[gpu].choices if key[2] is DEFAULT]
    assert len(shapes) == 304
    lost = {shape for shape in shapes if measured_w4a16.why_not_preferred(gpu, *shape)}
    # One of four: gate_up of Qwen3-14B on two ranks, by what a prefill of 1024 tokens loses.
    assert lost == {(17408, 5120)}
    for N, K in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (8192, 8192)):
        assert (N, K) in shapes
    note = measured_w4a16.slower_in_places(gpu, 28672, 4096)
    assert note == f"slower than vLLM's at {slow}"


# --- from the benchmark's CSV --------------------------------------------------------------------


PRODUCTS = {
    H100: [f"2026-11-27-h100/w4a16-products{of}.jsonl" for of in ("", "-g32-zp")],
    H200: [f"2026-11-28-h200/w4a16-products{of}.jsonl" for of in ("", "-g32-zp")],
}
"""Every model's, of `tuning.cover_products`: they add what the other runs lack."""
RUNS_OF_FORMATS = (
    "g32-zp-bf16-before",
    "g32-zp-bf16",
    "g32-bf16-before",
    "g32-bf16",
    "g64-bf16",
    "g128-zp-bf16-before",
    "g128-zp-bf16",
)
"""Few tokens again with tiles of their own; prefill of the runs before."""
LATER_RUNS_OF_FORMATS = ("g32-zp-bf16", "g32-bf16", "g64-bf16")
"""Few tokens again, where rings keep the scales of whole quads once."""


@pytest.mark.parametrize(
    ("gpu", "results", "later", "shipped", "decode"),
    [
        (
            H200,
            "2026-11-22-h200",
            [
                "2026-11-24-h200/w4a16-128.csv",
                "2026-11-25-h200/w4a16.csv@512",
                "2026-11-25-h200-04h/w4a16.csv",
                "2026-11-25-h200-04h/w4a16-down.csv",
                *(f"2026-11-25-h200-10h/w4a16-{run}.csv" for run in RUNS_OF_FORMATS),
                *(f"2026-11-25-h200-14h/w4a16-{run}.csv" for run in LATER_RUNS_OF_FORMATS),
                "2026-11-26-h200-04h/w4a16-g32-zp-bf16-before.csv",
                "2026-11-26-h200-04h/w4a16-g32-zp-bf16.csv",
            ],
            "h200.json",
            "1.4",
        ),
        (
            H100,
            "2026-11-23-h100",
            ["2026-11-26-h100-17h/w4a16.csv@512", "2026-11-26-h100-01h/w4a16-g32-zp-bf16.csv"],
            "h100.json",
            "1.3",
        ),
    ],
    ids=["h200", "h100"],
)
def test_the_shipped_tables_are_what_the_committed_benchmarks_say(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gpu: str,
    results: str,
    later: list[str],
    shipped: str,
    decode: str,
) -> None:
    names = [f"{results}/w4a16-models.csv", f"{results}/w4a16.csv", *later]
    inputs = [str(RESULTS / name) for name in names]
    output = tmp_path / "t.json"
    arguments = [*inputs, "--gpu", gpu, "--source", "x", "--output", str(output)]
    assert measured_table.main(arguments) == 0
    assert f"28672×4096: decode {decode}" in capsys.readouterr().out
    card = (tile_tables._DIRECTORY / shipped).read_text()
    table = json.loads(merge_tiles.alone(card, "w4a16_measured", shipped))
    products = PRODUCTS[gpu]
    if products:
        more = [str(RESULTS / name) for name in products]
        kept = ["--gpu", gpu, "--source", "x", "--output", str(output), "--keep", str(output)]
        assert measured_table.main([*more, *kept]) == 0
    assert json.loads(output.read_text())["rows"] == table["rows"]
    assert table["gpu"] == gpu
    for name in (f"{results}/w4a16-models.csv, w4a16.csv", *later, *products):
        assert f"tests/kernels/runs/{name}" in table["source"]


def test_the_shipped_verdicts_of_formats_are_ours_and_say_where_slower() -> None:
    shapes = measured_w4a16.tables()[H200].choices
    formats = {weights for _, _, weights in shapes} - {DEFAULT}
    assert formats == {WeightFormat(run) for run in ("g32", "g32-zp", "g64", "g128-zp")}
    lost = {shape for shape in shapes if measured_w4a16.why_not_preferred(H200, *shape)}
    # Beside Humming, mostly more than 4000 output features or 12800 input features.
    assert {weights for _, _, weights in lost - {(17408, 5120, DEFAULT)}} == {WeightFormat.G32_ZP}
    assert len(lost) == 1 + 30
    note = measured_w4a16.slower_in_places(H200, 28672, 4096, WeightFormat.G64)
    assert note == "slower than vLLM's at 1024 tokens (0.96 of its speed)"
    assert measured_w4a16.slower_in_places(H200, 28672, 4096, WeightFormat.G32) is None


def _csv(path: Path, *cells: tuple[int, str, float]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["shape", "N", "K", "M", "kernel", "us"])
        writer.writerows(["o", 64, 128, M, kernel, us] for M, kernel, us in cells)
    return path


def test_figures_of_two_runs_never_meet_in_one_ratio(tmp_path: Path) -> None:
    first = _csv(tmp_path / "a.csv", (1, "taut", 5.0), (1, "Marlin", 6.0), (256, "taut", 9.0))
    second = _csv(
        tmp_path / "b.csv",
        (1, "taut", 4.0),  # alone in this run: the first run's pair stays
        (256, "Machete", 8.0),  # likewise alone: the cell is left out
        (512, "taut", 2.0),
        (512, "Marlin", 7.0),
        (512, "Machete", 3.0),
        (512, "gemlite", 1.0),  # no kernel of vLLM's
    )
    cells = measured_table.read([first, second])
    assert cells[64, 128, DEFAULT][1] == {"taut": 5.0, "Marlin": 6.0}
    assert 256 not in cells[64, 128, DEFAULT]
    (row,) = json.loads(measured_table.table(cells, "card", "s"))["rows"]
    assert row == {"N": 64, "K": 128, "M": [1, 512], "us": [5.0, 2.0], "vllm_us": [6.0, 3.0]}


def test_a_file_may_count_from_some_tokens_on(tmp_path: Path) -> None:
    first = _csv(tmp_path / "a.csv", (1, "taut", 5.0), (1, "Marlin", 6.0))
    cells = [(M, kernel, 2.0) for M in (1, 256, 512, 1024) for kernel in ("taut", "Machete")]
    odd = _csv(tmp_path / "b@512", *cells)
    found = measured_table.read([first, f"{odd}@512"])[64, 128, DEFAULT]
    assert sorted(found) == [1, 512, 1024]
    assert found[1] == {"taut": 5.0, "Marlin": 6.0}
    with pytest.raises(FileNotFoundError):  # of a file so named, the end is a number of tokens
        measured_table.read([odd])


def _csv_of(path: Path, given: w4a16_format.Format, us: float) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["N", "K", "M", "kernel", "us", *w4a16_format.COLUMNS])
        for M, (kernel, time) in itertools.product((1, 256), (("taut", us), ("Marlin", 4.0))):
            writer.writerow([64, 128, M, given.kernel(kernel), time, *given.cells()])
    return path


def test_files_of_formats_make_rows_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = _csv(
        tmp_path / "a.csv", *((M, name, 2.0) for M in (1, 256) for name in ("taut", "Marlin"))
    )
    small = w4a16_format.Format(32, zero_points=True)
    files = [
        default,
        _csv_of(tmp_path / "b.csv", small, 9.0),
        _csv_of(tmp_path / "c.csv", w4a16_format.Format(64), 1.0),
        _csv_of(tmp_path / "d.csv", small, 1.0),
    ]
    output = tmp_path / "t.json"
    words = [*map(str, files), "--gpu", "card", "--source", "s", "--output", str(output)]
    assert measured_table.main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["64×128", "64×128 g32-zp", "64×128 g64"]
    text = output.read_text()
    assert [row.get("format") for row in json.loads(text)["rows"]] == [None, "g32-zp", "g64"]
    shapes = measured_w4a16.parse(text, "t.json").choices
    assert shapes[64, 128, DEFAULT].decode == 1.0
    assert shapes[64, 128, WeightFormat.G32_ZP].decode == 4.0  # the later file counts
    half = _csv_of(tmp_path / "e.csv", w4a16_format.Format(32, dtype="fp16"), 1.0)
    channel = _csv_of(tmp_path / "f.csv", w4a16_format.Format(-1, zero_points=True), 1.0)
    for refused in (half, channel):
        with pytest.raises(ValueError, match="rows of another format"):
            measured_table.read([refused])


def test_a_wrong_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    common = ["--gpu", "c", "--source", "s", "--output", str(tmp_path / "o")]
    assert measured_table.main([str(path), *common]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: not a CSV of a benchmark")
    assert measured_table.main([str(tmp_path / "none.csv"), *common]) == 2
    capsys.readouterr()
    path.write_text("N,K,M,kernel,us,group_size\n64,128,1,taut g32,1.0,32\n")
    assert measured_table.main([str(path), *common]) == 2
    assert "rows of another format" in capsys.readouterr().err


def test_every_model_of_the_list_has_its_verdicts_on_the_card_they_were_measured_on() -> None:
    """All products but the two that no kernel of vLLM's takes without padding."""
    missing = {
        (N, K)
        for N, K in model_sizes.every_product(128)
        if not measured_w4a16.is_measured(H100, N, K, DEFAULT)
    }
    assert missing == {(3424, 4096), (7392, 8192)}
