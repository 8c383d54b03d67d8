"""One engine in this process: started, and timed at a number of prompts and their length."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
_SETTLED = 0.02
"""First answers are repeated until one is not faster than the last by more than this share."""
_FIRST_ANSWERS = 8
"""At most so many of them."""
_CACHE_BLOCK = 128
"""Tokens that a sequence's place in the KV cache is a multiple of, at most."""
_LEAST_LENGTH = 1024
"""Tokens of the longest sequence that an engine is told of, however short the prompts are."""
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
        repeats: the median counts.
    """

    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS
    jit_monitor: str = JIT_MONITOR[0]
    kv_cache_dtype: str = "auto"
    ranks: int = 1
    repeats: int = 3

    def arguments(self) -> list[str]:
        """Return the command line that gives these settings to an engine's own process."""
        found = [f"--batch={batch}" for batch in self.batches]
        found += [f"--context={context}" for context in self.contexts]
        found += ["--jit-monitor", self.jit_monitor, "--kv-cache-dtype", self.kv_cache_dtype]
        found += ["--tensor-parallel-size", str(self.ranks)]
        return found

    def cells(self) -> Iterator[tuple[int, int]]:
        """Yield what is measured: tokens of a prompt, and prompts at once."""
        return itertools.product(self.contexts, self.batches)

    def cache_bytes(self, config: dict[str, Any]) -> int:
        """Return the KV cache that the largest cell needs, or vLLM to start, on each card.

        Args:
            config: the model's ``config.json``.
        """
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        kept = max(1, config.get("num_key_value_heads", heads) // self.ranks)
        token = 2 * 2 * config["num_hidden_layers"] * kept * width
        longest = -(-(max(self.contexts) + ANSWER_TOKENS) // _CACHE_BLOCK) * _CACHE_BLOCK
        # One more sequence than there are: vLLM wants a block of its own. Nor does it start where a
        # sequence of the length that it is told has no room.
        return int(token * max(longest * (max(self.batches) + 1), self.max_tokens + _CACHE_BLOCK))

    @property
    def max_tokens(self) -> int:
        """The longest sequence that an engine is told of, in tokens."""
        return max(_LEAST_LENGTH, max(self.contexts) + ANSWER_TOKENS)

    def options(self, mode: str, config: dict[str, Any]) -> dict[str, Any]:
        """Return what ``vllm.LLM`` is told beside the checkpoint.

        Args:
            mode: of :data:`.engine_modes.MODES` or ``HUMMING``.
            config: the model's ``config.json``.
        """
        sizes = sorted({*self.batches, *_PREFILL_SIZES})
        own = {
            "max_model_len": self.max_tokens,
            "max_num_seqs": max(self.batches),
            # The modes' engines lie on the card together: each takes what it needs, none a share.
            "kv_cache_memory_bytes": self.cache_bytes(config),
            "gpu_memory_utilization": 0.05,
            "jit_monitor_mode": self.jit_monitor,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        if self.ranks > 1:
            own |= {"tensor_parallel_size": self.ranks}
        return _ENGINE | own | engine_options(mode, sizes)


class Cell(NamedTuple):
    """What one cell took.

    Attributes:
        tokens_per_s: generated, prompts' prefill included in the time.
        decode_ms: of one decode step.
    """

    tokens_per_s: float
    decode_ms: float


class Engine:
    """An engine in this process."""

    def __init__(
        self, checkpoint: Path, mode: str, settings: Settings, profiled: bool = False
    ) -> None:
        """Start it.

        Args:
            checkpoint: of :func:`.engine_checkpoint.write`, or any other vLLM loads.
            mode: one of :data:`.engine_modes.MODES`; ``TAUT_KERNELS`` already has its first part.
            settings: of the run.
            profiled: :meth:`profile` will be called.
        """
        import torch
        from vllm import LLM

        from taut_bench import engine_profile

        self._mode, self._settings = mode, settings
        self._traces = Path(tempfile.mkdtemp(prefix="taut-traces-")) if profiled else None
        profiling = engine_profile.options(self._traces) if self._traces else {}
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        begun = time.perf_counter()
        self._llm = LLM(model=str(checkpoint), **settings.options(mode, config), **profiling)
        self.start_s = time.perf_counter() - begun
        generator = torch.Generator().manual_seed(1)
        shape = (max(settings.batches), max(settings.contexts))
        self._tokens = torch.randint(10, 1000, shape, generator=generator).tolist()

    def _seconds(self, context: int, batch: int, answer: int) -> float:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt[:context]} for prompt in self._tokens[:batch]]
        sampling = SamplingParams(max_tokens=answer, **_GREEDY)
        start = time.perf_counter()
        self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def settle(self) -> None:
        """Answer until that gets no faster: an engine's first second is slower than the others."""
        first = functools.partial(self._seconds, *next(self._settings.cells()), ANSWER_TOKENS)
        last = first()
        for _ in range(_FIRST_ANSWERS - 1):
            now = first()
            if now > last * (1 - _SETTLED):
                return
            last = now

    def measure(self, context: int, batch: int) -> Cell:
        """Time one cell.

        Args:
            context: tokens of a prompt.
            batch: prompts at once.
        """
        seconds = functools.partial(self._seconds, context, batch)
        long = context * batch >= _LONG_PREFILL
        seconds(8)
        for _ in range(1 if long else _WARM_UPS):
            seconds(1)
        times = min(2, self._settings.repeats) if long else self._settings.repeats
        whole = statistics.median(seconds(ANSWER_TOKENS) for _ in range(times))
        prefill = statistics.median(seconds(1) for _ in range(times))
        step = (whole - prefill) / (ANSWER_TOKENS - 1) * 1e3
        return Cell(batch * ANSWER_TOKENS / whole, step)

    def profile(self, path: Path) -> None:
        """Write decode steps by kernel.

        Args:
            path: of the CSV; none is written where the profiler fails.
        """
        from taut_bench import engine_profile

        traces, self._traces = self._traces, None
        if traces is None:
            raise ValueError("profile: the engine was not started with profiled=True")
        first = functools.partial(self._seconds, self._settings.contexts[0])
        calls: dict[int, Callable[[], float]] = {
            batch: functools.partial(first, batch, _PROFILED_TOKENS)
            for batch in self._settings.batches
        }
        try:
            engine_profile.record_all(self._llm, self._mode, calls, traces, path)
        except Exception as error:  # no profile is worth the figures before it
            sys.stdout.write(f"{self._mode}: the profile failed: {error}\n")
        finally:
            shutil.rmtree(traces, ignore_errors=True)
