"""What ``taut serve`` can be told, and what it makes of it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys

import pytest
from tiny_models import w8a8_data, write_calibration_text, write_llama, write_recipe

from taut_deploy.checkpoint import read_manifest
from taut_deploy.errors import RecipeError, WorkerError
from taut_deploy.home import TautHome
from taut_deploy.serve import ServeSettings, load_serve_settings
from taut_deploy.serve.checks import check_settings
from taut_deploy.serve.prepare import gateway_configuration, prepare_models, require_free_port
from taut_deploy.serve.supervise import (
    SharedMachine,
    curl_line,
    gateway_child,
    shared_machine,
    worker_child,
)
from taut_deploy.worker import cpu_layout

WRONG = {
    "unknown key": ("prot: 1", "prot: unknown key"),
    "port": ("port: 70000", "port: "),
    "port as word": ("port: eight", "port: "),
    "no workers": ("workers: 0", "workers: "),
    "kernels": ("kernels: fast", "kernels: "),
    "switch": ("fused_ops: perhaps", "fused_ops: "),
    "list": ("- a", "expected a mapping"),
    "not yaml": ("model: [", "not valid YAML"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_the_key_at_fault_is_named(mistake, tmp_path):
    text, message = WRONG[mistake]
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(RecipeError, match=rf"serve\.yaml: {message}") as refused:
        load_serve_settings(tmp_path / "serve.yaml", {})
    assert "\n" not in str(refused.value)


GATEWAYS = {
    "key": ({"admission": {"max_inflght": 3}}, r"admission\.max_inflght: "),
    "value": ({"cors": {"origins": ["x"]}}, r"cors: 'x' is not of the form"),
    "file": ({"api_keys_file": "/nowhere/keys"}, "/nowhere/keys"),
}


@pytest.mark.parametrize("mistake", GATEWAYS)
def test_what_the_gateway_would_refuse_is_refused_before_anything_is_fetched(mistake):
    gateway, message = GATEWAYS[mistake]
    with pytest.raises(RecipeError, match=f"taut serve: gateway: .*{message}") as refused:
        check_settings(ServeSettings(gateway=gateway))
    assert "\n" not in str(refused.value)


def test_what_the_gateway_takes_passes():
    check_settings(ServeSettings(gateway={"cors": {"origins": ["https://chat.example"]}}))


def test_a_missing_file_and_a_wrong_option_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml: cannot be read"):
        load_serve_settings(tmp_path / "none.yaml", {})
    with pytest.raises(RecipeError, match="taut serve: workers"):
        load_serve_settings(None, {"workers": 0})


def test_the_command_line_wins_over_the_file(tmp_path):
    (tmp_path / "s.yaml").write_text("port: 9000\nmodel: a\nbaseline: true\n")
    settings = load_serve_settings(tmp_path / "s.yaml", {"model": "b", "port": None})
    assert (settings.model, settings.port, settings.baseline) == ("b", 9000, True)
    assert load_serve_settings(None, {}) == ServeSettings()


def test_a_bare_off_is_not_read_as_false(tmp_path):
    (tmp_path / "s.yaml").write_text("kernels: off\nfused_ops: off\n")
    settings = load_serve_settings(tmp_path / "s.yaml", {})
    assert (settings.kernels, settings.fused_ops) == ("off", False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A compressed tiny model beside its baseline, prepared twice."""
    path = tmp_path_factory.mktemp("serve")
    model = write_llama(path / "tiny", layers=1)
    text = write_calibration_text(path / "text.txt")
    recipe = write_recipe(path / "r.yaml", w8a8_data(text))
    settings = ServeSettings(model=str(model), recipe=str(recipe), baseline=True, workers=2)
    home, said = TautHome(path / "home"), []
    runs = [prepare_models(settings, home, said.append, lambda *_: None) for _ in range(2)]
    return settings, home, said, runs


def test_a_second_start_reuses_what_exists(prepared):
    _, home, said, (first, second) = prepared
    assert [m.directory for m in first] == [m.directory for m in second]
    assert [line.split()[0] for line in said] == ["fetching", "compressing", "fetching", "reusing"]
    assert len([p for p in home.checkpoints.iterdir() if p.is_dir()]) == 1


