"""The options of ``taut validate``, in the groups in which they are used."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

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
    """What is compared, on which text, judged by what, and where the answer goes."""

    policy: Annotated[str, typer.Option(help="Built-in policy or YAML file.")]
    baseline: Annotated[
        str | None, typer.Option(help="Uncompressed model: name, directory or URL.")
    ] = None
    candidate: Annotated[
        str | None, typer.Option(help="Compressed model: name, directory or URL.")
    ] = None
    output: Annotated[
        Path | None, typer.Option(help="Directory for report.html, .json, .md and junit.xml.")
    ] = None
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to judge on; not the calibration text.")
    ] = None
    sign: Annotated[
        Path | None, typer.Option(help="Private key in PEM: sign the verdict in the checkpoint.")
    ] = None
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what the policy would need, and run nothing.")
    ] = False

    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Go on with a run that broke off; by default if its inputs are the same.",
        ),
    ] = None

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
    """How much of the text is compared, and how often it is resampled."""

    sequences: Annotated[int, typer.Option(help="Sequences to compare.")] = 32
    max_sequences: Annotated[
        int | None, typer.Option(help="Draw more, up to so many, while a limit is undecided.")
    ] = None
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512
    seed: Annotated[int, typer.Option(help="Seed of bootstrap and latency load.")] = 0
    bootstrap: Annotated[int, typer.Option(help="Bootstrap resamples.")] = 2000
    noise_sequences: Annotated[
        int, typer.Option(help="Sequences of the baseline-against-itself run; 0 leaves it out.")
    ] = 8
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="At most 16 sequences of 256 tokens, 2 of noise, 200 items a task; none served.",
        ),
    ] = False

    def for_job(self) -> dict[str, Any]:
        """The fields of a job; ``--quick`` lowers what is more."""
        fields = asdict(self)
        if not fields.pop("quick"):
            return fields
        lowered = {name: min(fields[name], most) for name, most in _QUICK.items()}
        return fields | lowered | {"max_sequences": None}


@dataclass(frozen=True)
class Tasks:
    """What both models are asked beside the text."""

    task: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines of items, beside the policy's; repeatable."),
    ] = None
    lm_eval: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, comma between (taut[eval]).")
    ] = None
    lm_eval_path: Annotated[
        Path | None, typer.Option(help="Directory with your own tasks for it.")
    ] = None
    max_items: Annotated[int | None, typer.Option(help="At most as many items of a task.")] = None
    slice: Annotated[
        list[str] | None,
        typer.Option(
            help="structured, tools, long_context, code, languages or chat, beside the policy's;"
            " NAME=FILE for own prompts; repeatable."
        ),
    ] = None

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
    """What is asked of a model behind a URL."""

    top_k: Annotated[int, typer.Option(help="Log-probabilities asked of a server.")] = 20
    baseline_model: Annotated[str | None, typer.Option(help="Model name at its URL.")] = None
    candidate_model: Annotated[str | None, typer.Option(help="Model name at its URL.")] = None
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for one server answer.")] = 300.0


@dataclass(frozen=True)
class Latency:
    """Whether latency is measured, and how much of it."""

    latency: Annotated[
        bool | None,
        typer.Option(
            "--latency/--no-latency",
            help="Measure latency; without either flag, where both models are URLs.",
        ),
    ] = None
    latency_requests: Annotated[int, typer.Option(help="Requests per model and concurrency.")] = (
        _PLAN.requests
    )
    latency_concurrency: Annotated[str, typer.Option(help="Requests in flight, e.g. 1,8.")] = (
        ",".join(map(str, _PLAN.concurrency))
    )
    latency_prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = (
        _PLAN.prompt_tokens
    )
    latency_output_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = (
        _PLAN.output_tokens
    )
    latency_timeout_s: Annotated[
        float, typer.Option(help="Seconds after which an answer counts as failed.")
    ] = _PLAN.timeout_s

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
    """What is sent with every request to a URL."""

    baseline_header: Annotated[
        list[str] | None, typer.Option(help="'Name: value' for the baseline's URL; repeatable.")
    ] = None
    candidate_header: Annotated[
        list[str] | None, typer.Option(help="'Name: value' for the candidate's URL; repeatable.")
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with a bearer key for the URLs.")
    ] = None
