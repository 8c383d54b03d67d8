"""8-bit weights, alone and mixed with 4-bit ones, in a real vLLM on the CPU.

vLLM has no kernel for them there. Answers are those of transformers, which dequantises.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess

import pytest
import torch
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from transformers import AutoModelForCausalLM
from vllm_answers import PROMPTS, SCRIPT, answers_of, require_greedy

from taut_deploy.compress import driver
from taut_kernels.vllm_plugin import cpu_choice, cpu_weight_speed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

OURS, FOUR_BITS = "TautCPUW8A16LinearKernel", "TautW4A16LinearKernel"
MIXED = {
    "method": "mixed",
    "target_bits": 6.5,
    "candidates": [
        {"scheme": "W4A16", "group_size": 32, "algorithm": "rtn"},
        {"scheme": "W8A16", "group_size": 64, "algorithm": "rtn"},
    ],
}
STAGES = {
    "groups": {"group_size": 64},
    "channels": {"group_size": "channel"},
    "zero points": {"group_size": 32, "symmetric": False},
}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` in bf16, heads of 32 as vLLM's CPU attention wants; a text."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", hidden=128, intermediate=256, dtype=torch.bfloat16)
    write_calibration_text(path / "text.txt")
    return path


@pytest.fixture
def serve(run_with_vllm):
    def serve(directory: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_with_vllm(str(SCRIPT), str(directory), json.dumps(PROMPTS), env=environment)

    return serve


def compressed(room, out, **stage):
    data = recipe_data(room / "text.txt", scheme="W8A16", algorithm="rtn", **stage)
    request = job_for(room / "model", data, out)
    driver.compress(request)
    return request.output


@pytest.mark.parametrize("kind", STAGES)
def test_vllm_answers_as_transformers_does(kind, room, serve, tmp_path):
    checkpoint = compressed(room, tmp_path / "out", **STAGES[kind])
    report = tmp_path / "record.json"
    done = serve(checkpoint, TAUT_KERNELS="require", TAUT_KERNELS_REPORT=str(report))
    answers = answers_of(done)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    for answer in answers:
        require_greedy(model, answer)
    record = json.loads(report.read_text())
    assert {layer["kernel"] for layer in record["layers"]} == {OURS}
    assert {layer["scheme"] for layer in record["layers"]} == {"W8A16"}
    assert {layer["reason"] for layer in record["layers"]} == {None}, "no layer is dequantised"
    forms = [known["form"] for known in record["known_answers"]]
    assert len(forms) == 4 and all(
        ("zero points" in form) is (kind == "zero points") for form in forms
    )


def test_a_mixture_is_served_layer_by_layer(room, serve, tmp_path):
    data = recipe_data(room / "text.txt") | {"stages": [MIXED]}
    request = job_for(room / "model", data, tmp_path / "out")
    driver.compress(request)
    report = tmp_path / "record.json"
    done = serve(request.output, TAUT_KERNELS="require", TAUT_KERNELS_REPORT=str(report))
    answers = answers_of(done)
    model = AutoModelForCausalLM.from_pretrained(request.output, dtype=torch.bfloat16).eval()
    for answer in answers:
        require_greedy(model, answer)
    kernels = {layer["kernel"] for layer in json.loads(report.read_text())["layers"]}
    assert kernels == {OURS, FOUR_BITS}


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("no-such-compiler", "no C++ compiler for cpu_linear.cpp"),
        (None, "taut::weight_only_linear_cpu is not faster than bf16 on this CPU"),
    ],
)
def test_where_our_product_cannot_serve_layers_are_dequantised(
    compiler, why, room, serve, tmp_path, monkeypatch
):
    # What an earlier start found on a CPU where bf16 is faster.
    monkeypatch.setattr(cpu_choice, "cache_dir", lambda: str(tmp_path / "cache"))
    cpu_weight_speed.kept("int8-weights", lambda: None)
    checkpoint = compressed(room, tmp_path / "out", group_size=64)
    report = tmp_path / "record.json"
    done = serve(
        checkpoint,
        TAUT_KERNELS="prefer",
        TAUT_KERNELS_REPORT=str(report),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        **({} if compiler is None else {"CXX": compiler}),
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    for answer in answers_of(done):
        require_greedy(model, answer)
    reasons = {layer["reason"] for layer in json.loads(report.read_text())["layers"]}
    (reason,) = reasons
    assert why in reason
    assert reason.endswith("dequantised at load, no memory saved")