def test_a_second_start_imports_nothing_that_computes(prepared):
    """Which takes six CPU seconds, and memory for as long as it serves."""
    settings, home, _, ((compressed, _), *_) = prepared
    code = f"""
import sys
from pathlib import Path
from taut_deploy.home import TautHome
from taut_deploy.serve import ServeSettings, detach
from taut_deploy.serve.prepare import prepare_models
settings = ServeSettings(model={settings.model!r}, recipe={settings.recipe!r}, baseline=True)
found = prepare_models(settings, TautHome(Path({str(home.root)!r})), print, print)
print(found[0].directory, *sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.splitlines()[-1] == str(compressed.directory), done.stdout + done.stderr


@pytest.mark.parametrize("left", ["another text", "a state"])
def test_what_a_manifest_cannot_tell_is_left_to_compression(prepared, monkeypatch, left):
    settings, home, _, ((compressed, _), *_) = prepared
    asked = []
    monkeypatch.setattr(
        "taut_deploy.compress.pipeline.compress", lambda job, _: asked.append(job.output)
    )
    prepare_models(settings, home, lambda _: None, lambda *_: None)
    assert asked == []
    if left == "a state":
        state = compressed.directory / ".state"
        state.mkdir()
        prepare_models(settings, home, lambda _: None, lambda *_: None)
        state.rmdir()
    else:
        monkeypatch.setattr("taut_deploy.serve.prepare.describe_text", lambda _: "other text")
        prepare_models(settings, home, lambda _: None, lambda *_: None)
    assert asked == [compressed.directory]


def test_a_checkpoint_is_served_as_it_is(prepared):
    _, home, _, (models, _) = prepared
    settings = ServeSettings(model=str(models[0].directory))
    (served,) = prepare_models(settings, home, lambda _: None, lambda *_: None)
    assert served.directory == models[0].directory
    assert served.manifest == models[0].manifest


def test_the_gateway_is_told_what_it_serves(prepared):
    settings, _, _, (models, _) = prepared
    settings = settings.model_copy(update={"gateway": {"admission": {"max_inflight": 3}}})
    configuration = gateway_configuration(settings, models)
    assert configuration["listen"] == {"host": "127.0.0.1", "port": 8000}
    assert configuration["admission"] == {"max_inflight": 3}
    compressed, baseline = configuration["models"]
    manifest = read_manifest(models[0].directory)
    assert compressed["name"] == "tiny"
    assert compressed["golden"] == {
        "prompt": manifest.golden.prompt,
        "expected_text": manifest.golden.expected_text,
    }
    assert compressed["max_model_len"] == 128
    assert compressed["provenance"]["method"] == "W8A8"
    assert compressed["provenance"]["size_bytes"] == manifest.bytes
    assert compressed["provenance"]["recipe_hash"] == manifest.recipe_hash
    assert baseline["name"] == "tiny-baseline"
    assert baseline["provenance"] == {"method": "none", "bits": 16}
    urls = [w["url"] for model in configuration["models"] for w in model["workers"]]
    assert len(set(urls)) == 4
    assert all(url.startswith("http://127.0.0.1:") for url in urls)


def test_the_gateway_accepts_the_configuration(prepared, tmp_path):
    """The seam itself: the service room's own loader reads what we write."""
    import yaml

    from taut_service.config.settings import load_settings

    settings, _, _, (models, _) = prepared
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(gateway_configuration(settings, models), sort_keys=False))
    assert [model.name for model in load_settings(path).models] == ["tiny", "tiny-baseline"]


def test_a_verdict_reaches_the_gateway(prepared):
    settings, _, _, (models, _) = prepared
    judged = dataclasses.replace(models[0].manifest, validation={"verdict": "PASS"})
    models = [dataclasses.replace(models[0], manifest=judged)]
    (entry,) = gateway_configuration(settings, models)["models"]
    assert entry["provenance"]["validation"] == "PASS"
    assert "recovery" not in entry["provenance"]


