"""``taut validate``."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from taut_deploy.api_key import read_api_key
from taut_deploy.commands.given_model import announce_code
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, TrustRemoteCodeFlag
from taut_deploy.commands.output import print_facts, print_json
from taut_deploy.commands.validate_options import (
    Access,
    Latency,
    Question,
    Sampling,
    Servers,
    Tasks,
)
from taut_deploy.progress import progress_reporter
from taut_deploy.validate import ValidationJob, ValidationResult, run_validation
from taut_deploy.validate.errors import CouldNotValidateError


@with_groups
def validate(
    *,
    question: Question,
    sampling: Sampling,
    tasks: Tasks,
    device: Annotated[str, typer.Option(help="cpu or cuda, for directories.")] = "cpu",
    servers: Servers,
    accept_lower_bound: Annotated[
        bool, typer.Option(help="Let a KL known only as a lower bound (servers) pass.")
    ] = False,
    latency: Latency,
    served: Annotated[
        bool,
        typer.Option(
            "--served/--no-served",
            help="Start a worker for a candidate directory and compare what it serves.",
        ),
    ] = True,
    access: Access,
    trust_remote_code: TrustRemoteCodeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two models with statistics: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 could not run.

    Accuracy always, latency where both models are URLs. Servers get TAUT_API_KEY as bearer token.
    """
    from taut_deploy.validate.headers import parse_headers

    if not question.explain:
        question.require_all()
    with progress_reporter(quiet=as_json or question.explain) as report:
        job = ValidationJob(
            baseline=_locate(question.baseline or "."),
            candidate=_locate(question.candidate or "."),
            text=question.text or Path(),
            policy=question.policy,
            output=question.output or Path(),
            **sampling.for_job(),
            **tasks.for_job(quick=sampling.quick),
            device=device,
            **asdict(servers),
            api_key=read_api_key(access.api_key_file, os.environ, CouldNotValidateError),
            baseline_headers=parse_headers(access.baseline_header or (), "--baseline-header"),
            candidate_headers=parse_headers(access.candidate_header or (), "--candidate-header"),
            latency=False if sampling.quick and latency.latency is None else latency.latency,
            latency_plan=latency.plan(),
            accept_lower_bound=accept_lower_bound,
            served=served and not sampling.quick,
            trust_remote_code=trust_remote_code,
            resume=question.resume,
            progress=lambda stage, done, total: report(done, total, stage),
        )
        if question.explain:
            _explain(job, question, as_json=as_json)
        _announce_code_of(job)
        result = _recorded(job, question.sign)
    _answer(result, as_json=as_json)


def _announce_code_of(job: ValidationJob) -> None:
    for side in (job.baseline, job.candidate):
        if os.path.isdir(side):  # noqa: PTH112 - never raises
            announce_code(Path(side), job.trust_remote_code)


def _recorded(job: ValidationJob, key: Path | None) -> ValidationResult:
    """Run a job, and write its verdict into the candidate's manifest."""
    from taut_deploy.validate.record import record, signer_for

    signer = signer_for(job, key)
    result = run_validation(job)
    record(job, result, signer)
    return result


def _answer(result: ValidationResult, *, as_json: bool) -> NoReturn:
    if as_json:
        print_json(_summary(result))
    else:
        typer.echo(result.report_markdown.read_text(encoding="utf-8"))
    raise typer.Exit(result.exit_code)


def _explain(job: ValidationJob, question: Question, *, as_json: bool) -> NoReturn:
    from taut_deploy.validate.explain import explain, tokens_per_second

    facts = explain(job)
    if question.baseline is not None:
        from taut_deploy.validate.sides import find_side

        speed = tokens_per_second(find_side(job, "baseline").open(job.device))
        # Both models; the compressed one is taken to be as fast.
        seconds = 2 * facts["tokens_per_model"] / speed
        facts |= {"tokens_per_second": round(speed, 1), "seconds": round(seconds)}
    if as_json:
        print_json(facts)
    else:
        print_facts(facts)
    raise typer.Exit(0)


def _summary(result: ValidationResult) -> dict[str, Any]:
    return {
        "verdict": result.verdict.value,
        "verdicts": result.report["verdicts"],
        "report": str(result.report_json),
        "junit": str(result.report_junit),
        "page": str(result.report_page),
    }


def _locate(reference: str) -> str:
    """A URL or directory as it is; a name in the model store as its directory."""
    from taut_deploy.home import TautHome
    from taut_deploy.models.names import is_name, stored_name

    if "://" in reference or os.path.exists(reference):  # noqa: PTH110 - never raises
        return reference
    name = stored_name(reference)
    stored = TautHome.from_environment().models / name
    return str(stored) if is_name(name) and stored.is_dir() else reference
