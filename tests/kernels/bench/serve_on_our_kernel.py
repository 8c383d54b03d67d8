"""Run by test_engine_checkpoint.py: serve a checkpoint, print tokens and logprobs as JSON.

Arguments: the checkpoint, the plugin's report, prompts as JSON. Run in a fork of a process that
has vLLM imported (with_vllm.py), where the engine runs, too.
"""

import json
import os
import sys

from vllm import LLM, SamplingParams


def main(arguments):
    checkpoint, report, prompts = arguments
    os.environ["TAUT_KERNELS_REPORT"] = report
    llm = LLM(
        model=checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=12, logprobs=1, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    answers = []
    for result in llm.generate(asked, sampling, use_tqdm=False):
        (output,) = result.outputs
        steps = zip(output.token_ids, output.logprobs, strict=True)
        answers.append([(token, step[token].logprob) for token, step in steps])
    print("\nANSWERS " + json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
