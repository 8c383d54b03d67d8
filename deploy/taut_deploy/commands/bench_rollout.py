"""``taut bench rollout``."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, ResultsFolder, VllmArguments
from taut_deploy.commands.output import line_reporter, make_folder, print_results
from taut_deploy.commands.worker_options import KvCacheGib
from taut_deploy.errors import OutputError
from taut_deploy.worker import WorkerSpec

if TYPE_CHECKING:
    from taut_deploy.bench.rollout import Rehearsal

HARM_TENSORS = "*.layers.0.*weight_scale"


@dataclass(frozen=True)
class HarmOptions:
    """What is wrong with the copy that has to be found.

    Args:
        harm_tensors: Tensors of the harmed copy that differ, as a shell pattern.
        harm_factor: What they are multiplied by.
    """

    harm_tensors: str = HARM_TENSORS
    harm_factor: float = 1.1


@dataclass(frozen=True)
class LoadOptions:
    """What clients ask.

    Args:
        prompts: A prompt on each line; default: ours.
        concurrency: Clients.
        tokens: Longest answer.
    """

    prompts: Annotated[Path | None, typer.Option(dir_okay=False)] = None
    concurrency: Annotated[int, typer.Option(min=1)] = 4
    tokens: Annotated[int, typer.Option(min=2)] = 64


@dataclass(frozen=True)
class LimitOptions:
    """How long it may take.

    Args:
        limit_s: Longest rollout of each candidate, seconds.
        start_s: Longest start of a worker, seconds.
    """

    limit_s: Annotated[float, typer.Option(min=1)] = 600.0
    start_s: Annotated[float, typer.Option(min=1)] = 900.0


@with_groups
def rollout(
    *,
    baseline: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="What serves now: a directory.")
    ],
    candidate: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint that is to take over.")
    ],
    vllm_args: VllmArguments = None,
    gateway: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="YAML with the gateway's sections guard and rollout to rehearse."
        ),
    ] = None,
    harm: HarmOptions,
    load: LoadOptions,
    limits: LimitOptions,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Context in tokens.")] = None,
    kv_cache_gib: KvCacheGib = 1,
    output: ResultsFolder = Path("bench-rollout"),
    as_json: JsonFlag = False,
) -> None:
    """Rehearse a rollout: does the guard let this candidate climb, and send a harmed one back?

    Starts three workers (baseline, candidate, and a copy of the candidate with a known harm) and a
    gateway, asks them as clients would, and starts both rollouts one after the other. Exit 1 if the
    harmed copy is not rolled back, the candidate does not reach all traffic, or a client's request
    fails. Leaves a report, the audit log and, with Chromium, pictures of the operator's page.
    """
    from taut_deploy.bench import rollout_fleet as fleet
    from taut_deploy.bench.rollout import Plan, rehearse
    from taut_deploy.bench.rollout_harm import Harm, harmed_copy
    from taut_deploy.bench.rollout_traffic import Load, read_prompts

    told = line_reporter(quiet=as_json)
    sections = fleet.read_sections(gateway)
    asked = Load(read_prompts(load.prompts), load.concurrency, load.tokens)
    baseline, candidate, output = baseline.resolve(), candidate.resolve(), output.resolve()
    wrong = Harm(harm.harm_tensors, harm.harm_factor)
    context = fleet.context_of(baseline, candidate, max_model_len)
    _make_new_folder(output)
    changed = harmed_copy(candidate, output / fleet.HARMED, wrong)
    what = f"{len(changed)} tensors x {wrong.factor:g}"
    told(f"harmed copy: {what}")
    common = WorkerSpec(
        candidate, max_model_len=context, kv_cache_gib=kv_cache_gib, extra=tuple(vllm_args or ())
    )
    directories = baseline, candidate, output / fleet.HARMED
    members = fleet.members_of(*directories, logs=output, common=common)
    plan = Plan(context, sections, asked, limits.limit_s, limits.start_s, output)
    found = asyncio.run(rehearse(plan, members, told))
    _tell(found, what, output, as_json)
    if not found.as_expected:
        raise typer.Exit(1)


def _make_new_folder(output: Path) -> None:
    make_folder(output)
    if any(output.iterdir()):
        raise OutputError(f"--output {output}: not empty; the audit log of a rehearsal is new")


def _tell(found: "Rehearsal", harm: str, output: Path, as_json: bool) -> None:
    from taut_deploy.bench.rollout_report import document, markdown, write
    from taut_deploy.bench.serve_report import describe_run

    facts = {**describe_run(), "harm": harm}
    files = map(os.path.relpath, write(found, facts, output))
    print_results(document(found, facts), markdown(found, facts), files, as_json=as_json)
