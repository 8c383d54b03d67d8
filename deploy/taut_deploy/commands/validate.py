"""``taut validate``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.output import JsonFlag, print_json
from taut_deploy.progress import progress_reporter


def validate(
    baseline: Annotated[str, typer.Option(help="Uncompressed model: name, directory or URL.")],
    candidate: Annotated[str, typer.Option(help="Compressed model: name, directory or URL.")],
    policy: Annotated[str, typer.Option(help="Built-in policy or YAML file.")],
    output: Annotated[Path, typer.Option(help="Directory for report.json and report.md.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to judge on; not the calibration text.")],
    sequences: Annotated[int, typer.Option(help="Sequences to compare.")] = 32,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
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
    as_json: JsonFlag = False,
) -> None:
    """Compare two models with statistics: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 could not run.

    TAUT_API_KEY, if set, is sent to servers as a bearer token.
    """
    from taut_deploy.checkpoint import is_checkpoint, record_validation
    from taut_deploy.validate import ValidationJob, run_validation

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
            api_key=os.environ.get("TAUT_API_KEY"),
            timeout_s=timeout_s,
            accept_lower_bound=accept_lower_bound,
            progress=lambda stage, done, total: report(done, total, stage),
        )
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
        print_json({"verdict": result.verdict.value, "report": str(output / "report.json")})
    else:
        typer.echo((output / "report.md").read_text(encoding="utf-8"))
    raise typer.Exit(result.exit_code)


def _locate(reference: str) -> str:
    """A URL or directory as it is; a name in the model store as its directory."""
    from taut_deploy.home import TautHome

    if "://" in reference or Path(reference).exists():
        return reference
    stored = TautHome.from_environment().models / reference
    return str(stored) if stored.is_dir() else reference
