"""The options of ``taut validate``, in the groups in which they are used."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.api_key import read_api_key
from taut_deploy.commands.options import JudgedTextOption, PolicyOption, TrustRemoteCodeFlag
from taut_deploy.validate import settings
from taut_deploy.validate.errors import CouldNotValidateError
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


@dataclass(frozen=True, kw_only=True)
class Sampling(settings.Sampling):
    """The job's, and less of it.

    Args:
        quick: At most 16 sequences of 256 tokens, 2 of noise, 200 items a task; none served.
    """

    quick: Annotated[bool, typer.Option("--quick")] = False

    def for_job(self) -> settings.Sampling:
        """What the job has of it; ``--quick`` lowers what is more."""
        given = asdict(self)
        if given.pop("quick"):
            lowered = {name: min(given[name], most) for name, most in _QUICK.items()}
            given |= lowered | {"max_sequences": None}
        return settings.Sampling(**given)


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

    def for_job(self, *, quick: bool) -> settings.Items:
        """What the job has of it.

        Args:
            quick: ask fewer items.
        """
        names = (name.strip() for name in (self.lm_eval or "").split(","))
        fewer = min(self.max_items or QUICK_ITEMS, QUICK_ITEMS)
        return settings.Items(
            tasks=tuple(self.task or ()),
            harness=tuple(name for name in names if name),
            harness_path=self.lm_eval_path,
            slices=tuple(self.slice or ()),
            max_items=fewer if quick else self.max_items,
        )


@dataclass(frozen=True, kw_only=True)
class Directories(settings.Directories):
    """The job's, with a worker by default."""

    served: Annotated[bool, typer.Option("--served/--no-served")] = True
    trust_remote_code: TrustRemoteCodeFlag = False

    def for_job(self, *, quick: bool) -> settings.Directories:
        """What the job has of it.

        Args:
            quick: start no worker.
        """
        return settings.Directories(**asdict(self) | {"served": self.served and not quick})


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

    def for_job(self) -> settings.Access:
        """What the job has of it.

        Raises:
            CouldNotValidateError: the file of the key or a header cannot be read; names the flag.
        """
        from taut_deploy.validate.headers import parse_headers

        return settings.Access(
            api_key=read_api_key(self.api_key_file, os.environ, CouldNotValidateError),
            baseline_headers=parse_headers(self.baseline_header or (), "--baseline-header"),
            candidate_headers=parse_headers(self.candidate_header or (), "--candidate-header"),
        )
