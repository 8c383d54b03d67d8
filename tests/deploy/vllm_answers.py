"""What a real vLLM answered, held to transformers on the same checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).resolve().parents[1] / "kernels" / "plugin" / "serve_tiny_llama.py"
PROMPTS = [[2, 3, 5, 7, 11, 13], list(range(20, 60)), [41]]
NEAR_TIE = 0.25  # two steps of a bf16 logit between 16 and 32, which none here is above


def answers_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return what the script printed; fail with its log where it printed none."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    answers: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return answers


def require_greedy(model: Any, answer: dict[str, Any]) -> None:
    """Fail unless every token is the model's first choice, or all but tied with it."""
    ids = answer["prompt"] + answer["tokens"]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].float()
    for at, token in enumerate(answer["tokens"], len(answer["prompt"]) - 1):
        assert logits[at].max() - logits[at, token] <= NEAR_TIE
    told = logits.log_softmax(-1)
    apart = [
        abs(float(told[at, token]) - logprob)
        for at, (token, logprob) in enumerate(
            zip(answer["tokens"], answer["logprobs"], strict=True), len(answer["prompt"]) - 1
        )
    ]
    assert sum(apart) / len(apart) < 0.1, apart
