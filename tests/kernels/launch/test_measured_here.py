"""The file of what was measured on this machine's card: who reads it, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from taut_kernels.gemm.w4a16 import decode_tile, lookup, verdict
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.launch import measured_here
from taut_kernels.launch.measured_here import Document, Machine
from taut_kernels.vllm_plugin import cache_key

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
MACHINE = Machine(H100, "580.1", {"torch": "2.11.0", "vllm": "0.26.0"})
WON = {"N": 8192, "K": 8192, "M": [1, 256], "us": [1.0, 1.0], "vllm_us": [2.0, 2.0]}
OTHER = WON | {"N": 80, "K": 320}
TABLES = (verdict.tables, decode_tile.tables, lookup.tables)


@pytest.fixture(autouse=True)
def _fresh_tables() -> Iterator[None]:
    caches = (
        *TABLES,
        verdict._estimates,
        decode_tile.lookup,
        lookup.lookup,
        measured_here._document,
    )
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def _given(monkeypatch: pytest.MonkeyPatch, path: Path, **tables: list[dict[str, Any]]) -> Path:
    measured_here.write(path, Document(MACHINE, "a test", tables))
    monkeypatch.setenv(measured_here.VARIABLE, str(path))
    return path


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "verdicts.json"
    document = Document(MACHINE, "a test", {"w4a16_measured": [WON]})
    measured_here.write(path, document)
    assert measured_here.read(path) == document
    assert [entry.name for entry in path.parent.iterdir()] == ["verdicts.json"]


def test_this_machines_verdicts_come_before_what_is_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = WON | {"vllm_us": [0.5, 0.5]}
    shipped = len(verdict.tables()[H100].choices)
    assert (8192, 8192, WeightFormat.G128) in verdict.tables()[H200].choices
    assert verdict.why_not_preferred(H100, 80, 320) is not None
    verdict.tables.cache_clear()
    _given(monkeypatch, tmp_path / "v.json", w4a16_measured=[lost, OTHER])
    assert verdict.why_not_preferred(H100, 80, 320) is None
    reason = verdict.why_not_preferred(H100, 8192, 8192)
    assert reason is not None
    assert reason.startswith("slower than vLLM's kernels: 0.50 of their speed")
    assert len(verdict.tables()[H100].choices) >= shipped
    # The H200's are its own.
    assert verdict.why_not_preferred(H200, 8192, 8192) is None


def test_this_machines_tiles_are_added_to_those_of_its_twin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = decode_tile.lookup(H100, 8192, 8192, hopper=True)
    tile = decode_tile.ranked(3072, 3072)[1]
    fields = {name: getattr(tile, name) for name in tile.__slots__}
    row = {"N": 3072, "K": 3072, "max_m": 8, "tile": fields, "us": [3.0]}
    dense = {"N": 3072, "K": 3072, "max_m": 64, "kernel": "dense", "tile": None, "us": 9.0}
    for cached in (decode_tile.tables, decode_tile.lookup, lookup.tables, lookup.lookup):
        cached.cache_clear()
    _given(monkeypatch, tmp_path / "v.json", w4a16_decode=[row], w4a16_wgmma=[dense])
    assert decode_tile.lookup(H100, 3072, 3072, hopper=True) == tile
    assert decode_tile.lookup(H100, 8192, 8192, hopper=True) == known
    bucket = lookup.bucket_of(64)
    assert lookup.lookup(H100, 3072, 3072, bucket, hopper=True) == "dense"
    assert lookup.lookup(H200, 3072, 3072, bucket, hopper=True) != "dense"


def test_verdicts_are_part_of_what_compiled_graphs_are_known_by(tmp_path: Path) -> None:
    without, path = cache_key(), tmp_path / "v.json"
    document = Document(MACHINE, "a test", {"w4a16_measured": [WON]})
    measured_here.write(path, document)
    first = cache_key(path)
    assert first != without
    measured_here.write(path, replace(document, source="another day"))
    assert cache_key(path) == first
    measured_here.write(path, replace(document, tables={"w4a16_measured": [OTHER]}))
    assert cache_key(path) != first


GOOD = {
    "format": measured_here.FORMAT,
    "gpu": H100,
    "driver": "580.1",
    "versions": {},
    "source": "s",
    "tables": {"w4a16_measured": [WON]},
}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "no verdicts of format 3"),
        (json.dumps(GOOD | {"format": 1}), "no verdicts of format 3"),
        (json.dumps(GOOD | {"more": 1}), "no verdicts of format 3"),
        (json.dumps(GOOD | {"gpu": 3}), "a field is of the wrong type"),
        (json.dumps(GOOD | {"tables": []}), "a field is of the wrong type"),
        (json.dumps(GOOD | {"tables": {"w4a16_measured": 3}}), "a table is no list"),
        (json.dumps(GOOD | {"tables": {"w4a16_measured": [3]}}), "a row is no object"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "v.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        measured_here.read(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "'taut tune'" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"N": 8192}, "a row needs exactly"),
        (WON | {"us": [0.0, 1.0]}, "N=8192 K=8192: .*division by zero"),
        (WON | {"format": "g7"}, "format=g7 N=8192 K=8192: format must be one of"),
    ],
)
def test_a_damaged_row_is_refused_by_file_and_product(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    path = _given(monkeypatch, tmp_path / "v.json", w4a16_measured=[row])
    with pytest.raises(ValueError, match=said) as caught:
        verdict.tables()
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith("; measure again with 'taut tune'")


def test_a_tile_with_an_unknown_field_is_refused_by_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {"N": 64, "K": 512, "max_m": 8, "tile": {"rows": 1}, "us": [3.0]}
    path = _given(monkeypatch, tmp_path / "v.json", w4a16_decode=[row])
    with pytest.raises(ValueError, match=r"N=64 K=512 max_m=8: .* 'taut tune'") as caught:
        decode_tile.tables()
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (replace(MACHINE, gpu=H200), f"measured with card {H200}, here it is {H100}"),
        (replace(MACHINE, driver="1"), "measured with driver 1, here it is 580.1"),
        (replace(MACHINE, versions={"torch": "2.11.0"}), "with vllm none, here it is 0.26.0"),
        (MACHINE, None),
    ],
)
def test_another_machines_file_is_known(there: Machine, said: str | None) -> None:
    reason = measured_here.why_foreign(Document(there, "", {}), MACHINE)
    assert (reason is None) == (said is None)
    assert said is None or said in str(reason)


def test_a_name_is_another_for_another_machine_or_other_products() -> None:
    names = {
        machine.key(wanted)
        for machine in (MACHINE, replace(MACHINE, driver="1"), replace(MACHINE, versions={}))
        for wanted in ([[64, 256, "g128"]], [[64, 512, "g128"]])
    }
    assert len(names) == 6
    assert all(name.startswith("nvidia-h100-80gb-hbm3-") for name in names)
    assert MACHINE.key([1]) == MACHINE.key([1])


def test_where_there_is_no_card_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device to measure on"):
        measured_here.this_machine()


def test_the_driver_is_asked_of_its_own_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: H100)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="nvidia-smi does not tell the driver's version"):
        measured_here.this_machine()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.159.04\necho 580.159.04\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    machine = measured_here.this_machine()
    assert (machine.gpu, machine.driver) == (H100, "580.159.04")
    assert "torch" in machine.versions
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(ValueError, match="driver's version") as caught:
        measured_here.this_machine()
    assert isinstance(caught.value.__cause__, subprocess.CalledProcessError)
