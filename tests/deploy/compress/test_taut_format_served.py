"""Low-rank and codebook checkpoints in a real vLLM on the CPU: the answers transformers gives."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tiny_families import FAMILIES, write_family
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from transformers import AutoModelForCausalLM

import taut_deploy.hf  # noqa: F401  registers the method
from taut_deploy.compress import driver
from taut_deploy.diagnose.layers import explain

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "plugin" / "serve_tiny_llama.py"
PROMPTS = [[2, 3, 5, 7, 11, 13], list(range(20, 60)), [41]]
STAGES = {
    "LOWRANK": {"method": "factorize", "rank_budget": 0.7},
    "W4A16-LOWRANK": {"method": "factorize", "residual": {"rank": 8, "group_size": 32}},
    "CODEBOOK8": {"method": "palettize", "entries": 8, "group_size": 32, "rows": 32},
}
KERNELS = {
    "LOWRANK": "TautLowRankLinearMethod",
    "W4A16-LOWRANK": "TautW4A16LinearKernel + TautLowRankLinearMethod",
    "CODEBOOK8": "TautCodebookLinearMethod",
}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` in bf16, heads of 32 as vLLM's CPU attention wants; ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", hidden=128, intermediate=256, dtype=torch.bfloat16)
    write_calibration_text(path / "text.txt")
    return path


@pytest.fixture(scope="module")
def compressed(room):
    done = {}

    def make(scheme):
        if scheme not in done:
            data = {**recipe_data(room / "text.txt"), "stages": [STAGES[scheme]]}
            request = job_for(room / "model", data, room / scheme)
            driver.compress(request)
            done[scheme] = request.output
        return done[scheme]

    return make


@pytest.fixture
def serve(run_with_vllm):
    def serve(directory, **environment):
        return run_with_vllm(str(SCRIPT), str(directory), json.dumps(PROMPTS), env=environment)

    return serve


def answers_of(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    return json.loads(lines[0].removeprefix("ANSWERS "))


def scatter(model, answers):
    """Mean distance of the served log-probabilities from a model's of the same tokens."""
    apart = []
    for answer in answers:
        ids = answer["prompt"] + answer["tokens"]
        with torch.no_grad():
            told = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        first = len(answer["prompt"]) - 1
        for i, (token, logprob) in enumerate(
            zip(answer["tokens"], answer["logprobs"], strict=True)
        ):
            apart.append(abs(float(told[first + i, token]) - logprob))
    return sum(apart) / len(apart)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", STAGES)
def test_vllm_answers_as_transformers_does(scheme, room, compressed, serve, tmp_path):
    directory = compressed(scheme)
    report = tmp_path / "record.json"
    done = serve(directory, TAUT_KERNELS="prefer", TAUT_KERNELS_REPORT=str(report))
    log = done.stdout + done.stderr
    answers = answers_of(done)
    exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(room / "model", dtype=torch.float32).eval()
    near, far = scatter(exact, answers), scatter(base, answers)
    print(f"{scheme}: {near:.4f} from its own model, {far:.4f} from the base")
    assert near < 0.1 < far
    record = json.loads(report.read_text())
    assert {layer["kernel"] for layer in record["layers"]} == {KERNELS[scheme]}
    assert {layer["scheme"] for layer in record["layers"]} == {scheme}
    assert len(record["layers"]) == 8
    method = KERNELS[scheme].rpartition(" ")[2]
    assert method in {answer["kernel"] for answer in record["known_answers"]}
    if scheme == "CODEBOOK8":
        assert "dequantised at load, no memory saved" in log


@pytest.mark.timeout(900)
def test_layers_that_are_joined_on_disk_are_one_part(room, serve, tmp_path, monkeypatch):
    wide = {"hidden_size": 128, "intermediate_size": 256}
    monkeypatch.setitem(FAMILIES, "wide", ("phi3", {**FAMILIES["phi3"][1], **wide}))
    model = write_family(tmp_path / "model", "wide")
    data = {**recipe_data(room / "text.txt"), "stages": [STAGES["LOWRANK"]]}
    driver.compress(job_for(model, data, tmp_path / "out"))
    answers = answers_of(serve(tmp_path / "out"))
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    near = scatter(exact, answers)
    print(f"phi3: {near:.4f} from its own model")
    assert near < 0.1


@pytest.mark.timeout(900)
def test_vllm_refuses_a_checkpoint_without_a_described_tensor(compressed, serve, tmp_path):
    from safetensors.torch import load_file, save_file

    source = compressed("LOWRANK")
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            (broken / path.name).write_bytes(path.read_bytes())
    tensors = {}
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight_u"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    done = serve(broken)
    assert done.returncode != 0
    assert "model.layers.1.self_attn.k_proj.weight_u: is missing" in done.stdout + done.stderr


def test_the_doctor_names_what_a_worker_would_run(compressed):
    rows = explain(compressed("CODEBOOK8"))["layers"]
    assert {row["kernel"] for row in rows} == {"TautCodebookLinearMethod"}
    assert all("dequantised at load, no memory saved" in row["reason"] for row in rows)