def test_what_was_measured_reaches_the_gateway_with_its_interval(prepared):
    settings, _, _, (models, _) = prepared
    measured = {
        "perplexity_ratio": {"estimate": 1.25, "low": 1.0, "high": 2.0},
        "top1_agreement": {"estimate": 0.9, "low": 0.85, "high": 0.95},
    }
    validation = {"verdict": "FAIL", "policy": "balanced", "metrics": measured}
    judged = dataclasses.replace(models[0].manifest, validation=validation)
    models = [dataclasses.replace(models[0], manifest=judged)]
    (entry,) = gateway_configuration(settings, models)["models"]
    told = entry["provenance"]
    assert (told["recovery"], told["recovery_low"], told["recovery_high"]) == (0.8, 0.5, 1.0)
    assert (told["top1_agreement_low"], told["top1_agreement_high"]) == (0.85, 0.95)
    assert (told["validation"], told["validation_policy"]) == ("FAIL", "balanced")
    assert told["sparsity"] == 0
    assert told["compressed_layers"] == len(models[0].manifest.layers)


def test_children_are_started_through_the_public_commands(prepared, tmp_path):
    settings, _, _, (models, _) = prepared
    settings = settings.model_copy(
        update={"max_model_len": 64, "vllm_args": ("--enforce-eager",), "kv_cache_dtype": "fp8"}
    )
    child = worker_child(models[0], 1, settings, tmp_path)
    assert child.argv[1:5] == ("-m", "taut_deploy", "worker", str(models[0].directory))
    assert child.argv[child.argv.index("--port") + 1] == str(models[0].ports[1])
    assert child.argv[child.argv.index("--kv-cache-dtype") + 1] == "fp8"
    assert child.argv[-2:] == ("--", "--enforce-eager")
    assert not {"--kernels", "--fused-ops", "--no-fused-ops"} & set(child.argv), "left open"
    assert (child.name, child.log) == ("tiny-1", tmp_path / "tiny-1.log")
    gateway = gateway_child(tmp_path / "g.yaml", tmp_path)
    assert gateway.argv[1:] == ("-m", "taut_service", "--config", str(tmp_path / "g.yaml"))
    assert gateway.grace_s < child.grace_s, "workers outlive the gateway's drain"


def test_kernels_and_fused_ops_reach_the_workers_of_the_compressed_model(prepared, tmp_path):
    settings, _, _, (models, _) = prepared
    said = {"kernels": "require", "fused_ops": False, "decode_attention": True}
    settings = settings.model_copy(update=said)
    compressed, baseline = (worker_child(model, 0, settings, tmp_path).argv for model in models)
    assert compressed[compressed.index("--kernels") + 1] == "require"
    assert {"--no-fused-ops", "--decode-attention"} <= set(compressed) & set(baseline)
    assert "--kernels" not in baseline, "it has no layers of taut's to require"
    stock = settings.model_copy(update={"kernels": "off"})
    for model in models:
        argv = worker_child(model, 0, stock, tmp_path).argv
        assert argv[argv.index("--kernels") + 1] == "off"


def test_the_workers_of_one_command_divide_the_cores(prepared, tmp_path, monkeypatch):
    """Two models with two workers each on 16 cores, one of which is left to the rest."""
    settings, _, _, (models, _) = prepared
    monkeypatch.setattr(cpu_layout, "cores_here", lambda: cpu_layout.Cores(16, 1))
    machine = shared_machine(settings, 4, tmp_path / "compiled", {})
    for index, model in ((0, models[0]), (1, models[1])):
        child = worker_child(model, index, settings, tmp_path, machine)
        assert child.environment["OMP_NUM_THREADS"] == "3"
        assert child.argv[child.argv.index("--cache") + 1] == str(tmp_path / "compiled")
    chosen = {"OMP_NUM_THREADS": "9", "TAUT_COMPILE_CACHE": str(tmp_path)}
    machine = shared_machine(settings, 4, tmp_path / "compiled", chosen)
    child = worker_child(models[0], 0, settings, tmp_path, machine)
    assert "OMP_NUM_THREADS" not in child.environment and "--cache" not in child.argv, "inherited"
    monkeypatch.setattr("taut_deploy.serve.supervise.installed_platform", lambda: "cuda")
    assert shared_machine(settings, 4, tmp_path / "compiled", {}) == SharedMachine()


def test_the_curl_line_survives_a_shell():
    words = shlex.split(curl_line(ServeSettings(port=8123), "it's a model"))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8123/v1/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "it's a model"


def test_a_port_in_use_is_refused_with_the_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WorkerError, match=rf"127\.0\.0\.1:{port}: cannot listen.*--port"):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "::1::"])
def test_an_address_that_is_none_is_refused(host):
    with pytest.raises(WorkerError, match="cannot listen"):
        require_free_port(host, 8000)
