"""What share of live answers is compared with the baseline's, and what difference is too much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from taut_service.config.settings.fields import Count, Fraction, Seconds, Section

Excess = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]


class Examples(Section):
    """Where compared answers that differ are kept, if any are.

    ``max_chars`` is what is kept of prompt and answer each, ``ratio`` the share of differing
    answers that is kept at all, ``keep_s`` for how long.
    """

    directory: Annotated[Path, Field(strict=False)]
    max_chars: Annotated[int, Field(ge=0, le=100_000)] = 200
    ratio: Fraction = 0.1
    keep_s: Seconds = 86_400.0
    max_files: Annotated[int, Field(ge=1, le=100_000)] = 1000


class GuardSettings(Section):
    """The comparison of variants with their baseline, and its bounds.

    ``sample`` of the answers are read again by both (teacher forcing): the first
    ``max_answer_tokens`` of an answer, behind a prompt that leaves room within ``max_tokens``.
    The means of clipped KL, of disagreement and of faults may exceed the baseline's own noise by
    their ``max_…_excess``; ``alpha`` is the probability that harmless variants ever alarm.
    All of it costs at most ``max_cpu_share`` of the gateway's other CPU time; None has no bound.
    ``max_slowdown`` bounds the median of the variant's reading time over the baseline's.
    Where a request leaves ``temperature`` to the worker, answers of both may differ in surprise
    (mean negative log-likelihood of a token, by the baseline) by ``max_surprise_excess_nats``.
    """

    sample: Fraction = 0.02
    max_cpu_share: Fraction | None = 0.1
    top_k: Annotated[int, Field(ge=1, le=20)] = 5
    max_tokens: Annotated[int, Field(ge=16, le=131_072)] = 2048
    max_answer_tokens: Count = 256
    regenerate: bool = True
    max_queued: Annotated[int, Field(ge=1, le=10_000)] = 64
    concurrency: Annotated[int, Field(ge=1, le=64)] = 1
    timeout_s: Seconds = 60.0
    alpha: Excess = 0.05
    kl_clip_nats: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 0.5
    max_kl_excess_nats: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 0.02
    max_disagreement_excess: Excess = 0.03
    max_surprise_excess_nats: Annotated[float, Field(gt=0, lt=2, allow_inf_nan=False)] = 0.25
    max_fault_excess: Excess = 0.05
    max_error_rate: Excess = 0.05
    max_slowdown: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 1.5
    keep: Literal["nothing", "examples"] = "nothing"
    examples: Examples | None = None

    @model_validator(mode="after")
    def _bounds_fit(self) -> GuardSettings:
        if self.max_kl_excess_nats >= self.kl_clip_nats:
            raise ValueError("max_kl_excess_nats must be smaller than kl_clip_nats")
        if (self.keep == "examples") != (self.examples is not None):
            raise ValueError("'examples' is needed with 'keep: examples', and only then")
        return self
