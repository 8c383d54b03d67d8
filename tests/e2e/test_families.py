"""Tiny random models of several families, compressed and run by vLLM, beside transformers.

A few run with the suite; ``TAUT_FAMILIES=all`` runs every family, ``TAUT_FAMILIES=opt,glm4`` some:
about half a minute each on an idle machine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from stood_for import load_whole, plain_copy
from tiny_answer import NEW_TOKENS, PROMPTS
from tiny_families import EXPERTS, FAMILIES, write_family
from tiny_models import job_for, recipe_data, write_calibration_text

from taut_deploy.compress import driver

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("tiny_answer.py")
# Differing most from what else the suite serves: transposed layers, experts, ALiBi.
USUAL = "gpt2,mixtral,falcon with alibi"
ASKED = os.environ.get("TAUT_FAMILIES", USUAL)
# transformers' layers hold these weights transposed.
TURNED = {"gpt2"}
# Their experts are stacked in transformers, one by one in files.
STACKED = {"llama4"}
# vLLM 0.32 answers otherwise than transformers for the dense model just as much.
UNLIKE = {"gpt_neox"}
# vLLM 0.32 has linear attention for GPUs alone.
ON_A_GPU = {"qwen3_next"}
NEAR_TIE = 0.1
"""Of the logits' standard deviation: vLLM computes in bf16, the judge in fp32."""
NEAR = 0.05
"""Mean distance of log-probabilities; 0.009 for Llama on 2026-11-27."""


def asked() -> list[str]:
    return [*FAMILIES, *EXPERTS] if ASKED == "all" else ASKED.split(",")


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
    if family not in STACKED:
        judged = plain_copy(judged, tmp_path / "plain", 4, turned=family in TURNED)
    judge = load_whole(judged)
    file = tmp_path / "answer.json"
    done = run_with_vllm(str(SCRIPT), str(tmp_path / "out"), str(file))
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
