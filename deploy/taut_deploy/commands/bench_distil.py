"""``taut bench distil``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.bench_samples import Making, Samples, make_folders, open_place, tell
from taut_deploy.commands.device import require_device
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, ModelArgument, ResultsFolder
from taut_deploy.commands.output import line_reporter
from taut_deploy.errors import MeasureError


@dataclass(frozen=True)
class Budget:
    """How long each student is trained: one of both.

    Args:
        seconds: Seconds of training for each student.
        tokens: Tokens to train on instead.
    """

    seconds: Annotated[float | None, typer.Option(min=1.0)] = None
    tokens: Annotated[int | None, typer.Option(min=1)] = None


@dataclass(frozen=True)
class Steps:
    """What a step of training takes.

    Args:
        batch_size: Sequences of one step.
        micro_batch: Sequences in memory at a time.
        self_sequences: Sequences that 'self' stands for.
    """

    batch_size: Annotated[int, typer.Option(min=1)] = 64
    micro_batch: Annotated[int, typer.Option(min=1)] = 32
    self_sequences: Annotated[int, typer.Option(min=1)] = 2048


@with_groups
def distil(
    *,
    model: ModelArgument,
    text: Annotated[Path, typer.Option(dir_okay=False, help="UTF-8 text to judge on.")],
    train: Annotated[
        list[str],
        typer.Option(
            help="NAME=SOURCE,SOURCE: corpus, text files, .npy of token ids, or self, which the "
            "base model writes; repeat for another column of results."
        ),
    ],
    budget: Budget,
    only: Annotated[str, typer.Option(help="Students with commas, or all.")] = "all",
    samples: Samples,
    fit_steps: Annotated[
        int,
        typer.Option(
            min=0, max=200, help="Steps that fit a student to each block's output; for a GPU."
        ),
    ] = 0,
    steps: Steps,
    making: Making,
    output: ResultsFolder = Path("bench-distil"),
    as_json: JsonFlag = False,
) -> None:
    """What each way of compressing costs, one shot and after distillation by the base model.

    Every student is judged by perplexity ratio and KL to the base. A training text that shares a
    passage with --text is refused. Rows that are in the output are not measured again.
    """
    require_device(making.device)
    from taut_deploy.bench.distil import Plan, choose_students, measure
    from taut_deploy.bench.distil_report import RESULTS, markdown
    from taut_deploy.bench.distil_texts import parse_text_sets
    from taut_deploy.bench.serve_report import describe_run

    if (budget.seconds is None) == (budget.tokens is None):
        raise MeasureError("--seconds, --tokens: give one of them, the budget of each training")
    students, sets = choose_students(only), parse_text_sets(train)
    work = make_folders(output, making.work, "students")
    place = open_place(model, samples, making.device, fit_steps)
    judged = (text, samples.sequences, tuple(sets), students, budget.seconds, budget.tokens)
    plan = Plan(
        place, *judged, steps.batch_size, steps.micro_batch, steps.self_sequences, work, output
    )
    rows = measure(plan, line_reporter(quiet=as_json))
    tell(RESULTS.write_table(output, markdown(rows, describe_run())), rows, as_json=as_json)
