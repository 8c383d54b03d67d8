"""Do our kernels change greedy answers: ``python -m taut_bench.greedy --checkpoint DIR …``.

Kernels add in different orders, so two right ones part sooner or later where two tokens are nearly
as likely. What counts is whether ours part from vLLM's more often than vLLM's part from themselves.
One engine a mode, all of them on the card at the same time, answers the same prompts: all at once,
and a few at a time, which changes the kernels' shapes and so their order of adding. Stock's two
sets, and stock with other kernels of vLLM's own (``_OTHERS``, as far as a mode of ours exchanges
as much), give the A/A noise floor, the largest of them; ours against stock's, all at once, is held
against it by Fisher's exact test (one-sided). Asked again,
all at once, an engine has to answer the same: a race would show. Prompts are pieces of ``--text``
at even distances, or random tokens. ``--scheme`` in the place of ``--checkpoint`` takes
Llama-3-8B's shape with random weights (:mod:`.engine_checkpoint`), whose answers mean nothing but
part as any others do. Writes ``greedy.csv``, ``greedy.md`` (``greedy-<scheme>``) and each mode's
log.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taut_bench import cuda_device
from taut_bench.engine_modes import MODES, engine_options, environment, unready
from taut_bench.greedy_report import Answers, floors_of, report

_OPS: dict[str, Any] = {
    "ir_op_priority": {"rms_norm": ["vllm_c"], "fused_add_rms_norm": ["vllm_c"]},
    "custom_ops": ["+silu_and_mul", "+quant_fp8", "+rotary_embedding"],
}
_OTHERS: dict[str, dict[str, Any]] = {
    "off+products": {},
    "off+triton": {"attention_backend": "TRITON_ATTN"},
    "off+ops": _OPS,
    "off+others": {"attention_backend": "TRITON_ATTN"} | _OPS,
}
"""Stock with other kernels of vLLM's own: of products, of attention, of products, norms and
activations, of all that ours replace.
Inductor's norms and activations leave out roundings to bf16 on their way to 8 bits that vLLM's
have, and ours (its ``emulate_precision_casts`` is off)."""
_DISABLED = (
    "MacheteLinearKernel",
    "CutlassFP8ScaledMMLinearKernel",
    "CutlassInt8ScaledMMLinearKernel",
    "CutlassFp8BlockScaledMMKernel",
    "DeepGemmFp8BlockScaledMMKernel",
)
"""Products left out of :data:`_OTHERS` but ``off+triton``: the next in vLLM's order take their
place."""
_PROMPT_TOKENS = 64
_FEW = 5
"""Prompts at a time in the second set; no power of two, so that batches are padded."""
_LEAST_FREE = 0.05
"""Share of the card's memory vLLM wants to find free before it starts."""


