"""Every format that we write, served by vLLM on a card: the answers transformers gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama

import taut_deploy.hf  # noqa: F401  registers the method
from taut_deploy.compress import driver
from taut_deploy.validate.checkpoint_source import CheckpointSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),
]

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "plugin" / "serve_tiny_llama.py"
PROMPTS = [[2, 3, 5, 7, 11, 13], list(range(20, 60)), [41]]
QUANTIZED: dict[str, dict[str, Any]] = {
    "w8a8": {"scheme": "W8A8"},
    "w4a16-g128": {"scheme": "W4A16", "group_size": 128},
    "w4a16-g64": {"scheme": "W4A16", "group_size": 64},
    "w4a16-g32-asym": {"scheme": "W4A16", "group_size": 32, "symmetric": False},
    "w4a16-channel": {"scheme": "W4A16", "group_size": "channel"},
    "w8a16": {"scheme": "W8A16", "group_size": 128},
    "w4a8": {"scheme": "W4A8", "group_size": 128},
    "w4afp8": {"scheme": "W4AFP8", "group_size": 128},
    "fp8": {"scheme": "FP8"},
    "fp8-static": {"scheme": "FP8-STATIC"},
    "fp8-tensor": {"scheme": "FP8-TENSOR"},
    "fp8-block": {"scheme": "FP8-BLOCK"},
    "nvfp4": {"scheme": "NVFP4A16"},
    "mxfp4": {"scheme": "MXFP4A16"},
}
STAGES: dict[str, list[dict[str, Any]]] = {
    **{
        name: [{"method": "quantize", "group_size": None, **stage}]
        for name, stage in QUANTIZED.items()
    },
    "sparse24-w4": [
        {"method": "prune", "pattern": "2:4"},
        {"method": "quantize", "scheme": "W4A16", "group_size": 128},
    ],
    "lowrank": [{"method": "factorize", "rank_budget": 0.7}],
    "w4a16-lowrank": [{"method": "factorize", "residual": {"rank": 16, "group_size": 32}}],
    "codebook8": [{"method": "palettize", "entries": 8, "group_size": 32, "rows": 32}],
    "codebook16": [{"method": "palettize", "entries": 16, "group_size": 32, "rows": 32}],
}
CUTLASS = {"w4a8", "w4afp8"}
"""Formats that vLLM 0.26 gives its kernel of INT4 × FP8, whatever type the inputs should have."""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` in bf16, heads of 128, widths that every kernel takes; ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", hidden=512, intermediate=1024, dtype=torch.bfloat16)
    write_calibration_text(path / "text.txt")
    return path


def serve(directory: Path, report: Path) -> tuple[list[dict[str, Any]], str]:
    """Return what vLLM answers, and all that it printed."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), json.dumps(PROMPTS)],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_DEEP_GEMM": "0",
            "TAUT_KERNELS": "prefer",
            "TAUT_KERNELS_REPORT": str(report),
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    printed = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, printed[-4000:]
    return json.loads(lines[0].removeprefix("ANSWERS ")), printed


def told(directory: Path, answers: list[dict[str, Any]], dtype: torch.dtype) -> torch.Tensor:
    """What transformers computes in a type for the answers' tokens: log-probabilities."""
    source = CheckpointSource(directory, "candidate", "cpu", dtype)
    found = []
    for answer in answers:
        rows = source.score(answer["prompt"] + answer["tokens"]).logits.float().log_softmax(-1)
        first = len(answer["prompt"]) - 1
        found += [rows[first + i, token] for i, token in enumerate(answer["tokens"])]
    return torch.stack(found)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean distance of two lists of log-probabilities."""
    return float((one - other).abs().mean())


def as_cutlass_rounds(checkpoint: Path, output: Path) -> Path:
    """A copy with FP8 inputs and with scales as that kernel keeps them.

    By row: FP8 of the scales over their largest times 448, divided by 8 and rounded to FP8 again.
    """
    shutil.copytree(checkpoint, output)
    config = json.loads((output / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"]["type"] = "float"
    (output / "config.json").write_text(json.dumps(config))
    for path in output.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            scales = tensors[name].float()
            row = scales.amax(dim=1, keepdim=True) / 448
            eighth = (scales / row).to(torch.float8_e4m3fn).float() / 8
            kept = eighth.to(torch.float8_e4m3fn).float() * 8 * row
            tensors[name] = kept.to(tensors[name].dtype)
        save_file(tensors, path, {"format": "pt"})
    return output


@pytest.mark.parametrize("name", STAGES)
def test_vllm_on_a_card_answers_as_transformers_does(name, room, tmp_path):
    """No farther apart than twice what 16 bits make of the same checkpoint in transformers.

    vLLM and transformers in bfloat16 are each about that far from fp32; where inputs are rounded to
    eight bits, a last bit moves some of them by a whole step.
    """
    output = tmp_path / "out"
    data = {**recipe_data(room / "text.txt"), "stages": STAGES[name]}
    driver.compress(job_for(room / "model", data, output))
    answers, _ = serve(output, tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    kernels = sorted({layer["kernel"] for layer in record["layers"]})
    served = torch.tensor([given for answer in answers for given in answer["logprobs"]])
    if name in CUTLASS and kernels == ["CutlassW4A8LinearKernel"]:
        output = as_cutlass_rounds(output, tmp_path / "rounded")
    exact = told(output, answers, torch.float32)
    noise = distance(told(output, answers, torch.bfloat16), exact)
    near = distance(served, exact)
    far = distance(served, told(room / "model", answers, torch.float32))
    print(f"{name}: {near:.4f} apart, {noise:.4f} noise, {far:.4f} base; {', '.join(kernels)}")
    assert near < 2 * noise
    assert len(record["layers"]) == 8
