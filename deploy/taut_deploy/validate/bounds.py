"""The sections ``tasks:`` and ``slices:`` of a policy.

::

    tasks:
      arc: {file: arc.jsonl, recovery: {min: 0.98}, flips: {max: 0.07}}
      any: {recovery: {min: 0.98}}      # tasks of --task and --lm-eval that have no entry
    slices:
      structured: {valid_difference: {min: -0.05}}
      chat: {length_ratio: {min: 0.8, max: 1.25}}
"""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from taut_deploy.validate.limits import Limit, Strict, check_ranges

ANY = "any"
_SHARE, _DIFFERENCE, _RATIO = (0.0, 1.0), (-1.0, 1.0), (0.0, math.inf)

_Ranges = dict[str, tuple[float, float]]


class Bounds(Strict):
    """Limits on metrics, and what else a section says."""

    ranges: ClassVar[_Ranges] = {}
    required: Annotated[bool, Field(strict=True)] = True

    @model_validator(mode="after")
    def _within_ranges(self) -> "Bounds":
        check_ranges(self.limits, self.ranges)
        return self

    @property
    def limits(self) -> dict[str, Limit]:
        """The limits that were given, by metric."""
        named = {name: getattr(self, name) for name in self.ranges}
        return {name: limit for name, limit in named.items() if limit is not None}


class TaskBounds(Bounds):
    """Limits on one task.

    Args:
        file: JSON lines, relative to the policy's file; None for a task of the command line.
        score: what a choice is chosen by: the sum of its log-probabilities, or that per byte.
        recovery: accuracy of the candidate over the baseline's.
        difference: candidate's accuracy less the baseline's.
        flips: share of items that one of the two alone answers rightly.
        max_items: at most as many are asked.
        required: whether a candidate may not pass where the task was not run.
    """

    ranges: ClassVar[_Ranges] = {"recovery": _RATIO, "difference": _DIFFERENCE, "flips": _SHARE}
    file: str | None = None
    score: Literal["sum", "per_byte"] = "sum"
    recovery: Limit | None = None
    difference: Limit | None = None
    flips: Limit | None = None
    max_items: Annotated[int, Field(ge=2, strict=True)] = 5000

    def margin(self, accuracy: float) -> float | None:
        """How much accuracy may be lost at most; None where no limit says so.

        Args:
            accuracy: of the baseline.
        """
        margins = []
        if self.recovery is not None and self.recovery.min is not None:
            margins.append(accuracy * (1 - self.recovery.min))
        if self.difference is not None and self.difference.min is not None:
            margins.append(-self.difference.min)
        return min(margins, default=None)


class SliceBounds(Bounds):
    """Limits on one slice; ``file`` has prompts in place of the shipped ones."""

    file: str | None = None


class StructuredBounds(SliceBounds):
    """Answers in JSON: share that is valid against its schema, candidate less baseline."""

    ranges: ClassVar[_Ranges] = {"valid_difference": _DIFFERENCE}
    valid_difference: Limit | None = None


class ToolBounds(SliceBounds):
    """Tool calls: share that is valid, candidate less baseline, and share that names one tool."""

    ranges: ClassVar[_Ranges] = {"valid_difference": _DIFFERENCE, "same_tool": _SHARE}
    valid_difference: Limit | None = None
    same_tool: Limit | None = None


class LongContextBounds(SliceBounds):
    """Long prompts: needles found, and perplexity at the last quarter of the window.

    ``tokens`` limits the window; the model's own is taken where it is shorter.
    """

    ranges: ClassVar[_Ranges] = {"needle_difference": _DIFFERENCE, "perplexity_ratio": _RATIO}
    needle_difference: Limit | None = None
    perplexity_ratio: Limit | None = None
    tokens: Annotated[int, Field(ge=64, strict=True)] = 2048


class CodeBounds(SliceBounds):
    """Code: completions that parse, and the likelihood of given code."""

    ranges: ClassVar[_Ranges] = {
        "parses_difference": _DIFFERENCE,
        "perplexity_ratio": _RATIO,
        "mean_kl": _RATIO,
    }
    parses_difference: Limit | None = None
    perplexity_ratio: Limit | None = None
    mean_kl: Limit | None = None


class LanguageBounds(SliceBounds):
    """Languages other than English: the likelihood of given text."""

    ranges: ClassVar[_Ranges] = {"perplexity_ratio": _RATIO, "mean_kl": _RATIO}
    perplexity_ratio: Limit | None = None
    mean_kl: Limit | None = None


class ChatBounds(SliceBounds):
    """Conversations: length of answers, endless loops, and why an answer ended."""

    ranges: ClassVar[_Ranges] = {
        "length_ratio": _RATIO,
        "loop_difference": _DIFFERENCE,
        "same_finish": _SHARE,
    }
    length_ratio: Limit | None = None
    loop_difference: Limit | None = None
    same_finish: Limit | None = None


class Slices(Strict):
    """The slices a policy asks for; one without limits is measured and not judged."""

    structured: StructuredBounds | None = None
    tools: ToolBounds | None = None
    long_context: LongContextBounds | None = None
    code: CodeBounds | None = None
    languages: LanguageBounds | None = None
    chat: ChatBounds | None = None

    @property
    def named(self) -> dict[str, SliceBounds]:
        """The slices that were given, by name."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: bounds for name, bounds in found.items() if bounds is not None}


SLICE_NAMES = tuple(Slices.model_fields)
