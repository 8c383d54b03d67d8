"""Plots from the benchmarks' CSV files, and what is said where there are none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from taut_bench import plots

RESULTS = Path(__file__).parents[1] / "runs" / "2026-11-21-h200"
PNG = b"\x89PNG\r\n"


def _copy(name: str, directory: Path) -> Path:
    path = directory / name
    path.write_text((RESULTS / name).read_text())
    return path


@pytest.mark.parametrize(
    ("name", "panels", "x", "lines"),
    [
        ("w4a16.csv", 5, "tokens", {"taut", "Marlin", "Machete"}),
        ("fused-compile.csv", 9, "tokens", {"taut", "vLLM", "torch.compile", "copy"}),
        ("engine-w4a16.csv", 2, "requests at once", {"off", "prefer", "require + engine options"}),
    ],
)
def test_a_panel_a_product_and_a_line_a_kernel(
    name: str, panels: int, x: str, lines: set[str], tmp_path: Path
) -> None:
    path = _copy(name, tmp_path)
    points, x_label, ours = plots.read(path)
    assert len({point.panel for point in points}) == panels
    assert {point.line for point in points} == lines
    assert x_label == x
    assert any(line.startswith(ours) for line in lines)
    assert plots.draw_or_say(path) == f"plot: {path.with_suffix('.png')}"
    assert path.with_suffix(".png").read_bytes().startswith(PNG)


def test_points_carry_the_range_of_the_replays(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("shape,N,K,M,kernel,us,p20_us,p80_us\no,64,128,16,taut,2.5,2.0,3.0\n")
    assert plots.read(path)[0] == [plots.Point("o 64×128, µs", "taut", 16.0, 2.5, 2.0, 3.0)]


def test_kinds_have_panels_of_their_own_and_many_tiles_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    lines = ["kind,shape,N,K,M,kernel,us,p20_us,p80_us"]
    for kind, first in (("fp8", 20), ("int8", 30)):
        lines += [f"{kind},o,64,128,16,taut tile {i},{first - i},1,40" for i in range(9)]
        lines += [f"{kind},o,64,128,{M},CUTLASS,25,24,26" for M in (16, 32)]
        lines += [f"{kind},o,64,128,32,taut tile 3,{first},1,40"]
    path.write_text("\n".join(lines) + "\n")
    points, _, ours = plots.read(path)
    found = {(p.panel, p.line, p.x): p.y for p in points}
    assert len(found) == len(points) == 8
    assert ours == "taut"
    for kind, first in (("fp8", 20), ("int8", 30)):
        panel = f"{kind} o 64×128, µs"
        assert found[panel, "taut, fastest tile", 16] == first - 8
        assert found[panel, "taut, fastest tile", 32] == first
        assert found[panel, "CUTLASS", 16] == 25

    # A ladder's few rungs stay apart.
    path.write_text("\n".join(line for line in lines if "tile 8" not in line) + "\n")
    assert len({p.line for p in plots.read(path)[0]}) == 9


def test_every_rival_stands_in_the_legend() -> None:
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    lines = ["taut", "CUTLASS", "_scaled_mm rows"]
    points = [plots.Point("o", line, x, 1.0, 1.0, 1.0) for line in lines for x in (1.0, 2.0)]
    plots.draw_panel(axis, points, lines, "taut")
    assert axis.get_legend_handles_labels()[1] == ["taut", "CUTLASS", "torch._scaled_mm rows"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "not a CSV of w4a16, scaled_mm, fused or engine"),
        ("", "not a CSV of w4a16"),
        ("mode,batch,tokens_per_s,decode_ms\noff,1,fast,1\n", "a row cannot be read"),
        ("mode,batch,tokens_per_s,decode_ms\n", "no figure to draw"),
    ],
)
def test_a_wrong_file_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    assert plots.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ")
    assert message in error
    assert error.count("\n") == 1


def test_without_matplotlib_the_benchmark_says_how_to_draw_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = plots.draw_or_say(_copy("w4a16.csv", tmp_path))
    assert said.startswith("no plot: ")
    assert said.endswith("python -m taut_bench.plots w4a16.csv")
    assert not (tmp_path / "w4a16.png").exists()
