"""The key of compiled artefacts: what changes it, what does not, and what it never holds."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path

import pytest
from tiny_manifest import tiny_manifest

from taut_deploy import cli
from taut_deploy.cache import cache_key_of, key
from taut_deploy.cache.warm import key_for
from taut_deploy.checkpoint import seal
from taut_deploy.errors import ModelError, WorkerError
from taut_deploy.worker import WorkerSpec

pytestmark = pytest.mark.usefixtures("fixed_kernels")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 128,
    "model_type": "llama",
}


def write_model(path: Path, **changes: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "m")


def of(spec: WorkerSpec, monkeypatch, **environment: str) -> str:
    with monkeypatch.context() as changed:
        for name, value in environment.items():
            changed.setenv(name, value)
        return str(key_for(spec))


def test_key_names_the_platform_and_is_the_same_again(model, monkeypatch):
    first = of(WorkerSpec(model), monkeypatch)
    assert first == of(WorkerSpec(model), monkeypatch)
    kind, _, digits = first.partition("-")
    assert kind == "cpu"
    assert len(bytes.fromhex(digits)) == 8


SAME = {
    "host": ({"host": "0.0.0.0"}, {}),
    "port": ({"port": 9}, {}),
    "name": ({"name": "other"}, {}),
    "drain": ({"shutdown_timeout_s": 1}, {}),
    "KV memory": ({"kv_cache_gib": 7}, {}),
    "the volume itself": ({"cache": Path("/c")}, {}),
    "api key": ({"extra": ("--api-key", "s3cret")}, {}),
    "api key in one word": ({"extra": ("--api-key=s3cret",)}, {}),
    "several api keys": ({"extra": ("--api-key", "s3cret", "s4cret")}, {}),
    "api key by a beginning": ({"extra": ("--api-k", "s3cret")}, {}),
    "node of a group": (
        {"extra": ("--node-rank", "1", "--master_addr", "a.b", "--headless")},
        {},
    ),
    "where caches are": ({}, {"VLLM_CACHE_ROOT": "/x", "TRITON_CACHE_DIR": "/y"}),
    "logging": ({}, {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_LOG_STATS_INTERVAL": "1"}),
    "secret": ({}, {"VLLM_API_KEY": "s3cret"}),
    "address": ({}, {"VLLM_HOST_IP": "10.0.0.1", "VLLM_PORT": "7"}),
    "KV memory by variable": ({}, {"VLLM_CPU_KVCACHE_SPACE": "9"}),
    "somebody else's": ({}, {"SOME_SETTING": "1"}),
}


@pytest.mark.parametrize("what", SAME)
def test_key_ignores_what_changes_no_compiled_code(what, model, monkeypatch):
    spec, environment = SAME[what]
    before = of(WorkerSpec(model), monkeypatch)
    assert of(WorkerSpec(model, **spec), monkeypatch, **environment) == before


OTHER = {
    "context": ({"max_model_len": 64}, {}),
    "KV dtype": ({"kv_cache_dtype": "fp8"}, {}),
    "mode of our kernels": ({"kernels": "off"}, {}),
    "vLLM argument": ({"extra": ("--max-num-seqs", "4")}, {}),
    "vLLM switch": ({"extra": ("--enforce-eager",)}, {}),
    "vLLM variable": ({}, {"VLLM_USE_AOT_COMPILE": "0"}),
    "Inductor variable": ({}, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    "Triton variable": ({}, {"TRITON_DEBUG": "1"}),
    "threads": ({}, {"OMP_NUM_THREADS": "64"}),
}


@pytest.mark.parametrize("what", OTHER)
def test_key_changes_with_what_changes_compiled_code(what, model, monkeypatch):
    spec, environment = OTHER[what]
    before = of(WorkerSpec(model), monkeypatch)
    assert of(WorkerSpec(model, **spec), monkeypatch, **environment) != before


def test_key_changes_with_shapes_quantisation_and_path(model, tmp_path, monkeypatch):
    before = of(WorkerSpec(model), monkeypatch)
    moved = write_model(tmp_path / "n")
    assert of(WorkerSpec(moved), monkeypatch) != before, "vLLM hashes the path"
    (model / "model.safetensors").write_bytes(b"other weights")
    assert of(WorkerSpec(model), monkeypatch) == before, "weights are no code"
    for change in ({"hidden_size": 32}, {"quantization_config": {"quant_method": "x"}}):
        write_model(model, **change)
        assert of(WorkerSpec(model), monkeypatch) != before


def test_key_changes_with_versions_device_and_kernels(model, monkeypatch):
    before = of(WorkerSpec(model), monkeypatch)
    version = importlib.metadata.version
    for name in ("taut", "torch", "triton", "vllm-cpu"):
        with monkeypatch.context() as changed:
            changed.setattr(
                importlib.metadata,
                "version",
                lambda asked, name=name: "9.9" if asked == name else version(asked),
            )
            assert of(WorkerSpec(model), monkeypatch) != before, name
    with monkeypatch.context() as changed:
        changed.setattr(platform, "python_version", lambda: "3.99.0")
        assert of(WorkerSpec(model), monkeypatch) != before
    with monkeypatch.context() as changed:
        changed.setattr("taut_kernels.vllm_plugin.cache_key", lambda _=None: "prefer-1")
        assert of(WorkerSpec(model), monkeypatch) != before
    assert of(WorkerSpec(model), monkeypatch) == before


def test_key_tells_cpus_apart_by_their_instructions(model, tmp_path, monkeypatch):
    facts = tmp_path / "cpuinfo"
    monkeypatch.setattr(key, "_CPU_FACTS", facts)
    found = []
    for text in (
        "model name : A\nflags : avx2\ncpu MHz : 1\n",
        "model name : A\nflags : avx2\ncpu MHz : 2\n",
        "model name : A\nflags : avx2 avx512f\ncpu MHz : 1\n",
        "model name : B\nflags : avx2\ncpu MHz : 1\n",
    ):
        facts.write_text(text)
        found.append(of(WorkerSpec(model), monkeypatch))
    assert found[0] == found[1], "the clock is no instruction"
    assert len(set(found)) == 3
    facts.unlink()
    assert of(WorkerSpec(model), monkeypatch) not in found


def test_key_counts_cpus_where_vllm_chooses_the_threads(model, monkeypatch):
    """Of several ranks: ``taut worker`` sets no number of threads then."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = []
    for cpus in ({0, 1}, {0, 1, 2, 3}, {4, 5}):
        monkeypatch.setattr(key.os, "sched_getaffinity", lambda _, cpus=cpus: cpus)
        found.append(cache_key_of(model, "cpu", ["python", "-m", "vllm", "-tp", "2"], {}))
    assert str(found[0]) == str(found[2]) != str(found[1])


