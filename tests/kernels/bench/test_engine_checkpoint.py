"""The benchmark's GPTQ and AWQ checkpoints: what they hold, and that vLLM (CPU) serves it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_bench import engine, engine_checkpoint, engine_models, greedy

SCHEMES = ("gptq", "awq")
SMALL = engine_models.LLAMA_3_8B | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LAYER = "model.layers.1.mlp"
PARTS = {
    "gptq": {
        "qweight": (torch.int32, (384 // 8, 256)),
        "qzeros": (torch.int32, (384 // 128, 256 // 8)),
        "scales": (torch.float16, (384 // 128, 256)),
        "g_idx": (torch.int32, (384,)),
    },
    "awq": {
        "qweight": (torch.int32, (384, 256 // 8)),
        "qzeros": (torch.int32, (384 // 128, 256 // 8)),
        "scales": (torch.float16, (384 // 128, 256)),
    },
}


def _state(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(directory / name) for name in set(index.values())}
    assert set(index) == {key for tensors in files.values() for key in tensors}
    return {key: files[name][key] for key, name in index.items()}


def test_blocks_have_a_scale_each_as_deepseek_writes_them(tmp_path: Path) -> None:
    engine_checkpoint.write(tmp_path / "c", "fp8-block", SMALL)
    said = json.loads((tmp_path / "c" / "config.json").read_text())
    assert said["quantization_config"]["weight_block_size"] == [128, 128]
    assert said["quantization_config"]["quant_method"] == "fp8"
    assert said["torch_dtype"] == "bfloat16"
    state = _state(tmp_path / "c")
    weight, scale = (state[f"{LAYER}.down_proj.{part}"] for part in ("weight", "weight_scale_inv"))
    assert (weight.dtype, weight.shape) == (torch.float8_e4m3fn, (256, 384))
    assert (scale.dtype, scale.shape) == (torch.float32, (2, 3))
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    rms = (weight.float() * wide).square().mean().sqrt().item()
    assert 0.7 < rms * 384**0.5 < 1.4, "outputs of order 1"


def _along_rows(words: torch.Tensor) -> torch.Tensor:
    """[R, C] words → [8R, C] nibbles: bits 4i..4i+3 of a word are its i-th row."""
    nibbles = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=1)
    return nibbles.reshape(-1, words.shape[1])


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """[R, C] words → [R, 8C] nibbles: column i of eight lies at place (0, 4, 1, 5, …)[i]."""
    places = [(words >> (4 * place)) & 15 for place in (0, 4, 1, 5, 2, 6, 3, 7)]
    return torch.stack(places, dim=2).flatten(1)


def _dense(layer: dict[str, torch.Tensor], scheme: str) -> torch.Tensor:
    """Return a layer's weights [N, K] in fp64, by the format's definition and none of our code."""
    if scheme == "gptq":
        stored, zeros = _along_rows(layer["qweight"]), _along_rows(layer["qzeros"].t()).t() + 1
        group = layer["g_idx"].long()
    else:
        stored, zeros = _awq_columns(layer["qweight"]), _awq_columns(layer["qzeros"])
        group = torch.arange(len(stored)) // 128
    return ((stored - zeros[group]) * layer["scales"].double()[group]).t()


def _linears(state: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        layer, _, part = name.rpartition(".")
        if part != "weight":
            layers.setdefault(layer, {})[part] = tensor
    return layers


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_holds_the_weights_that_were_drawn(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    draw = engine_checkpoint._four_bits

    def watch(*arguments: Any) -> Any:
        drawn.append(draw(*arguments))
        return drawn[-1]

    monkeypatch.setattr(engine_checkpoint, "_four_bits", watch)
    engine_checkpoint.write(tmp_path / "c", scheme, SMALL)
    state = _state(tmp_path / "c")
    layers = _linears(state)
    assert len(layers) == len(drawn) == 2 * 7
    for layer, (values, scale, zeros) in zip(layers.values(), drawn, strict=True):
        steps = values.double().unflatten(1, (-1, 128))
        if zeros is not None:
            assert set(zeros.unique().tolist()) == {-1, 0}
            steps = steps - zeros.unsqueeze(2)
        assert set(steps.unique().tolist()) == set(range(-7, 8))
        assert abs(steps.mean()) < 0.1
        weight = _dense(layer, scheme)
        assert torch.equal(weight, (steps * scale.half().double().unsqueeze(2)).flatten(1))
        # Outputs are of order 1.
        assert 0.5 < weight.norm(dim=1).median() < 2
    parts = {name: (t.dtype, tuple(t.shape)) for name, t in layers[f"{LAYER}.down_proj"].items()}
    assert parts == PARTS[scheme]
    floats = {t.dtype for name, t in state.items() if name.endswith(".weight")}
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (floats, config["torch_dtype"]) == ({torch.float16}, "float16")
    assert config["quantization_config"]["quant_method"] == scheme


@pytest.mark.parametrize("scheme", engine_checkpoint.SCHEMES)
def test_the_benchmarks_of_engines_take_every_scheme(scheme: str) -> None:
    asked = ["--output", "out", "--scheme", scheme]
    assert engine._parser().parse_args(asked).scheme == scheme
    assert greedy._parser().parse_args(asked).scheme == scheme


SERVE = Path(__file__).with_name("serve_on_our_kernel.py")
PROMPTS = [[2, 3, 5, 7, 11, 13], list(range(40, 80)), [90], [17, 4, 17, 60], [31, 32]]


def _gold(directory: Path, scheme: str) -> Any:
    """Return the checkpoint as a model of transformers in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    state = _state(directory)
    dense = {name: t.float() for name, t in state.items() if name.endswith(".weight")}
    for name, layer in _linears(state).items():
        dense[f"{name}.weight"] = _dense(layer, scheme).float()
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"], config["torch_dtype"]
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    model.load_state_dict(dense)
    return model


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_engine_serves_the_checkpoint_on_our_kernel(
    scheme: str, tmp_path: Path, run_with_vllm: Any
) -> None:
    checkpoint, report = tmp_path / "c", tmp_path / "kernels.json"
    engine_checkpoint.write(checkpoint, scheme, SMALL)
    arguments = (str(SERVE), str(checkpoint), str(report), json.dumps(PROMPTS))
    process = run_with_vllm(*arguments, env={"TAUT_KERNELS": "require"})
    assert process.returncode == 0, (process.stdout + process.stderr)[-6000:]
    kernels = [choice["kernel"] for choice in json.loads(report.read_text())["layers"]]
    assert kernels == ["TautW4A16LinearKernel"] * 8
    (line,) = (text for text in process.stdout.splitlines() if text.startswith("ANSWERS "))
    model, said = _gold(checkpoint, scheme), set()
    for prompt, steps in zip(PROMPTS, json.loads(line.removeprefix("ANSWERS ")), strict=True):
        tokens = [token for token, _ in steps]
        said |= set(tokens)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        gold = logits.log_softmax(-1)
        for step, (token, logprob) in enumerate(steps):
            # bf16 between layers is all that differs.
            assert abs(logprob - gold[step, token].item()) < 0.15
            assert gold[step].max() - gold[step, token] < 0.15
    assert len(said) > len(PROMPTS), "every prompt gets the same answer"


@pytest.mark.parametrize("model", engine_models.ENGINE_MODELS)
def test_every_parameter_of_a_models_class_is_in_its_checkpoint(model: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    own = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = engine_models.ENGINE_MODELS[model] | small | own | tokens | {"head_dim": 64}
    engine_checkpoint.write(tmp_path / "c", "w4a16", config)
    with torch.device("meta"):
        known = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    expected = {name: tuple(p.shape) for name, p in known.named_parameters()}
    found = {}
    for name, tensor in _state(tmp_path / "c").items():
        if name.endswith(".weight_shape"):
            found[name.removesuffix("_shape")] = tuple(tensor.tolist())
        elif not name.endswith((".weight_packed", ".weight_scale")):
            found[name] = tuple(tensor.shape)
            assert tensor.dtype == torch.bfloat16
            assert tensor.isfinite().all()
    assert found == expected
