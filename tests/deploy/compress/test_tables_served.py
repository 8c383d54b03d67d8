"""Quantised embeddings and heads in a real vLLM on the CPU: the answers transformers gives."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess

import pytest
import torch
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from transformers import AutoModelForCausalLM
from vllm_answers import PROMPTS, SCRIPT, answers_of, require_greedy

import taut_deploy.hf  # noqa: F401  reads quantised embeddings
from taut_deploy.compress import driver

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

TABLES = {8: {"bits": 8}, 4: {"bits": 4, "group_size": 32}}
# Of an untied 4-bit head vLLM's own method asks for the kernel; the others are ours.
HEADS = {8: "TautTokenTableMethod", 4: "TautW4A16LinearKernel"}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``tied/`` and ``untied/`` in bf16, heads of 32 as vLLM's CPU attention wants; a text."""
    path = tmp_path_factory.mktemp("room")
    for name in ("tied", "untied"):
        size = {"hidden": 128, "intermediate": 256, "dtype": torch.bfloat16}
        write_llama(path / name, tie=name == "tied", **size)
    write_calibration_text(path / "text.txt")
    return path


@pytest.fixture
def serve(run_with_vllm):
    def serve(directory: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_with_vllm(str(SCRIPT), str(directory), json.dumps(PROMPTS), env=environment)

    return serve


@pytest.mark.parametrize(("kind", "bits"), [*itertools.product(("tied", "untied"), (8, 4))])
def test_vllm_answers_as_transformers_does(kind, bits, room, serve, tmp_path):
    tables = {"embeddings": TABLES[bits], "head": TABLES[bits]}
    request = job_for(room / kind, {**recipe_data(room / "text.txt"), **tables}, tmp_path / "out")
    driver.compress(request)
    report = tmp_path / "record.json"
    done = serve(request.output, TAUT_KERNELS="prefer", TAUT_KERNELS_REPORT=str(report))
    answers = answers_of(done)
    model = AutoModelForCausalLM.from_pretrained(request.output, dtype=torch.bfloat16).eval()
    for answer in answers:
        require_greedy(model, answer)
    record = json.loads(report.read_text())
    kernels = {layer["layer"]: layer["kernel"] for layer in record["layers"]}
    head = "model.embed_tokens" if kind == "tied" else "lm_head"
    assert kernels[head] == HEADS[bits]
    if bits == 8:
        (reason,) = {layer["reason"] for layer in record["layers"] if layer["layer"] == head}
        assert reason is None, "our product multiplies the codes as they are stored"
        asked = {(known["kernel"], known["form"]) for known in record["known_answers"]}
        assert any(kernel == HEADS[8] and form.startswith("W8A16") for kernel, form in asked)


def test_without_a_compiler_a_head_of_8_bits_is_dequantised(room, serve, tmp_path):
    tables = {"embeddings": TABLES[8], "head": TABLES[8]}
    request = job_for(room / "tied", {**recipe_data(room / "text.txt"), **tables}, tmp_path / "out")
    driver.compress(request)
    cache = str(tmp_path / "cache")
    done = serve(request.output, CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=cache)
    log = done.stdout + done.stderr
    assert "ANSWERS" in done.stdout, log[-4000:]
    assert "no C++ compiler for cpu_linear.cpp" in log
    assert "dequantised at load, no memory saved" in log