def answer(
    checkpoint: Path, mode: str, prompts: Answers, length: int, *, tokenizer: bool = True
) -> dict[str, Answers]:
    """Start an engine in this process and let it answer three times.

    Args:
        checkpoint: what vLLM loads.
        mode: one of :data:`MODES`; ``TAUT_KERNELS`` already has its first part.
        prompts: token numbers.
        length: tokens of an answer, greedy, ends ignored.
        tokenizer: whether the checkpoint has one to load.

    Returns:
        ``all``: all prompts at once; ``few``: :data:`_FEW` at a time; ``again``: as ``all``.
    """
    from vllm import LLM, SamplingParams

    sizes = sorted({1, 8, 16, 32, 64, len(prompts)})
    llm = LLM(
        model=str(checkpoint),
        dtype="auto",
        max_model_len=max(map(len, prompts)) + length,
        max_num_seqs=len(prompts),
        # Engines run side by side: what each finds free says nothing of what it may take.
        gpu_memory_utilization=_LEAST_FREE,
        kv_cache_memory_bytes=cache_bytes(
            _config(checkpoint), sum(len(prompt) + length for prompt in prompts)
        ),
        seed=0,
        enable_prefix_caching=False,
        skip_tokenizer_init=not tokenizer,
        **_options(mode, sizes),
    )
    sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)

    def ask(some: Answers) -> Answers:
        requests = [{"prompt_token_ids": prompt} for prompt in some]
        results = llm.generate(requests, sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    starts = range(0, len(prompts), _FEW)
    few = [tokens for start in starts for tokens in ask(prompts[start : start + _FEW])]
    return {"all": ask(prompts), "few": few, "again": ask(prompts)}


def cache_bytes(config: dict[str, Any], tokens: int) -> int:
    """Return how much memory keys and values need, with a quarter to spare.

    Args:
        config: of the checkpoint.
        tokens: of all prompts and answers.
    """
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    a_token = 2 * 2 * config.get("num_key_value_heads", heads) * dim  # keys, values; bf16
    return int(1.25 * a_token * config["num_hidden_layers"] * tokens)


def _options(mode: str, sizes: Sequence[int]) -> dict[str, Any]:
    if mode not in _OTHERS:
        return engine_options(mode, sizes)
    options, others = engine_options("off", sizes), copy.deepcopy(_OTHERS[mode])
    options["compilation_config"]["custom_ops"] = others.pop("custom_ops", [])
    return options | others


def _config(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config


def cut_prompts(text: str, tokenizer_of: Path, count: int) -> Answers:
    """Return pieces of a text at even distances, as token numbers.

    Args:
        text: at least ``count`` × 64 tokens long.
        tokenizer_of: the checkpoint.
        count: prompts.

    Raises:
        ValueError: the text is too short.
    """
    from transformers import AutoTokenizer

    # A million characters hold more tokens than anybody asks for.
    tokens = AutoTokenizer.from_pretrained(str(tokenizer_of))(text[:1_000_000])["input_ids"]
    step = len(tokens) // count
    if step < _PROMPT_TOKENS:
        raise ValueError(f"the text has {len(tokens)} tokens, {count * _PROMPT_TOKENS} needed")
    return [tokens[i * step : i * step + _PROMPT_TOKENS] for i in range(count)]


def random_prompts(checkpoint: Path, count: int) -> Answers:
    """Return random token numbers, the same in every process.

    Args:
        checkpoint: whose vocabulary they are of.
        count: prompts.
    """
    draw = random.Random(0)  # noqa: S311 (a seed, not a secret)
    numbers = range(_config(checkpoint)["vocab_size"])
    return [draw.choices(numbers, k=_PROMPT_TOKENS) for _ in range(count)]


def _start(
    mode: str, checkpoint: Path, arguments: argparse.Namespace, scratch: Path
) -> subprocess.Popen[bytes]:
    """Start a fresh process that answers as one mode and leaves the answers in a file."""
    command = [sys.executable, "-m", "taut_bench.greedy", "--worker", mode]
    command += ["--checkpoint", str(checkpoint), "--output", str(arguments.output)]
    if arguments.text is not None:
        command += ["--text", str(arguments.text)]
    command += ["--prompts", str(arguments.prompts), "--length", str(arguments.length)]
    variables = environment(mode, arguments.output / f"greedy-{mode}-kernels.json")
    if mode in _OTHERS and mode != "off+triton":
        variables["VLLM_DISABLED_KERNELS"] = ",".join(_DISABLED)
    # Two engines that compile the same graph at the same time would write the same files.
    variables["VLLM_CACHE_ROOT"] = str(scratch / f"cache-{mode}")
    # An engine in a process of its own starts with the prompts it has by then: batches, and so the
    # order of adding, would depend on the clock, and asking again would not show a race.
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with (arguments.output / f"greedy-{mode}.log").open("w") as sink:
        return subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=variables)


def _parser() -> argparse.ArgumentParser:
    from taut_bench.engine_checkpoint import SCHEMES

    parser = argparse.ArgumentParser(prog="python -m taut_bench.greedy", description=__doc__)
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--checkpoint", type=Path, help="what the engines load")
    of.add_argument("--scheme", choices=SCHEMES, help="Llama-3-8B's shape, random weights")
    parser.add_argument("--layers", type=int, help="of --scheme, instead of its 32")
    parser.add_argument("--text", type=Path, help="UTF-8 text to cut prompts from; else random")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--mode", action="append", choices=MODES[1:], help="default: require")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer")
    workers = (*MODES, *_OTHERS)
    parser.add_argument("--worker", choices=workers, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 outside of the noise floor or unanswered."""
    import torch

    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.mode = arguments.mode or ["require"]
    if arguments.scheme and arguments.text:
        parser.error("--text: random weights have no tokenizer")
    if arguments.layers is not None and (arguments.checkpoint or arguments.layers < 1):
        parser.error("--layers: at least 1, and of --scheme only")
    if cuda_device.missing("taut_bench.greedy"):
        return 2
    if arguments.worker:
        return _work(arguments)
    if unready(arguments.mode):
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            from taut_bench import engine_checkpoint, engine_models

            checkpoint = Path(scratch) / "checkpoint"
            sizes = dict(engine_models.LLAMA_3_8B)
            sizes["num_hidden_layers"] = arguments.layers or sizes["num_hidden_layers"]
            engine_checkpoint.write(checkpoint, arguments.scheme, sizes)
            torch.cuda.empty_cache()
        return _compare(checkpoint, arguments, Path(scratch))


def _work(arguments: argparse.Namespace) -> int:
    """Answer as one mode and leave the answers in a file."""
    checkpoint, has_text = arguments.checkpoint, arguments.text is not None
    if has_text:
        text = arguments.text.read_text(encoding="utf-8")
        prompts = cut_prompts(text, checkpoint, arguments.prompts)
    else:
        prompts = random_prompts(checkpoint, arguments.prompts)
    length, mode = arguments.length, arguments.worker
    answers = answer(checkpoint, mode, prompts, length, tokenizer=has_text)
    _answers(arguments.output, mode).write_text(json.dumps(answers), encoding="utf-8")
    return 0


def _answers(directory: Path, mode: str) -> Path:
    return directory / f"answers-{mode}.json"


def _answers_of(
    modes: Sequence[str], checkpoint: Path, arguments: argparse.Namespace, scratch: Path
) -> dict[str, dict[str, Answers]] | None:
    """Let all modes answer at the same time; None where one failed."""
    engines: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for mode in modes:
            engines[mode] = _start(mode, checkpoint, arguments, scratch)
        failed = [mode for mode, engine in engines.items() if engine.wait()]
        for mode in failed:
            sys.stderr.write(f"error: {mode}: no answers: see greedy-{mode}.log\n")
        if failed:
            return None
        return {
            mode: json.loads(_answers(arguments.output, mode).read_text(encoding="utf-8"))
            for mode in modes
        }
    finally:
        for mode, engine in engines.items():
            if engine.poll() is None:
                engine.terminate()
                engine.wait()
            _answers(arguments.output, mode).unlink(missing_ok=True)


def _compare(checkpoint: Path, arguments: argparse.Namespace, scratch: Path) -> int:
    """Let all modes answer at the same time, and report."""
    from taut_bench.report import environment as facts

    asked = arguments.mode
    floors = [other for other in _OTHERS if any(other in floors_of(mode) for mode in asked)]
    found = _answers_of(("off", *floors, *asked), checkpoint, arguments, scratch)
    if found is None:
        return 1
    line = ", ".join(f"{key} {value}" for key, value in facts().items())
    name = f"greedy-{arguments.scheme}" if arguments.scheme else "greedy"
    return 0 if report(found, arguments.output, line, name) else 1


if __name__ == "__main__":
    sys.exit(main())
