"""One engine in this process: started, and timed at each number of prompts and their length."""

from __future__ import annotations

import functools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_bench.engine_modes import engine_options

BATCHES = (1, 16, 64, 256)
CONTEXTS = (128,)
ANSWER_TOKENS = 128
_PREFILL_SIZES = (128, 256, 384, 512)
"""Tokens of prefill steps with a CUDA graph: the first prompts to come are a small step. vLLM's own
sizes go to 512 in steps of 8 and 16; a start captures few of them sooner."""
_WARM_UPS = 6
"""Prefills nobody times: prompts come in steps of other sizes each time, and the first steps of a
size take longer (16 prompts: 93, 92, 78, 65, 64, 64 ms in turn on an H200), probably until cuBLAS
has loaded its kernels."""
_LONG_PREFILL = 32768
"""Prompt tokens from which on a prefill is seconds: one is warmed up, and two are timed."""
JIT_MONITOR = ("warn", "error")
"""What vLLM's monitor of compilations after warm-up does: count them, or end the engine."""
_PROFILED_TOKENS = 24
"""Of an answer whose steps are profiled: a trace has every kernel of each."""
_GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
_ENGINE: dict[str, Any] = {
    "dtype": "auto",  # the checkpoint's own, as served: fp16 of GPTQ and AWQ
    "max_num_batched_tokens": 8192,
    "skip_tokenizer_init": True,
    "seed": 0,
    "enable_prefix_caching": False,
}
"""Options of every engine."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all modes of a run have in common.

    Attributes:
        batches: prompts at once; each is captured as a CUDA graph.
        contexts: tokens of a prompt.
        jit_monitor: of :data:`JIT_MONITOR`.
        kv_cache_dtype: of vLLM's option of that name.
        ranks: cards that share the model (tensor parallel).
        memory: share of a card's memory that the engine takes.
        repeats: the median counts.
    """

    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS
    jit_monitor: str = JIT_MONITOR[0]
    kv_cache_dtype: str = "auto"
    ranks: int = 1
    memory: float = 0.5
    repeats: int = 3

    def arguments(self) -> list[str]:
        """Return the command line that gives these settings to an engine's own process."""
        found = [f"--batch={batch}" for batch in self.batches]
        found += [f"--context={context}" for context in self.contexts]
        found += ["--jit-monitor", self.jit_monitor, "--kv-cache-dtype", self.kv_cache_dtype]
        found += ["--tensor-parallel-size", str(self.ranks), "--memory", str(self.memory)]
        return found

    def options(self, mode: str) -> dict[str, Any]:
        """Return what ``vllm.LLM`` is told beside the checkpoint.

        Args:
            mode: of :data:`.engine_modes.MODES`.
        """
        sizes = sorted({*self.batches, *_PREFILL_SIZES})
        own = {
            "max_model_len": max(1024, max(self.contexts) + ANSWER_TOKENS),
            "max_num_seqs": max(self.batches),
            "gpu_memory_utilization": self.memory,
            "jit_monitor_mode": self.jit_monitor,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        if self.ranks > 1:
            own |= {"tensor_parallel_size": self.ranks}
        return _ENGINE | own | engine_options(mode, sizes)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell.

    Attributes:
        mode: of the engine.
        batch: prompts at once.
        tokens_per_s: generated, prompts' prefill included in the time.
        decode_ms: of one decode step.
        context: tokens of a prompt.
        start_s: from asking for the engine until it took prompts.
    """

    mode: str
    batch: int
    tokens_per_s: float
    decode_ms: float
    context: int = CONTEXTS[0]
    start_s: float = 0.0


_Seconds = Callable[[int], float]


def _cell(prompt_tokens: int, repeats: int, seconds: _Seconds) -> tuple[float, float]:
    """Time one cell: seconds of a whole answer, and of its prefill.

    ``seconds`` answers with so many tokens a prompt, and times it.
    """
    long = prompt_tokens >= _LONG_PREFILL
    seconds(8)
    for _ in range(1 if long else _WARM_UPS):
        seconds(1)
    times = min(2, repeats) if long else repeats
    whole = statistics.median(seconds(ANSWER_TOKENS) for _ in range(times))
    return whole, statistics.median(seconds(1) for _ in range(times))


def _cells(settings: Settings) -> Iterator[tuple[int, int]]:
    for context in settings.contexts:
        for batch in settings.batches:
            yield context, batch


def measure(
    checkpoint: Path, mode: str, settings: Settings, profile: Path | None = None
) -> list[Row]:
    """Start an engine in this process and measure it.

    Args:
        checkpoint: of :func:`.engine_checkpoint.write`, or any other vLLM loads.
        mode: one of :data:`.engine_modes.MODES`; ``TAUT_KERNELS`` already has its first part.
        settings: of the run.
        profile: the CSV for decode steps by kernel; none is written where it fails.

    Returns:
        One row a length of prompts and number of them.
    """
    import torch
    from vllm import LLM, SamplingParams

    from taut_bench import engine_profile

    traces = Path(tempfile.mkdtemp(prefix="taut-traces-")) if profile else None
    profiling = engine_profile.options(traces) if traces else {}
    begun = time.perf_counter()
    llm = LLM(model=str(checkpoint), **settings.options(mode), **profiling)
    start_s = time.perf_counter() - begun
    generator = torch.Generator().manual_seed(1)
    shape = (max(settings.batches), max(settings.contexts))
    tokens = torch.randint(10, 1000, shape, generator=generator).tolist()

    def seconds(context: int, batch: int, answer: int) -> float:
        prompts = [{"prompt_token_ids": prompt[:context]} for prompt in tokens[:batch]]
        sampling = SamplingParams(max_tokens=answer, **_GREEDY)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    rows = []
    for context, batch in _cells(settings):
        timed = functools.partial(seconds, context, batch)
        whole, prefill = _cell(context * batch, settings.repeats, timed)
        step = (whole - prefill) / (ANSWER_TOKENS - 1) * 1e3
        rate = batch * ANSWER_TOKENS / whole
        rows.append(Row(mode, batch, rate, step, context, start_s))
    if profile and traces:
        first = functools.partial(seconds, settings.contexts[0])
        calls = {b: functools.partial(first, b, _PROFILED_TOKENS) for b in settings.batches}
        _profile(llm, mode, calls, traces, profile)
    return rows


def _profile(llm: Any, mode: str, calls: Any, traces: Path, profile: Path) -> None:
    from taut_bench import engine_profile

    try:
        engine_profile.record_all(llm, mode, calls, traces, profile)
    except Exception as error:  # no profile is worth the figures before it
        sys.stdout.write(f"{mode}: the profile failed: {error}\n")
    finally:
        shutil.rmtree(traces, ignore_errors=True)
