"""Tiny random models of several families, compressed and run by vLLM, beside transformers.

A few run with the suite; ``TAUT_FAMILIES=all`` runs every family, ``TAUT_FAMILIES=opt,glm4`` some:
about half a minute each on an idle machine.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from stood_for import load_whole, plain_copy
from tiny_answer import NEW_TOKENS, PROMPTS
from tiny_families import EXPERTS, FAMILIES, STACKED, VISION, write_family
from tiny_minicpm import AS_GRANITE, write_minicpm
from tiny_models import edit_json, job_for, recipe_data, write_calibration_text
from transformers import AutoModelForImageTextToText

from taut_deploy.compress import driver
from taut_deploy.compress.shrink.shrink import ShrinkJob, shrink
from taut_deploy.models.store import describe_directory

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("tiny_answer.py")
NO_PICTURES = SCRIPT.with_name("no_pictures")
# Differing most from what else the suite serves: transposed layers, experts, ALiBi, a vision part.
USUAL = "gpt2,mixtral,falcon with alibi,qwen2_vl"
ASKED = os.environ.get("TAUT_FAMILIES", USUAL)
# transformers' layers hold these weights transposed.
TURNED = {"gpt2"}
# Their experts are stacked in transformers; Llama 4's are one by one in files.
IN_ONE_TENSOR = {"llama4", *STACKED}
# vLLM 0.32 answers otherwise than transformers for the dense model just as much (phimoe: NaN).
UNLIKE = {"gpt_neox", "phimoe"}
# Heads of this tiny size are not ones that its latent attention has on a CPU.
LATENT = {"deepseek_v2", "deepseek_v3"}
# Experts of these cannot be dropped.
WHOLE = {"llama4"}
# vLLM 0.32 has linear attention for GPUs alone.
ON_A_GPU = {"qwen3_next"}
NEAR_TIE = 0.1
"""Of the logits' standard deviation: vLLM computes in bf16, the judge in fp32."""
NEAR = 0.05
"""Mean distance of log-probabilities; 0.009 for Llama on 2026-11-27."""


def asked() -> list[str]:
    known = [*FAMILIES, *EXPERTS, *STACKED]
    others = {"minicpm", *VISION}
    return known if ASKED == "all" else [name for name in ASKED.split(",") if name not in others]


@pytest.mark.parametrize("family", asked())
def test_vllm_says_what_the_multiplied_out_weights_say(family, run_with_vllm, tmp_path):
    if family in UNLIKE:
        pytest.skip(f"vLLM and transformers part over the dense {family} already")
    if family in ON_A_GPU:
        pytest.skip(f"vLLM runs {family} on a GPU alone")
    model = write_family(tmp_path / "model", family)
    data = recipe_data(write_calibration_text(tmp_path / "text.txt"))
    if family in EXPERTS:
        # vLLM's products of quantised experts on a CPU need AMX and larger groups than 32: without
        # AMX what surrounds them is run.
        if torch.cpu._is_amx_tile_supported():
            data = recipe_data(write_calibration_text(tmp_path / "text.txt"), group_size=64)
        else:
            data["ignore"] = ["*.experts.*"]
    driver.compress(job_for(model, data, tmp_path / "out"))
    judged = tmp_path / "out"
    if family not in IN_ONE_TENSOR:
        judged = plain_copy(judged, tmp_path / "plain", 4, turned=family in TURNED)
    compare(family, load_whole(judged), tmp_path / "out", run_with_vllm, tmp_path / "answer.json")


def asked_experts() -> list[str]:
    return [family for family in asked() if family in EXPERTS and family not in WHOLE]


@pytest.mark.parametrize("family", asked_experts())
def test_vllm_serves_a_mixture_with_fewer_experts(family, run_with_vllm, tmp_path):
    if family in UNLIKE | LATENT | ON_A_GPU:
        pytest.skip(f"vLLM on a CPU does not run the whole {family} rightly either")
    model = describe_directory(write_family(tmp_path / "model", family))
    text = write_calibration_text(tmp_path / "text.txt")
    out = tmp_path / "out"
    shrink(ShrinkJob(model, out, {"experts": 0.75}, (str(text),), tmp_path, 4, 32))
    compare(family, load_whole(out), out, run_with_vllm, tmp_path / "answer.json")


def asked_vision() -> list[str]:
    return [name for name in VISION if ASKED == "all" or name in ASKED.split(",")]


@pytest.mark.parametrize("family", asked_vision())
def test_vllm_answers_text_by_a_model_with_a_vision_part(family, run_with_vllm, tmp_path):
    model = write_family(tmp_path / "model", family)
    data = recipe_data(write_calibration_text(tmp_path / "text.txt"))
    driver.compress(job_for(model, data, tmp_path / "out"))
    plain = plain_copy(tmp_path / "out", tmp_path / "plain", 4, turned=False)
    run = partial(run_with_vllm, env={"PYTHONPATH": str(NO_PICTURES)})
    compare(
        *(family, load_whole(plain, AutoModelForImageTextToText), tmp_path / "out", run),
        *(tmp_path / "answer.json", "--no-pictures"),
    )


@pytest.mark.skipif(
    ASKED != "all" and "minicpm" not in ASKED.split(","), reason="TAUT_FAMILIES=minicpm runs it"
)
def test_vllm_serves_minicpm_whose_class_is_its_own_code(run_with_vllm, tmp_path):
    """transformers runs the class beside the weights, vLLM its own, and the judge is a Granite."""
    model = write_minicpm(tmp_path / "model")
    data = recipe_data(write_calibration_text(tmp_path / "text.txt"))
    job = replace(job_for(model, data, tmp_path / "out"), trust_remote_code=True)
    assert len(driver.compress(job).layers) == 2 * 7
    plain = plain_copy(tmp_path / "out", tmp_path / "plain", 4, turned=False)
    edit_json(plain / "config.json", **AS_GRANITE)
    compare(
        *("minicpm", load_whole(plain), tmp_path / "out", run_with_vllm, tmp_path / "answer.json"),
        *("--trust-remote-code",),
    )


def compare(family: str, judge, checkpoint: Path, run_with_vllm, file: Path, *options: str) -> None:
    """Fail unless vLLM says of a checkpoint what the judge says."""
    done = run_with_vllm(str(SCRIPT), str(checkpoint), str(file), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(file.read_text())
    apart = []
    parts = zip(PROMPTS, answer["tokens"], answer["logprobs"], strict=True)
    for prompt, tokens, logprobs in parts:
        with torch.inference_mode():
            logits = judge(torch.tensor([prompt + tokens])).logits[0].float()
        of_prompt = logits[: len(prompt) - 1].log_softmax(-1)
        exact = of_prompt.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        apart.append((exact - torch.tensor(logprobs)).abs().mean())
        choices = logits[len(prompt) - 1 : -1]
        assert len(choices) == NEW_TOKENS
        gap = choices.amax(-1) - choices.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(gap.max()) <= NEAR_TIE * float(choices.std()), "another token by far"
    found = float(torch.stack(apart).mean())
    print(f"{family}: log-probabilities are {found:.4f} apart")
    assert found <= NEAR
