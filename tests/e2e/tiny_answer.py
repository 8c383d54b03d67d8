"""One tiny checkpoint's answers by vLLM, as JSON in a file.

Usage: ``python tiny_answer.py DIRECTORY ANSWER [--trust-remote-code] [--no-pictures]``. A process
of its own: vLLM frees its memory only by ending.
"""

import json
import sys
from pathlib import Path

import torch

NO_PICTURES = {"limit_mm_per_prompt": {"image": 0, "video": 0}, "skip_mm_profiling": True}
PROMPTS = torch.randint(2, 60, (4, 24), generator=torch.Generator().manual_seed(4)).tolist()
NEW_TOKENS = 8


def answer(directory: str, **options: object) -> dict[str, list[list[float]]]:
    """Greedy tokens, and log-probabilities of each prompt's tokens but the first."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        directory,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        dtype="bfloat16",
        **options,
    )
    parameters = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0
    )
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "logprobs": [
            [
                found[token].logprob
                for token, found in zip(ids[1:], one.prompt_logprobs[1:], strict=True)
            ]
            for ids, one in zip(PROMPTS, outputs, strict=True)
        ],
    }


if __name__ == "__main__":
    more = NO_PICTURES if "--no-pictures" in sys.argv else {}
    found = answer(sys.argv[1], trust_remote_code="--trust-remote-code" in sys.argv, **more)
    Path(sys.argv[2]).write_text(json.dumps(found))
