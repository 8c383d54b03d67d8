"""The plugin inside a real vLLM (CPU), on a tiny random Llama: three engines, one a claim."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# find_spec, not importorskip: importing vLLM here would burden every other test of the process.
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SCRIPT = Path(__file__).with_name("serve_tiny_llama.py")
TIE = 0.15
"""Logprob difference below which two tokens of this model count as equally likely."""


def _why(process: Any) -> str:
    """Return the log lines that tell why a start failed; the tail is only the farewell."""
    log = process.stdout + process.stderr
    return "\n".join(line for line in log.splitlines() if "Error" in line)[-4000:] or log[-4000:]


def _answers(stdout: str) -> list[dict[str, Any]]:
    lines = [line for line in stdout.splitlines() if line.startswith("ANSWERS ")]
    assert len(lines) == 1, stdout[-2000:]
    answers: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return answers


@pytest.fixture(scope="module")
def covered(make_tiny_llama: Callable[[int], Path]) -> Path:
    return make_tiny_llama(32)


@pytest.fixture(scope="module")
def required(
    covered: Path, run_with_vllm: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Path]]:
    """One start with TAUT_KERNELS=require on a model our kernels cover: (process, report)."""
    report = tmp_path_factory.mktemp("report") / "kernels.json"
    asked = {"TAUT_KERNELS": "require", "TAUT_KERNELS_REPORT": str(report)}
    yield run_with_vllm(str(SCRIPT), str(covered), env=asked), report


@pytest.fixture(scope="module")
def stock(covered: Path, run_with_vllm: Any) -> Any:
    """One start of the same model on vLLM's own kernels, where it has one for this CPU."""
    import torch

    if "AVX512" not in (capability := torch.backends.cpu.get_cpu_capability()):
        pytest.skip(f"a CPU of {capability}: stock vLLM has no W4A16 product (cpu_gemm_wna16)")
    return run_with_vllm(str(SCRIPT), str(covered), env={"TAUT_KERNELS": "off"})


def test_every_layer_runs_on_our_kernel_where_required(required: tuple[Any, Path]) -> None:
    process, report = required
    assert process.returncode == 0, _why(process)
    record = json.loads(report.read_text())
    layers = {choice["layer"]: choice["kernel"] for choice in record["layers"]}
    expected = {
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert set(layers) == expected
    assert set(layers.values()) == {"TautW4A16LinearKernel"}
    assert record["mode"] == "require"
    log = process.stdout + process.stderr
    assert log.count("taut kernels (require): TautW4A16LinearKernel ×8") == 1


def test_off_leaves_vllm_its_own_kernel(stock: Any) -> None:
    assert stock.returncode == 0, _why(stock)
    log = stock.stdout + stock.stderr
    assert "Using CPUWNA16LinearKernel for CompressedTensorsWNA16" in log
    assert "TautW4A16LinearKernel" not in log


def _gold_logprobs(directory: Path, prompt: list[int], tokens: list[int]) -> Any:
    """Logprobs [len(tokens), vocabulary] from transformers on dense fp32 weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from taut_kernels.gemm.w4a16 import disk as formats

    state, dense = load_file(directory / "model.safetensors"), {}
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight":
            dense[name] = tensor.float()
        elif kind == "weight_packed":
            N, K = state[f"{layer}.weight_shape"].tolist()
            scale = state[f"{layer}.weight_scale"].float().unsqueeze(-1)
            weight = formats.unpack_weight(tensor, K).float().view(N, scale.shape[1], -1)
            if (zero := state.get(f"{layer}.weight_zero_point")) is not None:
                weight = weight - formats.unpack_zero_point(zero, N).float().unsqueeze(-1)
            dense[f"{layer}.weight"] = (weight * scale).view(N, K)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"], config["torch_dtype"]
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    model.load_state_dict(dense)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def test_greedy_tokens_equal_vllms_own_kernel(
    covered: Path, required: tuple[Any, Path], stock: Any
) -> None:
    our_errors, their_errors, equal = [], [], 0
    pairs = zip(_answers(required[0].stdout), _answers(stock.stdout), strict=True)
    for our, their in pairs:
        gold = _gold_logprobs(covered, our["prompt"], our["tokens"])
        for step, (token, other) in enumerate(zip(our["tokens"], their["tokens"], strict=True)):
            # bf16 between layers costs up to 0.06 here, for either kernel: only a tie may differ.
            if token != other:
                assert abs(gold[step, token] - gold[step, other]) < TIE
                break
            equal += 1
            our_errors.append(abs(our["logprobs"][step] - gold[step, token].item()))
            their_errors.append(abs(their["logprobs"][step] - gold[step, token].item()))
    assert equal >= 12
    # Equal tokens could hide a small error; being no further from fp32 than vLLM's own cannot.
    assert sum(our_errors) <= 1.25 * sum(their_errors)


def test_require_refuses_a_layer_our_kernel_does_not_cover(
    make_tiny_llama: Callable[[int], Path], run_with_vllm: Any
) -> None:
    process = run_with_vllm(str(SCRIPT), str(make_tiny_llama(16)), env={"TAUT_KERNELS": "require"})
    assert process.returncode != 0
    log = process.stdout + process.stderr
    assert "TAUT_KERNELS=require: model.layers.0.mlp.down_proj: group size must be" in log
    assert "got 16; vLLM CPUWNA16LinearKernel" in log
    assert "not ours: group size must be 32, 64, 128" in log
    assert "ANSWERS" not in process.stdout
