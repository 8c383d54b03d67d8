"""``taut validate``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.output import JsonFlag, TrustRemoteCodeFlag, announce_code, print_json
from taut_deploy.progress import progress_reporter
from taut_deploy.validate.latency.plan import LatencyPlan, parse_concurrency

_PLAN = LatencyPlan()


def validate(
    baseline: Annotated[str, typer.Option(help="Uncompressed model: name, directory or URL.")],
    candidate: Annotated[str, typer.Option(help="Compressed model: name, directory or URL.")],
    policy: Annotated[str, typer.Option(help="Built-in policy or YAML file.")],
    output: Annotated[Path, typer.Option(help="Directory for report.json, report.md, junit.xml.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to judge on; not the calibration text.")],
    sequences: Annotated[int, typer.Option(help="Sequences to compare.")] = 32,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of bootstrap and latency load.")] = 0,
    bootstrap: Annotated[int, typer.Option(help="Bootstrap resamples.")] = 2000,
    noise_sequences: Annotated[
        int, typer.Option(help="Sequences of the baseline-against-itself run; 0 leaves it out.")
    ] = 8,
    device: Annotated[str, typer.Option(help="cpu or cuda, for directories.")] = "cpu",
    top_k: Annotated[int, typer.Option(help="Log-probabilities asked of a server.")] = 20,
    baseline_model: Annotated[str | None, typer.Option(help="Model name at its URL.")] = None,
    candidate_model: Annotated[str | None, typer.Option(help="Model name at its URL.")] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds to wait for one server answer.")
    ] = 300.0,
    accept_lower_bound: Annotated[
        bool, typer.Option(help="Let a KL known only as a lower bound (servers) pass.")
    ] = False,
    latency: Annotated[
        bool | None,
        typer.Option(
            "--latency/--no-latency",
            help="Measure latency; without either flag, where both models are URLs.",
        ),
    ] = None,
    latency_requests: Annotated[
        int, typer.Option(help="Requests per model and concurrency.")
    ] = _PLAN.requests,
    latency_concurrency: Annotated[
        str, typer.Option(help="Requests in flight, e.g. 1,8.")
    ] = ",".join(map(str, _PLAN.concurrency)),
    latency_prompt_tokens: Annotated[
        int, typer.Option(help="Tokens per prompt.")
    ] = _PLAN.prompt_tokens,
    latency_output_tokens: Annotated[
        int, typer.Option(help="Tokens per answer.")
    ] = _PLAN.output_tokens,
    latency_timeout_s: Annotated[
        float, typer.Option(help="Seconds after which an answer counts as failed.")
    ] = _PLAN.timeout_s,
    served: Annotated[
        bool,
        typer.Option(
            "--served/--no-served",
            help="Start a worker for a candidate directory and compare what it serves.",
        ),
    ] = True,
    baseline_header: Annotated[
        list[str] | None, typer.Option(help="'Name: value' for the baseline's URL; repeatable.")
    ] = None,
    candidate_header: Annotated[
        list[str] | None, typer.Option(help="'Name: value' for the candidate's URL; repeatable.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with a bearer key for the URLs.")
    ] = None,
    trust_remote_code: TrustRemoteCodeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two models with statistics: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 could not run.

    Accuracy always, latency where both models are URLs. Servers get TAUT_API_KEY as bearer token.
    """
    from taut_deploy.checkpoint import is_checkpoint, record_validation
    from taut_deploy.validate import ValidationJob, run_validation
    from taut_deploy.validate.headers import parse_headers, read_api_key

    with progress_reporter(quiet=as_json) as report:
        job = ValidationJob(
            baseline=_locate(baseline),
            candidate=_locate(candidate),
            text=text,
            policy=policy,
            output=output,
            sequences=sequences,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            bootstrap=bootstrap,
            noise_sequences=noise_sequences,
            top_k=top_k,
            baseline_model=baseline_model,
            candidate_model=candidate_model,
            api_key=read_api_key(api_key_file, os.environ),
            timeout_s=timeout_s,
            baseline_headers=parse_headers(baseline_header or (), "--baseline-header"),
            candidate_headers=parse_headers(candidate_header or (), "--candidate-header"),
            latency=latency,
            latency_plan=LatencyPlan(
                requests=latency_requests,
                concurrency=parse_concurrency(latency_concurrency),
                prompt_tokens=latency_prompt_tokens,
                output_tokens=latency_output_tokens,
                timeout_s=latency_timeout_s,
            ),
            accept_lower_bound=accept_lower_bound,
            served=served,
            trust_remote_code=trust_remote_code,
            progress=lambda stage, done, total: report(done, total, stage),
        )
        for side in (job.baseline, job.candidate):
            if os.path.isdir(side):  # noqa: PTH112 - never raises
                announce_code(Path(side), trust_remote_code)
        result = run_validation(job)
    if is_checkpoint(Path(job.candidate)):
        verdict = {
            "verdict": result.verdict.value,
            "policy": str(policy),
            "text": text.name,
            "metrics": {
                name: {"estimate": metric.estimate, "low": metric.low, "high": metric.high}
                for name, metric in result.metrics.items()
            },
        }
        record_validation(Path(job.candidate), verdict)
    if as_json:
        print_json(
            {
                "verdict": result.verdict.value,
                "verdicts": result.report["verdicts"],
                "report": str(result.report_json),
                "junit": str(result.report_junit),
            }
        )
    else:
        typer.echo(result.report_markdown.read_text(encoding="utf-8"))
    raise typer.Exit(result.exit_code)


def _locate(reference: str) -> str:
    """A URL or directory as it is; a name in the model store as its directory."""
    from taut_deploy.home import TautHome
    from taut_deploy.models.names import is_name, stored_name

    if "://" in reference or os.path.exists(reference):  # noqa: PTH110 - never raises
        return reference
    name = stored_name(reference)
    stored = TautHome.from_environment().models / name
    return str(stored) if is_name(name) and stored.is_dir() else reference
