"""Fixtures of the kernel tests: a tiny Llama in W4A16, processes with a chosen environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from check_server import CheckServer

from taut_kernels.gemm.w4a16 import disk as formats

HERE = Path(__file__).parent
HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 128, 256, 2, 96
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}

RunPython = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none, or none of the ``capability`` it names."""
    for item in items:
        marks = item.iter_markers("gpu")
        if why := next((why for mark in marks if (why := _why_no_gpu(mark))), None):
            item.add_marker(pytest.mark.skip(reason=why))


def _why_no_gpu(mark: pytest.Mark) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    wanted: tuple[int, int] | None = mark.kwargs.get("capability")
    if wanted not in (None, torch.cuda.get_device_capability()):
        return "no CUDA device of sm_{}{}".format(*wanted or ())
    return None


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


def _environment(env: dict[str, str] | None) -> dict[str, str]:
    """Ours without what asks vLLM, Triton or our kernels for something, `env` on top."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TAUT_", "VLLM_", "TRITON_INTERPRET"))
    }
    path = os.pathsep.join(filter(None, [str(HERE), inherited.get("PYTHONPATH")]))
    ours = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "2", "PYTHONPATH": path}
    return inherited | ours | (env or {})


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Run this Python in a fresh process; `env` comes on top of our environment."""

    def run(
        *arguments: str, env: dict[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=_environment(env),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="session")
def run_checks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPython]:
    """Run checks of a script, each call in a process of its own that has its imports behind it.

    The last script is kept imported: files of tests mostly have one script and many checks.
    """
    kept: dict[str, CheckServer] = {}

    def run(
        script: Path, *names: str, env: dict[str, str] | None = None, timeout: int = 300
    ) -> subprocess.CompletedProcess[str]:
        wanted = f"{script} {env}"
        if wanted not in kept:
            while kept:
                kept.popitem()[1].close()
            folder = tmp_path_factory.mktemp("checks")
            kept[wanted] = CheckServer(script, _environment(env), folder)
        return kept[wanted].run(names, timeout)

    yield run
    for server in kept.values():
        server.close()


def _quantised_linear(
    shape: tuple[int, int], group_size: int, asymmetric: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    N, K = shape
    values = torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
    scale = (torch.rand(N, K // group_size, generator=generator) + 0.5) / (5 * K**0.5)
    if not asymmetric:  # the far end of a group gets the lowest code, of whichever sign it is
        scale *= torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
    tensors = {
        "weight_packed": formats.pack_weight(values),
        "weight_scale": scale.to(torch.bfloat16),
        "weight_shape": torch.tensor(shape),
    }
    if asymmetric:
        zeros = torch.randint(-3, 4, (N, K // group_size), generator=generator).to(torch.int8)
        tensors["weight_zero_point"] = formats.pack_zero_point(zeros)
    return tensors


def _state_dict(down_group_size: int, layers: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    state = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.5,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        state[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN)
        state[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        for name, shape in LINEARS.items():
            asymmetric = name.startswith("mlp")
            group_size = 64 if not asymmetric else 32
            if name == "mlp.down_proj":
                group_size = down_group_size
            tensors = _quantised_linear(shape, group_size, asymmetric, generator)
            state |= {f"{prefix}.{name}.{key}": tensor for key, tensor in tensors.items()}
    floats = (torch.float32,)
    return {k: v.to(torch.bfloat16) if v.dtype in floats else v for k, v in state.items()}


def _group(targets: list[str], group_size: int, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
    }
    return {"targets": targets, "weights": weights, "input_activations": None}


def _config(down_group_size: int, layers: int) -> dict[str, Any]:
    groups = {
        "group_0": _group([r"re:.*self_attn\..*"], 64, symmetric=True),
        "group_1": _group([r"re:.*mlp\.(gate|up)_proj$"], 32, symmetric=False),
        "group_2": _group([r"re:.*mlp\.down_proj$"], down_group_size, symmetric=False),
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": groups,
        },
    }


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def make_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random pack-quantized Llama; arguments are down_proj's group size, and layers."""
    from safetensors.torch import save_file

    def make(down_group_size: int, layers: int = LAYERS) -> Path:
        directory = tmp_path_factory.mktemp(f"tiny_llama_g{down_group_size}")
        state = _state_dict(down_group_size, layers)
        save_file(state, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(_config(down_group_size, layers)))
        _write_tokenizer(directory)
        return directory

    return make
