"""The report of a compression: what it says, and what may differ between equal runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from validate_setup import MODULES

from taut_deploy.checkpoint import Manifest, verify
from taut_deploy.compress import driver


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/``, ``text.txt`` and its checkpoint ``out/``, whose ``down_proj`` stay dense."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model")
    write_calibration_text(path / "text.txt")
    driver.compress(job_for(path / "model", data(path), path / "out"))
    return path


def data(room: Path):
    return recipe_data(room / "text.txt", symmetric=False) | {"ignore": ["*.down_proj"]}


@pytest.fixture
def manifest(room) -> Manifest:
    return verify(room / "out")


def rows_of(markdown: str, heading: str) -> list[list[str]]:
    section = markdown.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_every_layer_is_there_with_its_error_and_its_size_on_disk(room, manifest):
    rows = {row[0]: row for row in rows_of((room / "out" / "report.md").read_text(), "Layers")}
    assert list(rows) == [layer["name"] for layer in manifest.layers]
    stored: dict[str, int] = dict.fromkeys(rows, 0)
    for shard in (room / "out").glob("*.safetensors"):
        with safe_open(shard, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a dict
                owner = name.rpartition(".")[0]
                if owner in stored:
                    stored[owner] += handle.get_tensor(name).nbytes
    for layer in manifest.layers:
        row = rows[layer["name"]]
        assert row[1:4] == ["gptq", "W4A16 g32, zero points", f"{layer['relative_error']:.3e}"]
        assert row[6] == f"{stored[layer['name']] / 1e6:.3f}"
    # q_proj of the model: 64 x 64 weights of four bytes.
    assert rows["model.layers.0.self_attn.q_proj"][5] == "0.016"


def test_the_worst_layers_are_named_first(room, manifest):
    worst = rows_of((room / "out" / "report.md").read_text(), "Worst layers")
    errors = sorted((layer["relative_error"] for layer in manifest.layers), reverse=True)[:10]
    assert [row[2] for row in worst] == [f"{error:.3e}" for error in errors]
    named = {layer["name"]: layer["relative_error"] for layer in manifest.layers}
    assert named[worst[0][0]] == errors[0]


def test_what_stays_dense_is_named_with_the_reason(room):
    text = (room / "out" / "report.md").read_text()
    kept = text.split("\n## Kept dense\n")[1].strip().splitlines()
    assert kept == [f"- `model.layers.{i}.mlp.down_proj`: ignored by the recipe" for i in range(2)]


def test_equal_runs_differ_in_the_page_alone(room, tmp_path):
    driver.compress(job_for(room / "model", data(room), tmp_path / "again"))
    assert verify(tmp_path / "again").digest == verify(room / "out").digest
    again, first = (tmp_path / "again" / "report.md", room / "out" / "report.md")
    assert again.read_text() == first.read_text()
    assert "report.md" in verify(room / "out").files
    assert "report.html" not in verify(room / "out").files


class Page(HTMLParser):
    """Collects what a page would load or run, and its table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs):
        names = {name for name, _ in attrs}
        if tag in ("script", "link", "img", "iframe") or names & {"src", "href", "onclick"}:
            self.loaded.append(tag)

    def handle_data(self, data):
        self.cells.append(data.strip())


def test_the_page_has_the_times_and_loads_nothing(room, manifest):
    text = (room / "out" / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.loaded == []
    log = json.loads((room / "out" / "compression_log.json").read_text())
    seconds = list(log["seconds_by_block"].values())
    assert len(seconds) == 2
    assert all(f"{value:.1f}" in page.cells for value in seconds)
    names = {f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp")}
    shown = {cell for cell in page.cells if cell.rpartition(".")[2] in MODULES}
    assert {name.rpartition(".")[0] for name in shown} == names
    assert shown == {layer["name"] for layer in manifest.layers}


def test_a_name_with_markup_in_it_is_text_on_the_page(room, tmp_path):
    model = write_llama(tmp_path / "<b onclick=alert(1)>")
    driver.compress(job_for(model, data(room), tmp_path / "out"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"<b\b", page)
    assert "&lt;b onclick" in page
