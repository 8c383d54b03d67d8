"""The fastest of what a tuner timed."""

from __future__ import annotations

from pathlib import Path

from tuning import tune_best


def test_the_fastest_of_each_cell_are_kept_in_order(tmp_path: Path) -> None:
    many = [{"shape": "o", "M": 16, "us": 9.0 - n / 8, "tile": f"t{n}"} for n in range(14)]
    fields = {"shape": "o", "M": 1, "us": 5.25, "tile": {"depth": 4, "fence": False}}
    tune_best.write([*many, fields, many[0] | {"shape": "down"}], tmp_path)
    head, *lines = (tmp_path / tune_best.NAME).read_text(encoding="utf-8").splitlines()
    assert head == "shape,M,us,tile"
    assert lines[0] == "down,16,9.000,t0"
    assert lines[1] == "o,1,5.250,depth=4 fence=False"
    assert lines[2] == "o,16,7.375,t13"
    assert len(lines) == 2 + tune_best.KEPT
