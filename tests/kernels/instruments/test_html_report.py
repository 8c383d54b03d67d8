"""The HTML report: what is plotted, what is a table, and that the file needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from taut_bench import html_report, report_cells
from taut_bench.report_cells import ReportError

LONG = """shape,N,K,M,kernel,us,p20_us,p80_us
qkv,64,32,1,taut,10.0,9.0,11.0
qkv,64,32,1,Marlin,15.0,14.0,16.0
qkv,64,32,1,FP8 (other weights),1.0,1.0,1.0
qkv,64,32,1,copy,2.0,2.0,2.0
qkv,64,32,16,taut,20.0,19.0,21.0
qkv,64,32,16,Marlin,18.0,17.0,19.0
o <b>&$x$,8,8,1,Marlin,3.0,3.0,3.0
"""
WIDE = """kind,shape,M,tile,us,best_rival,rival_us,ratio
fp8,o,1,ring,5.0,CUTLASS,6.0,1.2
fp8,o,64,ring,8.0,,,
"""
OTHER = "mode,batch,tokens_per_s\noff,1,262.0\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "long.csv").write_text(LONG)
    (tmp_path / "long.md").write_text("Measured with GPU NVIDIA H200, driver <5>.\n\n| x |\n")
    (tmp_path / "wide.csv").write_text(WIDE)
    (tmp_path / "other.csv").write_text(OTHER)
    return tmp_path


def test_ratios_are_best_rival_over_ours(run: Path) -> None:
    found = html_report.section(run / "long.csv")
    (table,) = found.tables
    assert (table.axis, table.sizes) == ("M", ("1", "16"))
    first = report_cells.Ratio("qkv N=64 K=32", ("1.50 (Marlin)", "0.90 (Marlin)"))
    assert table.ratios[0] == first
    assert table.ratios[1].cells == ("–", "–"), "nothing of ours was measured there"
    assert len(found.plots) == 2


def test_columns_behind_the_size_group_too(tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text(
        "op,M,H,V,kernel,us\nce,8,2,9,taut,1.0\nce,8,2,9,Liger,2.0\nce,8,4,7,taut,1.0\n"
    )
    found = html_report.section(tmp_path / "loss.csv")
    (table,) = found.tables
    assert [(ratio.group, ratio.cells) for ratio in table.ratios] == [
        ("ce H=2 V=9", ("2.00 (Liger)",)),
        ("ce H=4 V=7", ("–",)),
    ]


def test_each_kind_lies_along_the_size_that_needs_the_fewest_plots(tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text(
        "op,M,H,V,kernel,us\n"
        "ce,8,0,32000,taut,1.0\nce,8,0,64000,taut,2.0\nce,8,0,64000,Liger,3.0\n"
        "linear,1024,4,9,taut,1.0\nlinear,8192,4,9,taut,8.0\n"
    )
    found = html_report.section(tmp_path / "loss.csv")
    assert len(found.plots) == 2
    assert found.tables == (
        report_cells.Table(
            "V", ("32000", "64000"), (report_cells.Ratio("ce M=8 H=0", ("–", "1.50 (Liger)")),)
        ),
        report_cells.Table(
            "M", ("1024", "8192"), (report_cells.Ratio("linear H=4 V=9", ("–",) * 2),)
        ),
    )


def test_cases_without_a_size_lie_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "primitives.csv").write_text(
        "part,case,kernel,us\n"
        "gemm,4×4,taut v1,4.0\ngemm,4×4,taut v2,2.0\ngemm,4×4,cuBLAS,1.0\ngemm,8×8 $x$,taut v2,5\n"
        "pool,max,taut,1.0\npool,max,torch,3.0\n"
    )
    found = html_report.section(tmp_path / "primitives.csv")
    assert found.no_plot is None
    assert len(found.plots) == 2
    head = ("best rival ÷ ours",)
    assert found.tables == (
        report_cells.Table(
            "gemm",
            head,
            (report_cells.Ratio("4×4", ("0.50 (cuBLAS)",)), report_cells.Ratio("8×8 $x$", ("–",))),
        ),
        report_cells.Table("pool", head, (report_cells.Ratio("max", ("3.00 (torch)",)),)),
    )
    # Both cases stand under the plot, and each rung in its legend.
    for text in ("4×4", "8×8", "taut v1", "taut v2", "cuBLAS"):
        assert f"<!-- {text}" in found.plots[0]


@pytest.mark.parametrize(
    ("day", "name", "plots", "axes"),
    [
        # gemm, transpose, conv2d, pool, reduction
        ("2026-11-22", "primitives", 5, ["gemm", "transpose", "conv2d", "pool", "reduction"]),
        # prefill, backward, and decode of three caches at five numbers of sequences
        ("2026-11-22", "attention", 2 + 3 * 5, ["T"]),
        # cross entropy along V, four linear ones of two shapes and a shape each along M
        ("2026-11-22", "loss", 1 + 2 + 2, ["V", "M"]),
        # twelve passes along N, softmax's at 4096 rows besides
        ("2026-11-22", "fused_backward", 12 + 2, ["N"]),
    ],
)
def test_every_groups_csv_is_drawn_over_its_sizes(
    day: str, name: str, plots: int, axes: list[str]
) -> None:
    folder = Path(__file__).parents[1] / "runs" / f"{day}-h200"
    found = html_report.section(folder / f"{name}.csv")
    assert found.no_plot is None
    assert (len(found.plots), [table.axis for table in found.tables]) == (plots, axes)
    for table in found.tables:
        assert any(cell != "–" for ratio in table.ratios for cell in ratio.cells)


def test_wide_csv_becomes_two_series(run: Path) -> None:
    found = html_report.section(run / "wide.csv")
    assert found.tables[0].ratios == (report_cells.Ratio("fp8 o", ("1.20 (CUTLASS)", "–")),)


def test_other_csv_is_a_table_with_the_reason(run: Path) -> None:
    found = html_report.section(run / "other.csv")
    assert (found.plots, found.no_plot) == ((), "no column 'us'")
    assert found.rows == (("off", "1", "262.0"),)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (["shape", "kernel", "us"], "no size among the columns (M, tokens, batch, T, N, V, case)"),
        (["M", "kernel"], "no column 'us'"),
        (["M", "us", "best_rival"], "no column 'kernel', nor 'best_rival' with 'rival_us'"),
        (["tokens", "kernel", "us"], None),
    ],
)
def test_why_no_plot(header: list[str], reason: str | None) -> None:
    assert report_cells.why_no_plot(header) == reason


class Checker(HTMLParser):
    """Collects tags, and every address a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "xlink:href"} and not str(value).startswith("#"):
                self.fetched.append(str(value))


