"""Greedy text from one checkpoint, as JSON in a file (vLLM logs to stdout too).

Usage: ``python greedy.py vllm|transformers|transformers-fp32 DIRECTORY ANSWER``. A process of its
own, because vLLM reads its environment (``VLLM_PLUGINS``, ``TAUT_KERNELS``) once and frees its
memory only by ending.
"""

import json
import sys
from functools import partial
from pathlib import Path

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little",
    "Photosynthesis is the process by which",
    "def fibonacci(n):",
)
NEW_TOKENS = 24


def with_vllm(directory: str) -> list[list[int]]:
    """Token ids per prompt, through vLLM's offline engine."""
    from vllm import LLM, SamplingParams

    engine = LLM(directory, enforce_eager=True, max_model_len=256, max_num_seqs=4)
    parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.generate(list(PROMPTS), parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def with_transformers(directory: str, dtype: str = "bfloat16") -> list[list[int]]:
    """Token ids per prompt, through transformers' own loading of compressed-tensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    # As vLLM's ignore_eos: an end is a token like others. (min_new_tokens would forbid it.)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            full = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(full[0, ids["input_ids"].shape[1] :].tolist())
    return found


if __name__ == "__main__":
    run = {
        "vllm": with_vllm,
        "transformers": with_transformers,
        "transformers-fp32": partial(with_transformers, dtype="float32"),
    }[sys.argv[1]]
    Path(sys.argv[3]).write_text(json.dumps(run(sys.argv[2])))
