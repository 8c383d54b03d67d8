"""``docs/examples/``: its audit log verifies, all is shown, and it can be made again."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from taut_deploy.bench.rollout_page import photograph

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def load_maker() -> ModuleType:
    file = ROOT / "docs" / "make_examples.py"
    spec = importlib.util.spec_from_file_location("make_examples", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_maker()


def verify(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "taut_service", "verify-audit", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_audit_log_verifies_and_a_changed_one_does_not(tmp_path: Path) -> None:
    file = EXAMPLES / "rollout" / "audit.jsonl"
    told = json.loads((file.parent / "report.json").read_text())
    done = verify(file)
    assert done.returncode == 0, done.stderr
    assert told["audit"]["head"] in done.stdout
    lines = file.read_text().splitlines()
    assert len(lines) == told["audit"]["lines"] >= 4
    events = [json.loads(line)["event"] for line in lines]
    assert events.count("rolled_back") == 1 and events[-1] == "completed"
    changed = tmp_path / "audit.jsonl"
    changed.write_text(file.read_text().replace("rolled_back", "complete", 1))
    assert verify(changed).returncode == 1


@pytest.mark.parametrize(
    "example", sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
)
def test_an_example_is_small_shown_and_names_no_machine(example: str) -> None:
    folder = EXAMPLES / example
    maker.check_size(folder)
    page = (EXAMPLES / "README.md").read_text()
    for file in folder.iterdir():
        assert f"({example}/{file.name})" in page
        if file.suffix != ".png":
            text = file.read_text()
            assert not any(place in text for place in ("/root", "/home/", "/work/", "/tmp/"))


def test_the_page_of_the_validation_opens_by_itself_and_says_what_the_json_says() -> None:
    folder = EXAMPLES / "validation"
    page = (folder / "report.html").read_text()
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] in page.split("</h1>")[0]
    assert report["text"]["sha256"][:12] in page
    assert "<script" not in page and "<link" not in page


def a_run(folder: Path) -> Path:
    (folder / "rollout").mkdir(parents=True)
    (folder / "report.md").write_text(f"model {Path.home()}/models/m at {folder}/out\n")
    (folder / "report.json").write_text("{}")
    (folder / "rollout" / "audit.jsonl").write_text("{}\n")
    Image.effect_noise((300, 200), 60).save(folder / "ui-candidate.png")
    return folder


def test_an_example_is_what_a_run_left_without_the_home_folder(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    maker.write_rollout(run, tmp_path / "example")
    assert (tmp_path / "example" / "report.md").read_text() == "model ~/models/m at run/out\n"
    names = {file.name for file in (tmp_path / "example").iterdir()}
    assert names == {"report.md", "report.json", "audit.jsonl", "ui-candidate.png"}
    before, after = (f / "ui-candidate.png" for f in (run, tmp_path / "example"))
    assert after.stat().st_size < before.stat().st_size


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda run: (run / "report.json").unlink(), "report.json: no such file; is "),
        (lambda run: (run / "ui-candidate.png").unlink(), "no ui-*.png"),
        (
            lambda run: (run / "rollout" / "audit.jsonl").write_text(str(Path.home())),
            "its hashes allow no change",
        ),
        (lambda run: (run / "report.md").write_text("x" * 300_001), "more than 300000"),
    ],
)
def test_what_is_no_example_is_refused(spoil: object, text: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    assert callable(spoil)
    spoil(run)
    with pytest.raises(maker.ExampleError) as caught:
        maker.write_rollout(run, tmp_path / "example")
    assert text in str(caught.value)


def test_a_page_is_photographed_in_both_schemes(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    style = "@media (prefers-color-scheme: dark) { body { background: #000000 } }"
    page.write_text(f"<meta name=color-scheme content='light dark'><style>{style}</style>")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no Chromium: apt-get install chromium")
    for scheme, pixel in (("dark", (0, 0, 0)), ("light", (255, 255, 255))):
        file = tmp_path / f"{scheme}.png"
        assert photograph(page.as_uri(), file, print, scheme=scheme, size=(300, 200))
        with Image.open(file) as image:
            assert image.size == (300, 200)
            assert image.convert("RGB").getpixel((150, 100)) == pixel