def test_key_of_a_gpu_names_it(model, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        found.append(cache_key_of(model, "cuda", ["python", "-m", "vllm"], {}))
    assert str(found[0]).startswith("cuda-")
    assert found[0].device.startswith("NVIDIA H200, sm_90, ")
    assert str(found[0]) != str(found[1])


def test_vllm_for_gpus_without_a_gpu_is_one_line(model):
    with pytest.raises(WorkerError, match="no CUDA device here"):
        cache_key_of(model, "cuda", ["python", "-m", "vllm"], {})


def test_no_secret_is_among_the_parts(model, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    extra = ("--api-key", "s3cret", "a-s3cret", "--api_key=s3cret", "s3cret", "--max-num-seqs", "4")
    parts = key_for(WorkerSpec(model, extra=extra))
    assert "s3cret" not in repr(parts)
    assert parts.arguments[-2:] == ("--max-num-seqs", "4")


def test_a_checkpoint_decides_its_own_context(model, monkeypatch):
    before = of(WorkerSpec(model), monkeypatch)
    seal(model, tiny_manifest())
    assert of(WorkerSpec(model), monkeypatch) == of(
        WorkerSpec(model, max_model_len=64), monkeypatch
    )
    assert of(WorkerSpec(model), monkeypatch) != before


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        cache_key_of(tmp_path, "cpu", ["python"], {})


def test_the_command_prints_the_key_or_what_is_in_it(model, monkeypatch, capsys):
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["taut", "cache", "key", str(model), *words])
        return cli.main(), capsys.readouterr().out

    code, line = run("--", "--max-num-seqs", "4")
    assert (code, line.count("\n")) == (0, 1)
    code, text = run("--json", "--", "--max-num-seqs", "4")
    document = json.loads(text)
    assert (code, document["key"]) == (0, line.strip())
    assert document["parts"]["arguments"][-2:] == ["--max-num-seqs", "4"]
    assert set(document["parts"]["software"]) >= {"taut", "torch", "triton", "python"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kernels", "some"), "--kernels some: use require, prefer or off"),
        (("--", "--port", "1"), "--port: not passed on to vLLM"),
        (("--kv-cache-dtype", "turbo"), "--kv-cache-dtype turbo: not implemented on cpu"),
    ],
)
def test_a_mistake_is_one_line(words, message, model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["taut", "cache", "key", str(model), *words])
    assert cli.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
