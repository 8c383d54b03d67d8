"""W8A8 in a real vLLM on a CPU without VNNI, or one that oneDNN is told to take for one."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_kernels.gemm.scaled_mm import cpu_linear

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WHY_NO_OP = cpu_linear.why_not_here()
SCRIPT = Path(__file__).with_name("serve_tiny_llama.py")
WITHOUT_VNNI = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
"""AVX-512 as it was before VNNI; oneDNN uses less where the CPU has less."""
CPU_FLAGS = Path("/proc/cpuinfo")
HAS_AMX = CPU_FLAGS.is_file() and "amx_tile" in CPU_FLAGS.read_text()
ACT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


@pytest.fixture(scope="module")
def w8a8(make_tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny Llama with int8 weights over the whole range of codes."""
    from safetensors.torch import load_file, save_file

    source, directory = make_tiny_llama(32), tmp_path_factory.mktemp("tiny_w8a8")
    generator = torch.Generator().manual_seed(3)
    state = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight":
            state[name] = tensor
        elif kind == "weight_shape":
            N, K = tensor.tolist()
            codes = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
            state[f"{layer}.weight"] = codes
            state[f"{layer}.weight_scale"] = torch.full((N, 1), 1 / (73 * math.sqrt(K)))
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACT}
    config["quantization_config"] |= {"format": "int-quantized", "config_groups": {"g": group}}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text((source / name).read_text())
    return directory


def _served(run_with_vllm: Any, model: Path, **environment: str) -> Any:
    return run_with_vllm(str(SCRIPT), str(model), env=WITHOUT_VNNI | environment)