def test_file_is_complete_in_itself_and_escapes_what_it_shows(run: Path) -> None:
    target = run / "new" / "report.html"
    html_report.write(run, target)
    text = target.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.tags.count("svg") == 3
    assert checker.fetched == []
    assert "script" not in checker.tags
    assert not re.search(r"url\((?!#)", text)
    assert "Measured with GPU NVIDIA H200, driver &lt;5&gt;." in text
    assert "<td>o &lt;b&gt;&amp;$x$</td>" in text
    assert "<b>" not in text


def test_same_run_gives_the_same_file(run: Path) -> None:
    html_report.write(run, run / "a.html")
    html_report.write(run, run / "b.html")
    assert (run / "a.html").read_bytes() == (run / "b.html").read_bytes()


def test_committed_results_make_a_report(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "runs" / "2026-11-21-h200"
    found = html_report.section(folder / "w4a16.csv")
    assert found.environment.startswith("Measured with GPU NVIDIA H200")
    assert len(found.plots) == len(found.tables[0].ratios) == 5


def test_whole_engine_is_drawn_without_ratios() -> None:
    folder = Path(__file__).parents[1] / "runs" / "2026-11-21-h200"
    found = html_report.section(folder / "engine-w4a16.csv")
    assert (len(found.plots), found.tables, found.no_plot) == (2, (), None)


@pytest.mark.filterwarnings("error")
def test_dozens_of_tiles_leave_room_for_the_plot(tmp_path: Path) -> None:
    rows = [f"o,{M},taut tile {i},{i + 1}" for M in (1, 16) for i in range(60)]
    (tmp_path / "x.csv").write_text("\n".join(["shape,M,kernel,us", *rows, "o,1,CUTLASS,9", ""]))
    found = html_report.section(tmp_path / "x.csv")
    assert found.tables[0].ratios[0].cells[0] == "9.00 (CUTLASS)"
    (svg,) = found.plots
    assert "taut, fastest tile" in svg
    assert "taut tile 7" not in svg


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty, without a header"),
        ("M,kernel,us\n1,taut\n", "row 2 has 2 cells, not 3"),
        ("M,kernel,us\n1,taut,fast\n", "row 2: could not convert"),
    ],
)
def test_damaged_csv_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(ReportError, match=message):
        html_report.write(tmp_path, tmp_path / "report.html")


def test_folder_without_a_csv_and_target_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no CSV of a benchmark in it"):
        html_report.write(run / "nowhere", tmp_path / "report.html")
    with pytest.raises(ReportError, match="cannot be written"):
        html_report.write(run, run / "long.csv" / "report.html")
