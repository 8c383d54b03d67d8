"""``taut plan``: arithmetic against hand-counted models, and every way it can be asked wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from taut_deploy import cli
from taut_deploy.errors import WorkerError
from taut_deploy.sizing import GIB, Demand, kv_bytes_per_token, plan

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
FP8_CACHE = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
SMOLLM = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


def model(folder: Path, config: dict[str, Any], weights_bytes: int = 1000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(weights_bytes)  # sparse: its size is all that counts
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("config", "dtype", "parallel", "expected"),
    [
        (SMOLLM, "auto", 1, 23_040),
        (SMOLLM, "fp8", 1, 11_520),
        (SMOLLM | FP8_CACHE, "auto", 1, 11_520),
        (SMOLLM | FP8_CACHE, "bfloat16", 1, 23_040),
        (LLAMA_8B, "auto", 1, 131_072),
        (LLAMA_8B, "auto", 4, 32_768),
        (LLAMA_8B, "auto", 16, 16_384),  # a device holds one head at least
        (SMOLLM, "auto", 2, 15_360),  # two heads of three
        (LLAMA_8B | {"head_dim": 64}, "auto", 1, 65_536),
        ({"text_config": LLAMA_8B}, "auto", 1, 131_072),
        ({k: v for k, v in LLAMA_8B.items() if k != "num_key_value_heads"}, "auto", 1, 524_288),
    ],
)
def test_bytes_of_a_token(
    tmp_path: Path, config: dict[str, Any], dtype: str, parallel: int, expected: int
) -> None:
    assert kv_bytes_per_token(model(tmp_path, config), dtype, parallel) == expected


def test_plan_counted_by_hand(tmp_path: Path) -> None:
    directory = model(tmp_path, LLAMA_8B, weights_bytes=6 * GIB)
    found = plan("m", directory, Demand(24, 2, 1000, 24, workers=3))
    assert found.weights_bytes == 6 * GIB
    assert found.kv_bytes == 16 * GIB
    assert found.kv_tokens == 131_072
    assert found.requests == 128
    assert (found.max_inflight, found.max_inflight_tokens) == (384, 393_216)


def test_devices_share_the_weights(tmp_path: Path) -> None:
    directory = model(tmp_path, LLAMA_8B, weights_bytes=6 * GIB)
    found = plan("m", directory, Demand(6, 1, 1000, 24, tensor_parallel=2))
    assert found.weights_bytes == 3 * GIB
    assert found.kv_tokens == 2 * GIB // 65_536


def test_tokens_come_in_whole_blocks(tmp_path: Path) -> None:
    directory = model(tmp_path, SMOLLM, weights_bytes=0)
    assert plan("m", directory, Demand(1, 0, 16, 16)).kv_tokens == 46_592  # as vLLM says


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (Demand(7, 2), "6.00 GiB of weights and 2 GiB of reserve do not fit"),
        (Demand(8.1, 2, 4000, 100), "the KV cache holds 816 tokens, a request has 4100"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, demand: Demand, message: str) -> None:
    directory = model(tmp_path, LLAMA_8B, weights_bytes=6 * GIB)
    with pytest.raises(WorkerError, match=message):
        plan("m", directory, demand)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA_8B | {"kv_lora_rank": 512}, "latent KV cache"),
        ({**LLAMA_8B, "num_hidden_layers": 0}, "num_hidden_layers: expected a whole number"),
        ({**LLAMA_8B, "num_key_value_heads": "8"}, "num_key_value_heads: expected a whole"),
        ({"num_attention_heads": 4}, "hidden_size: expected a whole number"),
    ],
)
def test_unusable_configuration_is_named(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        kv_bytes_per_token(model(tmp_path, config))


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["taut", "plan", *map(str, words)])
    return cli.main()


def test_command_prints_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = model(tmp_path / "w4", LLAMA_8B, weights_bytes=6 * GIB)
    large = model(tmp_path / "bf16", LLAMA_8B, weights_bytes=16 * GIB)
    assert run(monkeypatch, small, large, "--memory-gib", 40) == 0
    text = capsys.readouterr().out
    assert text.count("--max-num-seqs=") == 2
    assert "max_inflight: 204, max_inflight_tokens: 262144" in text
    assert run(monkeypatch, small, "--memory-gib", 40, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["requests"] == 204


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-gib", "0"], "--memory-gib"),
        (["--memory-gib", "8", "--kv-cache-dtype", "int3"], "--kv-cache-dtype: 'int3' is none of"),
        (["--memory-gib", "8", "--tensor-parallel", "0"], "--tensor-parallel"),
        ([], "--memory-gib"),
    ],
)
def test_bad_flags_get_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert run(monkeypatch, model(tmp_path, SMOLLM), *words) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1


def test_unknown_model_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TAUT_HOME", str(tmp_path))
    assert run(monkeypatch, "nothing-of-that-name", "--memory-gib", 8) == 2
    text = capsys.readouterr().err
    assert text.startswith("taut: ") and text.count("\n") == 1
