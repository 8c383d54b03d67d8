"""One checkpoint's greedy text and its log-probabilities of a given text, as JSON in a file.

Usage: ``python greedy.py vllm|transformers DIRECTORY ANSWER``, in a process of its own: vLLM reads
``VLLM_PLUGINS`` and ``TAUT_KERNELS`` once and frees its memory only by ending. With
``transformers-bf16`` or ``transformers-fp32`` nothing is written: only the given text is scored.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TypedDict

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little",
    "Photosynthesis is the process by which",
    "def fibonacci(n):",
)
NEW_TOKENS = 24
SEQUENCES, LENGTH = 4, 240
"""Of the given text, the licence's first tokens."""
_TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


class Answer(TypedDict):
    """Token ids per prompt; log-probability of every token of the given text but the first."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


def given_text(directory: str) -> list[list[int]]:
    """The sequences that are scored, as token ids."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(directory)(_TEXT.read_text(), verbose=False)["input_ids"]
    return [ids[LENGTH * i : LENGTH * (i + 1)] for i in range(SEQUENCES)]


def with_vllm(directory: str) -> Answer:
    """Through vLLM's offline engine."""
    from vllm import LLM, SamplingParams

    engine = LLM(directory, enforce_eager=True, max_model_len=256, max_num_seqs=4)
    parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.generate(list(PROMPTS), parameters, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    text = given_text(directory)
    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scored = engine.generate(
        [{"prompt_token_ids": ids} for ids in text], parameters, use_tqdm=False
    )
    logprobs = [
        [
            found[token].logprob
            for token, found in zip(ids[1:], one.prompt_logprobs[1:], strict=True)
        ]
        for ids, one in zip(text, scored, strict=True)
    ]
    return {"tokens": tokens, "logprobs": logprobs}


def with_transformers(directory: str, dtype: str = "bfloat16", *, write: bool = False) -> Answer:
    """Through transformers' own loading of compressed-tensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    # As vLLM's ignore_eos: an end is a token like others. (min_new_tokens would forbid it.)
    model.generation_config.eos_token_id = None
    tokens, logprobs = [], []
    with torch.inference_mode():
        for prompt in PROMPTS if write else ():
            ids = tokenizer(prompt, return_tensors="pt")
            full = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
            tokens.append(full[0, ids["input_ids"].shape[1] :].tolist())
        for sequence in map(torch.tensor, given_text(directory)):
            logits = model(sequence[None]).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(-1, sequence[1:, None])
            logprobs.append(chosen[:, 0].tolist())
    return {"tokens": tokens, "logprobs": logprobs}


if __name__ == "__main__":
    run = {
        "vllm": with_vllm,
        "transformers": partial(with_transformers, write=True),
        "transformers-bf16": with_transformers,
        "transformers-fp32": partial(with_transformers, dtype="float32"),
    }[sys.argv[1]]
    Path(sys.argv[3]).write_text(json.dumps(run(sys.argv[2])))
