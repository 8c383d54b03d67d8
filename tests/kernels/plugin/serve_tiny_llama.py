"""Serve a checkpoint with vLLM, print tokens and logprobs as JSON.

Usage: ``python serve_tiny_llama.py DIRECTORY [PROMPTS [compiled]]``, prompts a JSON list of lists
of ids. Without the last word nothing is compiled.
Its cache on a card is a fixed size, so that nothing has to be measured beside other processes.
"""

import json
import sys

PROMPTS = [[2, 3, 5, 7, 11, 13], list(range(40, 80)), [90]]
NUM_TOKENS = 12


def on_card() -> bool:
    import torch

    return torch.cuda.is_available()


def main(directory: str, asked: list[list[int]], *, compiled: bool) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=directory,
        dtype="bfloat16",
        enforce_eager=not compiled,
        max_model_len=128,
        max_num_seqs=4,
        **({"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05} if on_card() else {}),
    )
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked]
    answers = []
    for prompt, output in zip(asked, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
        tokens = list(output.outputs[0].token_ids)
        steps = zip(tokens, output.outputs[0].logprobs, strict=True)
        logprobs = [step[token].logprob for token, step in steps]
        answers.append({"prompt": prompt, "tokens": tokens, "logprobs": logprobs})
    sys.stdout.write("\nANSWERS " + json.dumps(answers) + "\n")


if __name__ == "__main__":
    given = sys.argv[2:]
    main(sys.argv[1], json.loads(given[0]) if given else PROMPTS, compiled="compiled" in given[1:])
