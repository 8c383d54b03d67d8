"""The options of ``taut validate``, in the groups in which they are used."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from taut_deploy.commands.options import JudgedTextOption, PolicyOption
from taut_deploy.validate.latency.plan import LatencyPlan, parse_concurrency

_PLAN = LatencyPlan()
# Under three minutes for a model of 135M parameters on two cores.
_QUICK = {"sequences": 16, "sequence_length": 256, "noise_sequences": 2}
QUICK_ITEMS = 200
NO_TEXT = (
    "give --text FILE: UTF-8 text that no recipe was calibrated on, best of the kind that the model"
    " is for; the texts that taut has of its own calibrate, so none of them may judge"
)


@dataclass(frozen=True)
class Question:
    """What is compared, on which text, judged by what, and where the answer goes.

    Args:
        baseline: Uncompressed model: name, directory or URL.
        candidate: Compressed model: name, directory or URL.
        output: Directory for report.html, .json, .md, .prom and junit.xml.
        sign: Private key in PEM: sign the verdict in the checkpoint.
        explain: Say what the policy would need, and run nothing.
        resume: Go on with a run that broke off; by default if its inputs are the same.
    """

    policy: PolicyOption
    baseline: str | None = None
    candidate: str | None = None
    output: Path | None = None
    text: JudgedTextOption = None
    sign: Path | None = None
    explain: Annotated[bool, typer.Option("--explain")] = False
    resume: Annotated[bool | None, typer.Option("--resume/--no-resume")] = None

    def require_all(self) -> None:
        """Refuse a run without its models, its text or its place.

        Raises:
            BadParameter: naming the option.
        """
        for name in ("baseline", "candidate", "output", "text"):
            if name == "text" and self.text is None:
                raise typer.BadParameter(NO_TEXT)
            if getattr(self, name) is None:
                raise typer.BadParameter(f"give --{name}; only --explain goes without it")


@dataclass(frozen=True)
class Sampling:
    """How much of the text is compared, and how often it is resampled.

    Args:
        sequences: Sequences to compare.
        max_sequences: Draw more, up to so many, while a limit is undecided.
        sequence_length: Tokens per sequence.
        seed: Seed of bootstrap and latency load.
        bootstrap: Bootstrap resamples.
        noise_sequences: Sequences of the baseline-against-itself run; 0 leaves it out.
        quick: At most 16 sequences of 256 tokens, 2 of noise, 200 items a task; none served.
    """

    sequences: int = 32
    max_sequences: int | None = None
    sequence_length: int = 512
    seed: int = 0
    bootstrap: int = 2000
    noise_sequences: int = 8
    quick: Annotated[bool, typer.Option("--quick")] = False

    def for_job(self) -> dict[str, Any]:
        """The fields of a job; ``--quick`` lowers what is more."""
        fields = asdict(self)
        if not fields.pop("quick"):
            return fields
        lowered = {name: min(fields[name], most) for name, most in _QUICK.items()}
        return fields | lowered | {"max_sequences": None}


@dataclass(frozen=True)
class Tasks:
    """What both models are asked beside the text.

    Args:
        task: JSON lines of items, or a name of `taut task list`; repeatable.
        lm_eval: Tasks of lm-evaluation-harness, comma between (taut[eval]).
        lm_eval_path: Directory with your own tasks for it.
        max_items: At most as many items of a task.
        slice: structured, tools, long_context, code, languages or chat, beside the policy's;
            NAME=FILE for own prompts; repeatable.
    """

    task: list[Path] | None = None
    lm_eval: str | None = None
    lm_eval_path: Path | None = None
    max_items: int | None = None
    slice: list[str] | None = None

    def for_job(self, *, quick: bool) -> dict[str, Any]:
        """The fields of a job.

        Args:
            quick: ask fewer items.
        """
        names = (name.strip() for name in (self.lm_eval or "").split(","))
        return {
            "tasks": tuple(self.task or ()),
            "harness": tuple(name for name in names if name),
            "harness_path": self.lm_eval_path,
            "max_items": min(self.max_items or QUICK_ITEMS, QUICK_ITEMS)
            if quick
            else self.max_items,
            "slices": tuple(self.slice or ()),
        }


@dataclass(frozen=True)
class Servers:
    """What is asked of a model behind a URL.

    Args:
        top_k: Log-probabilities asked of a server.
        baseline_model: Model name at its URL.
        candidate_model: Model name at its URL.
        timeout_s: Seconds to wait for one server answer.
    """

    top_k: int = 20
    baseline_model: str | None = None
    candidate_model: str | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Latency:
    """Whether latency is measured, and how much of it.

    Args:
        latency: Measure latency; without either flag, where both models are URLs.
        latency_requests: Requests per model and concurrency.
        latency_concurrency: Requests in flight, e.g. 1,8.
        latency_prompt_tokens: Tokens per prompt.
        latency_output_tokens: Tokens per answer.
        latency_timeout_s: Seconds after which an answer counts as failed.
    """

    latency: Annotated[bool | None, typer.Option("--latency/--no-latency")] = None
    latency_requests: int = _PLAN.requests
    latency_concurrency: str = ",".join(map(str, _PLAN.concurrency))
    latency_prompt_tokens: int = _PLAN.prompt_tokens
    latency_output_tokens: int = _PLAN.output_tokens
    latency_timeout_s: float = _PLAN.timeout_s

    def plan(self) -> LatencyPlan:
        """Return the load of the measurement.

        Raises:
            CouldNotValidateError: a number is out of range; the flag is named.
        """
        return LatencyPlan(
            requests=self.latency_requests,
            concurrency=parse_concurrency(self.latency_concurrency),
            prompt_tokens=self.latency_prompt_tokens,
            output_tokens=self.latency_output_tokens,
            timeout_s=self.latency_timeout_s,
        )


@dataclass(frozen=True)
class Access:
    """What is sent with every request to a URL.

    Args:
        baseline_header: 'Name: value' for the baseline's URL; repeatable.
        candidate_header: 'Name: value' for the candidate's URL; repeatable.
        api_key_file: File with a bearer key for the URLs.
    """

    baseline_header: list[str] | None = None
    candidate_header: list[str] | None = None
    api_key_file: Path | None = None
