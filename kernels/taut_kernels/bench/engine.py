"""vLLM with and without our kernels: ``python -m taut_kernels.bench.engine --output DIR``.

Writes a checkpoint of Llama-3-8B's shape with random 4-bit weights, then starts one offline engine
a mode, each in its own process, and measures tokens a second at several batch sizes. The weights
say nothing about quality, and little about equal answers: they are there for their bytes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODES = ("off", "prefer", "require")
"""Values of ``TAUT_KERNELS``; ``off`` is stock vLLM."""
BATCHES = (1, 16, 64, 256)
_LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_GROUP_SIZE = 128
_PROMPT_TOKENS = 128
_ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell: tokens generated a second, and milliseconds of a decode step."""

    mode: str
    batch: int
    tokens_per_s: float
    decode_ms: float


def write_checkpoint(directory: Path, layers: int) -> None:
    """Write a loadable W4A16 checkpoint (``pack-quantized``, symmetric groups of 128).

    Args:
        directory: made; about 5.6 GB with 32 layers.
        layers: decoder layers.

    Raises:
        OSError: it cannot be written.
    """
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": _GROUP_SIZE,
        "dynamic": False,
    }
    scheme = {"targets": ["Linear"], "weights": weights}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }
    config = _LLAMA_3_8B | {"num_hidden_layers": layers, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    files: dict[str, str] = {}
    for layer in range(layers):
        name = f"model-{layer:02}.safetensors"
        tensors = _layer_tensors(f"model.layers.{layer}.")
        save_file(tensors, directory / name)
        files |= dict.fromkeys(tensors, name)
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    outer = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden).bfloat16() * 0.08,
        "lm_head.weight": torch.randn(vocabulary, hidden).bfloat16() * 0.05,
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    save_file(outer, directory / "model-outer.safetensors")
    files |= dict.fromkeys(outer, "model-outer.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": files})
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _layer_tensors(prefix: str) -> dict[str, Any]:
    import torch

    hidden, inner = _LLAMA_3_8B["hidden_size"], _LLAMA_3_8B["intermediate_size"]
    kv = _LLAMA_3_8B["num_key_value_heads"] * _LLAMA_3_8B["head_dim"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, Any] = {}
    for name, (N, K) in shapes.items():
        # Outputs of order 1: 4-bit values have a deviation of 4.6.
        scale = (torch.rand(N, K // _GROUP_SIZE) + 0.5) * (0.2 / K**0.5)
        packed = torch.randint(-(2**31), 2**31, (N, K // 8)).to(torch.int32)
        tensors[f"{prefix}{name}.weight_packed"] = packed
        tensors[f"{prefix}{name}.weight_scale"] = scale.bfloat16()
        tensors[f"{prefix}{name}.weight_shape"] = torch.tensor([N, K])
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors


def measure(checkpoint: Path, mode: str, batches: Sequence[int], repeats: int = 3) -> list[Row]:
    """Start an engine in this process and measure it.

    Args:
        checkpoint: of :func:`write_checkpoint`, or any other vLLM loads.
        mode: the value ``TAUT_KERNELS`` already has in the environment.
        batches: prompts at once; each is captured as a CUDA graph.
        repeats: the median counts.

    Returns:
        One row a batch size.
    """
    import statistics
    import time

    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(checkpoint),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.5,
        skip_tokenizer_init=True,
        seed=0,
        enable_prefix_caching=False,
        **_engine_options(mode, batches),
    )
    generator = torch.Generator().manual_seed(1)
    size = (max(batches), _PROMPT_TOKENS)
    tokens = torch.randint(10, 1000, size, generator=generator).tolist()

    def seconds(batch: int, answer: int) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt in tokens[:batch]]
        sampling = SamplingParams(
            temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    rows = []
    for batch in batches:
        seconds(batch, 8)
        whole = statistics.median(seconds(batch, _ANSWER_TOKENS) for _ in range(repeats))
        prefill = statistics.median(seconds(batch, 1) for _ in range(repeats))
        step = (whole - prefill) / (_ANSWER_TOKENS - 1) * 1e3
        rows.append(Row(mode, batch, batch * _ANSWER_TOKENS / whole, step))
    return rows


def _engine_options(mode: str, batches: Sequence[int]) -> dict[str, Any]:
    """Return what an engine of a mode is told beside the checkpoint."""
    import torch

    from taut_kernels.vllm_plugin import cache_key, fused_ops

    compilation: dict[str, Any] = {"cudagraph_capture_sizes": list(batches)}
    if mode == "off":
        return {"compilation_config": compilation}
    options = fused_ops.engine_options(torch.cuda.get_device_name(), mode)
    compilation |= options.get("--compilation-config", {})
    arguments: dict[str, Any] = {
        "compilation_config": compilation,
        "additional_config": {"taut": cache_key()},
    }
    if "--ir-op-priority" in options:
        arguments["ir_op_priority"] = options["--ir-op-priority"]
    return arguments


def _in_own_process(checkpoint: Path, mode: str, batches: Sequence[int], log: Path) -> list[Row]:
    command = [sys.executable, "-m", "taut_kernels.bench.engine", "--worker", mode]
    command += ["--checkpoint", str(checkpoint)]
    command += [argument for batch in batches for argument in ("--batch", str(batch))]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer, log.open("w") as sink:
        environment = os.environ | {"TAUT_KERNELS": mode}
        command += ["--output", answer.name]
        subprocess.run(command, check=True, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        return [Row(**row) for row in json.load(answer)]


def _write(rows: Sequence[Row], facts: str, directory: Path) -> None:
    with (directory / "engine.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    stock = {row.batch: row for row in rows if row.mode == "off"}
    lines = [f"Measured with {facts}.", "", "| mode | batch | tokens/s | decode step, ms | ratio |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        base = stock.get(row.batch)
        ratio = f"{row.tokens_per_s / base.tokens_per_s:.2f}" if base else "–"
        figures = f"{row.tokens_per_s:.0f} | {row.decode_ms:.2f} | {ratio}"
        lines.append(f"| {row.mode} | {row.batch} | {figures} |")
    (directory / "engine.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m taut_kernels.bench.engine", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--checkpoint", type=Path, help="instead of random weights")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    import torch

    arguments = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("error: taut_kernels.bench.engine needs a CUDA device\n")
        return 2
    batches = arguments.batch or list(BATCHES)
    if arguments.worker:
        rows = measure(arguments.checkpoint, arguments.worker, batches)
        text = json.dumps([asdict(row) for row in rows])
        arguments.output.write_text(text, encoding="utf-8")
        return 0
    from taut_kernels.bench import report

    arguments.output.mkdir(parents=True, exist_ok=True)
    facts = ", ".join(f"{key} {value}" for key, value in report.environment().items())
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = Path(scratch) / "checkpoint"
            write_checkpoint(checkpoint, arguments.layers)
        rows = []
        for mode in arguments.mode or MODES:
            rows += _in_own_process(
                checkpoint, mode, batches, arguments.output / f"engine-{mode}.log"
            )
            # After every mode: what was measured survives a run that is cut off.
            _write(rows, facts, arguments.output)
    sys.stdout.write((arguments.output / "engine.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