def _answers(process: Any) -> list[dict[str, Any]]:
    lines = [line for line in process.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert len(lines) == 1, (process.stdout + process.stderr)[-3000:]
    answers: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return answers


def _error(answers: list[dict[str, Any]], model: Path) -> float:
    """Return the mean distance of greedy log-probabilities from exact int8 layers in fp32."""
    return sum(
        abs(told - exact)
        for answer in answers
        for told, exact in zip(answer["logprobs"], _exact(model, answer), strict=True)
    ) / sum(len(answer["tokens"]) for answer in answers)


def _exact(model: Path, answer: dict[str, Any]) -> list[float]:
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    state = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"], config["torch_dtype"]
    llama = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    dense = {name: tensor.float() for name, tensor in state.items() if "scale" not in name}
    for name, scale in state.items():
        if name.endswith("weight_scale"):
            dense[name.removesuffix("_scale")] *= scale.float()
    llama.load_state_dict(dense)
    for module in llama.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(_quantise_input)
    ids = answer["prompt"] + answer["tokens"]
    with torch.no_grad():
        logits = llama(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = len(answer["prompt"]) - 1
    return [logits[start + i, token].item() for i, token in enumerate(answer["tokens"])]


def _quantise_input(_: torch.nn.Module, operands: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    scale = operands[0].abs().amax(-1, keepdim=True) / 127
    return ((operands[0] / scale).round() * scale,)


def test_a_worker_answers_rightly_where_stock_vllm_would_not(
    w8a8: Path, run_with_vllm: Any, tmp_path: Path
) -> None:
    report = tmp_path / "record.json"
    ours = _served(run_with_vllm, w8a8, TAUT_KERNELS="prefer", TAUT_KERNELS_REPORT=str(report))
    # bf16 between layers costs some hundredths, saturation some tenths.
    assert _error(_answers(ours), w8a8) < 0.15
    record = json.loads(report.read_text())
    assert {layer["kernel"] for layer in record["layers"]} == {"TautCPUInt8ScaledMMLinearKernel"}
    assert all("saturates" in layer["note"] for layer in record["layers"])
    assert {answer["kernel"] for answer in record["known_answers"]} == {
        "TautCPUInt8ScaledMMLinearKernel"
    }
    log = ours.stdout + ours.stderr
    assert "vLLM's int8 product is wrong on this CPU" in log
    assert "taut known answers: " in log


@pytest.mark.skipif(HAS_AMX, reason="with AMX vLLM takes a product that cannot be held to less")
def test_stock_vllm_answers_wrongly_there(w8a8: Path, run_with_vllm: Any) -> None:
    stock = _served(run_with_vllm, w8a8, TAUT_KERNELS="off")
    assert _error(_answers(stock), w8a8) > 0.15


def test_a_worker_without_a_compiler_multiplies_in_halves(
    w8a8: Path, run_with_vllm: Any, tmp_path: Path
) -> None:
    report, cache = tmp_path / "record.json", str(tmp_path / "cache")
    without = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": cache}
    served = _served(run_with_vllm, w8a8, TAUT_KERNELS_REPORT=str(report), **without)
    assert _error(_answers(served), w8a8) < 0.15
    layers = json.loads(report.read_text())["layers"]
    assert all("multiplied in halves; no C++ compiler" in layer["note"] for layer in layers)


def test_a_worker_refuses_to_multiply_wrongly(w8a8: Path, run_with_vllm: Any) -> None:
    process = _served(run_with_vllm, w8a8, VLLM_DISABLED_KERNELS="TautCPUInt8ScaledMMLinearKernel")
    assert process.returncode != 0
    assert "int8 product is wrong on this CPU" in process.stdout + process.stderr
    assert "VLLM_DISABLED_KERNELS" in process.stdout + process.stderr
    assert "ANSWERS" not in process.stdout


@pytest.mark.skipif(
    not (CPU_FLAGS.is_file() and "avx512_vnni" in CPU_FLAGS.read_text()),
    reason="this CPU has no AVX512-VNNI, with which vLLM's own product is right",
)
def test_where_the_product_is_right_the_faster_one_serves(w8a8: Path, run_with_vllm: Any) -> None:
    process = run_with_vllm(str(SCRIPT), str(w8a8), env={"TAUT_KERNELS": "prefer"})
    assert _error(_answers(process), w8a8) < 0.15
    log = process.stdout + process.stderr
    is_ours = "TautCPUInt8ScaledMMLinearKernel" in log
    assert is_ours == ("times as long at one token on this CPU" in log)
    assert not (is_ours and HAS_AMX)


CHOICE = """
import sys
import torch
from taut_kernels.vllm_plugin import cpu_int8, cpu_int8_speed

asked = []
def times(M):
    asked.append(M)
    return {1: (float(sys.argv[1]), 1.0), 64: (float(sys.argv[2]), 1.0)}[M]

cpu_int8_speed._times = times
cpu_int8.why_not_stock = lambda: None
torch.cpu._is_amx_tile_supported = lambda: False
print("CHOICE", cpu_int8.why_ours(), asked)
print("WAYS", cpu_int8.way_of(torch.bfloat16, 65536), cpu_int8.way_of(torch.bfloat16, 65537))
"""


@pytest.mark.skipif(WHY_NO_OP is not None, reason=str(WHY_NO_OP))
@pytest.mark.parametrize(
    ("one", "many", "said"),
    [
        ("0.5", "1.4", "vLLM's int8 product takes 2.00 times as long at one token on this CPU"),
        ("0.95", "0.9", "None"),
        ("0.5", "1.6", "None"),
    ],
)
def test_the_faster_product_is_chosen_once_and_kept(
    one: str, many: str, said: str, run_with_vllm: Any, tmp_path: Path
) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first = run_with_vllm("-c", CHOICE, one, many, env=env)
    assert f"CHOICE {said} [1, 64]\n" in first.stdout, first.stderr[-2000:]
    assert any(f"WAYS {way} stock\n" in first.stdout for way in ("vnni", "avx2"))
    # A compiled graph of the first start calls that product, however the second would measure.
    again = run_with_vllm("-c", CHOICE, "1", "1", env=env)
    assert f"CHOICE {said} []\n" in again.stdout, again.stderr[-2000:]
