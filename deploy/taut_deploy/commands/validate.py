"""``taut validate``."""

import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from taut_deploy.commands.given_model import announce_code
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import print_facts, print_json, say
from taut_deploy.commands.validate_options import (
    Access,
    Directories,
    Latency,
    Question,
    Sampling,
    Tasks,
)
from taut_deploy.progress import progress_reporter
from taut_deploy.validate import Servers, ValidationJob, ValidationResult, run_validation


@with_groups
def validate(
    *,
    question: Question,
    sampling: Sampling,
    tasks: Tasks,
    directories: Directories,
    servers: Servers,
    accept_lower_bound: Annotated[
        bool, typer.Option(help="Let a KL known only as a lower bound (servers) pass.")
    ] = False,
    latency: Latency,
    access: Access,
    as_json: JsonFlag = False,
) -> None:
    """Compare two models with statistics: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 could not run.

    Accuracy always, latency where both models are URLs. Servers get TAUT_API_KEY as bearer token.
    """
    if not question.explain:
        question.require_all()
    with progress_reporter(quiet=as_json or question.explain) as report:
        job = ValidationJob(
            baseline=_locate(question.baseline or "."),
            candidate=_locate(question.candidate or "."),
            text=question.text or Path(),
            policy=question.policy,
            output=question.output or Path(),
            sampling=sampling.for_job(),
            items=tasks.for_job(quick=sampling.quick),
            directories=directories.for_job(quick=sampling.quick),
            servers=servers,
            access=access.for_job(),
            latency=False if sampling.quick and latency.latency is None else latency.latency,
            latency_plan=latency.plan(),
            accept_lower_bound=accept_lower_bound,
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
            announce_code(Path(side), job.directories.trust_remote_code)


def _recorded(job: ValidationJob, key: Path | None) -> ValidationResult:
    """Run a job, and write its verdict into the candidate's manifest."""
    from taut_deploy.validate.record import record, signer_for

    signer = signer_for(job, key)
    result = run_validation(job, say)
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

        speed = tokens_per_second(find_side(job, "baseline").open(job.directories.device))
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
