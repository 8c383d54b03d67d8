"""``taut validate``."""

from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.output import JsonFlag, print_json
from taut_deploy.progress import progress_reporter


def validate(
    baseline: Annotated[str, typer.Option(help="Uncompressed model: directory or URL.")],
    candidate: Annotated[str, typer.Option(help="Compressed model: directory or URL.")],
    policy: Annotated[str, typer.Option(help="Built-in policy or YAML file.")],
    output: Annotated[Path, typer.Option(help="Directory for report.json and report.md.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to judge on; not the calibration text.")],
    sequences: Annotated[int, typer.Option(min=2, help="Sequences to compare.")] = 32,
    sequence_length: Annotated[int, typer.Option(min=8, help="Tokens per sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: JsonFlag = False,
) -> None:
    """Compare two models with statistics. Exit 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 could not run."""
    from taut_deploy.checkpoint import is_checkpoint, record_validation
    from taut_deploy.validate import ValidationJob, run_validation

    with progress_reporter(quiet=as_json) as report:
        job = ValidationJob(
            baseline=baseline,
            candidate=candidate,
            text=text,
            policy=policy,
            output=output,
            sequences=sequences,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            progress=report,
        )
        result = run_validation(job)
    if is_checkpoint(Path(candidate)):
        record_validation(Path(candidate), {"verdict": result.verdict.value, "policy": result.policy})
    if as_json:
        print_json(result.as_json())
    else:
        typer.echo((output / "report.md").read_text(encoding="utf-8"))
    raise typer.Exit(result.exit_code)
