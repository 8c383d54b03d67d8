"""The init job of the compose project, run here on a tiny model."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from taut_deploy.compress.calibrate.texts import BUILT_IN_TEXTS
from taut_deploy.errors import ModelError, RecipeError
from taut_service.config.settings import Settings

# importlib mode adds no test folder to the path.
sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))

from tiny_models import w8a8_data, write_calibration_text, write_llama, write_recipe

TEXT = b"All the world's a stage.\n"
COMPOSE = Path(__file__).parents[2] / "docker" / "compose"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compose_prepare", COMPOSE / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The job with its paths and its text in a folder of the test."""
    module = load()
    (tmp_path / "etc").mkdir()
    monkeypatch.setattr(module, "GATEWAY_FILE", tmp_path / "etc" / "gateway.yaml")
    monkeypatch.setattr(module, "GATEWAY_SETTINGS", COMPOSE / "gateway.yaml")
    monkeypatch.setattr(module, "ROLLOUT_SETTINGS", COMPOSE / "rollout.yaml")
    monkeypatch.setattr(module, "TEXT_SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setenv("TAUT_HOME", str(tmp_path / "home"))
    return module


def archive_with(name: str, text: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return data.getvalue()


@pytest.fixture
def package(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """Lets pip "download" an archive with this member, or fail."""

    def offer(name: str | None, text: bytes = b"") -> None:
        def run(command, **_):
            if name is None:
                return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no index")
            folder = Path(command[command.index("--dest") + 1])
            (folder / "brotli-1.2.1.tar.gz").write_bytes(archive_with(name, text))
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(prepare, "subprocess", SimpleNamespace(run=run))

    return offer


def test_job_leaves_all_that_gateway_and_workers_need(
    prepare, package, tmp_path, monkeypatch, capsys
):
    model = write_llama(tmp_path / "tiny", layers=1)
    text = write_calibration_text(tmp_path / "text.txt")
    monkeypatch.setenv("TAUT_MODEL", str(model))
    monkeypatch.setenv("TAUT_RECIPE", str(write_recipe(tmp_path / "r.yaml", w8a8_data(text))))
    monkeypatch.setenv("TAUT_MAX_MODEL_LEN", "64")
    package(f"brotli-1.2.1/{prepare.TEXT_MEMBER}", TEXT)

    prepare.prepare()
    prepare.prepare()

    home = tmp_path / "home"
    assert (home / "texts" / "validation.txt").read_bytes() == TEXT
    links = {path.name: path for path in (home / "serving").iterdir()}
    assert set(links) == {"compressed", "baseline"}
    assert all(not Path(path.readlink()).is_absolute() for path in links.values())
    assert (links["compressed"] / "taut.json").is_file()
    assert not (links["baseline"] / "taut.json").exists()
    assert (links["baseline"] / "config.json").is_file()

    written = yaml.safe_load(prepare.GATEWAY_FILE.read_text())
    settings = Settings.model_validate(written)
    assert (settings.listen.host, settings.listen.port) == ("0.0.0.0", 8000)
    assert settings.drain_timeout_s == 30
    compressed, baseline = written["models"]
    assert baseline["name"] == f"{compressed['name']}-baseline"
    assert compressed["max_model_len"] == baseline["max_model_len"] == 64
    assert compressed["golden"]["expected_text"]
    assert compressed["provenance"]["method"] == "W8A8"
    hosts = [entry["variants"][0]["discover"]["dns"]["host"] for entry in (compressed, baseline)]
    assert hosts == ["worker", "worker-baseline"]
    assert baseline["variants"][0]["served_name"] == prepare.BASELINE_NAME
    monkeypatch.setenv("TAUT_ROLLOUT", "yes")
    prepare.prepare()
    check_rollout(yaml.safe_load(prepare.GATEWAY_FILE.read_text()), compressed, prepare)
    said = capsys.readouterr().out
    assert (said.count("compressing into"), said.count("reusing")) == (1, 2)
    assert said.count("fetching the validation text") == 1


def check_rollout(written, compressed, prepare):
    """One model, the baseline serving, both golden prompts where they belong."""
    settings = Settings.model_validate(written)
    (model,) = settings.models
    assert (model.name, model.baseline) == (compressed["name"], "baseline")
    assert [(v.name, v.weight) for v in model.variants] == [("baseline", 1), ("w8a8", 0)]
    baseline, candidate = model.every_variant()
    assert [v.discover.dns.host for v in (baseline, candidate)] == ["worker-baseline", "worker"]
    assert baseline.served_name == prepare.BASELINE_NAME and baseline.golden is None
    assert candidate.served_name == model.name
    assert candidate.golden.expected_text == compressed["golden"]["expected_text"]
    assert candidate.provenance["method"] == "W8A8" and baseline.provenance["method"] == "none"
    assert settings.guard is not None and settings.rollout is not None
    services = yaml.safe_load((COMPOSE.parent / "compose.yaml").read_text())["services"]
    assert f"rollout:{settings.rollout.directory}" in services["gateway"]["volumes"]


def test_baseline_is_asked_for_by_the_name_its_worker_gives_it(prepare):
    services = yaml.safe_load((COMPOSE.parent / "compose.yaml").read_text())["services"]
    for worker in ("worker-baseline", "worker-baseline-gpu"):
        assert f" --name {prepare.BASELINE_NAME} " in services[worker]["command"]


def test_link_is_replaced_when_another_recipe_is_served(prepare, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        prepare.link("compressed", tmp_path / name, tmp_path / "serving")
    assert (tmp_path / "serving" / "compressed").resolve() == tmp_path / "two"
    assert [path.name for path in (tmp_path / "serving").iterdir()] == ["compressed"]


def test_text_is_not_part_of_the_calibration_corpus():
    module = load()
    assert BUILT_IN_TEXTS["corpus"].package == module.TEXT_PACKAGE
    for text in BUILT_IN_TEXTS.values():
        assert module.TEXT_MEMBER not in text.members


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (None, b"", "ERROR: no index"),
        ("brotli-1.2.1/other.txt", b"", "holds no brotli-1.2.1/tests/testdata"),
        ("brotli-1.2.1/tests/testdata/asyoulik.txt", b"altered", "has sha256"),
    ],
)
def test_text_that_cannot_be_had_is_named_in_one_line(
    prepare, package, tmp_path, name, text, message
):
    package(name, text)
    with pytest.raises(ModelError, match=message) as refused:
        prepare.fetch_text(tmp_path / "validation.txt")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "validation.txt").exists()


WRONG_SECTIONS = {
    ("GATEWAY", "gateway"): {
        "models: []": "models: compose makes this section itself",
        "listen: {port: 1}": "listen: compose makes this section itself",
        "- a": "expected a mapping",
        "a: [": "not valid YAML",
    },
    ("ROLLOUT", "rollout"): {
        "models: []": "models: expected the sections guard and rollout only",
        "guard: 1": "guard: expected a mapping",
        "rollout: {store: redis}": "rollout.store: compose keeps the journal in a volume",
        "- a": "expected a mapping",
    },
}


@pytest.mark.parametrize(
    ("file", "reader", "content", "message"),
    [
        (file, reader, content, message)
        for (file, reader), cases in WRONG_SECTIONS.items()
        for content, message in cases.items()
    ],
)
def test_wrong_sections_are_named_in_one_line(
    prepare, tmp_path, monkeypatch, file, reader, content, message
):
    (tmp_path / "mine.yaml").write_text(content)
    monkeypatch.setattr(prepare, f"{file}_SETTINGS", tmp_path / "mine.yaml")
    with pytest.raises(RecipeError, match=f"TAUT_{file}_CONFIG: {message}") as refused:
        getattr(prepare, f"{reader}_sections")()
    assert "\n" not in str(refused.value)


def test_place_of_the_api_keys_is_passed_on(prepare, monkeypatch):
    assert "api_keys_file" not in prepare.gateway_sections()
    monkeypatch.setenv("TAUT_API_KEYS_PATH", "/run/secrets/api-keys.yaml")
    assert prepare.gateway_sections()["api_keys_file"] == "/run/secrets/api-keys.yaml"


def test_checkpoint_without_a_baseline_is_refused(prepare, monkeypatch):
    monkeypatch.setattr(prepare, "prepare_models", lambda *_: [object()])
    monkeypatch.setenv("TAUT_MODEL", "somewhere")
    with pytest.raises(RecipeError, match="TAUT_MODEL somewhere: a checkpoint has no baseline"):
        prepare.prepare()
