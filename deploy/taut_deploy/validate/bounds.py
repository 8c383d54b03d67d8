"""The sections ``tasks:`` and ``slices:`` of a policy.

::

    tasks:
      arc: {file: arc.jsonl, recovery: {min: 0.98}, flips: {max: 0.07}}
      hellaswag: {packaged: true, flips: {max: 0.1}}      # one of ``taut task list``
      any: {recovery: {min: 0.98}}      # tasks of --task and --lm-eval that have no entry
    slices:
      structured: {valid_difference: {min: -0.05}}
      chat: {length_ratio: {min: 0.8, max: 1.25}}
"""

from typing import Annotated, Literal

from pydantic import Field

from taut_deploy.validate.limits import DifferenceLimit, Limits, RatioLimit, ShareLimit, Strict

ANY = "any"


class Bounds(Limits):
    """Limits on metrics, and what else a section says."""

    required: Annotated[bool, Field(strict=True)] = True


class TaskBounds(Bounds):
    """Limits on one task.

    Args:
        file: JSON lines, relative to the policy's file; None for a task of the command line.
        packaged: the section's name is one of ``taut task list``, fetched when it is first used.
        score: what a choice is chosen by: the sum of its log-probabilities, or that per byte.
        recovery: accuracy of the candidate over the baseline's.
        difference: candidate's accuracy less the baseline's.
        flips: share of items that one of the two alone answers rightly.
        max_items: at most as many are asked.
        required: whether a candidate may not pass where the task was not run.
    """

    file: str | None = None
    packaged: Annotated[bool, Field(strict=True)] = False
    score: Literal["sum", "per_byte"] = "sum"
    recovery: RatioLimit = None
    difference: DifferenceLimit = None
    flips: ShareLimit = None
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

    valid_difference: DifferenceLimit = None


class ToolBounds(SliceBounds):
    """Tool calls: share that is valid, candidate less baseline, and share that names one tool."""

    valid_difference: DifferenceLimit = None
    same_tool: ShareLimit = None


class LongContextBounds(SliceBounds):
    """Long prompts: needles found, and perplexity at the last quarter of the window.

    ``tokens`` limits the window; the model's own is taken where it is shorter.
    """

    needle_difference: DifferenceLimit = None
    perplexity_ratio: RatioLimit = None
    tokens: Annotated[int, Field(ge=64, strict=True)] = 2048


class CodeBounds(SliceBounds):
    """Code: completions that parse, and the likelihood of given code."""

    parses_difference: DifferenceLimit = None
    perplexity_ratio: RatioLimit = None
    mean_kl: RatioLimit = None


class LanguageBounds(SliceBounds):
    """Languages other than English: the likelihood of given text."""

    perplexity_ratio: RatioLimit = None
    mean_kl: RatioLimit = None


class ChatBounds(SliceBounds):
    """Conversations: length of answers, endless loops, and why an answer ended."""

    length_ratio: RatioLimit = None
    loop_difference: DifferenceLimit = None
    same_finish: ShareLimit = None


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
