"""``taut shrink``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taut_deploy.commands.device import require_device, require_machine
from taut_deploy.commands.given_model import fetch_model
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import (
    DeviceOption,
    JsonFlag,
    JudgedTextOption,
    ModelArgument,
    PolicyOption,
    RequantizeFlag,
    TrustRemoteCodeFlag,
)
from taut_deploy.commands.output import line_reporter, print_json, say
from taut_deploy.commands.validate_options import NO_TEXT, Sampling
from taut_deploy.errors import RecipeError
from taut_deploy.files import checked_output
from taut_deploy.home import TautHome
from taut_deploy.models.names import checked_name
from taut_deploy.progress import progress_reporter
from taut_deploy.validate import Directories, ValidationJob

if TYPE_CHECKING:
    from taut_deploy.frontier.limits import SizeLimit
    from taut_deploy.frontier.request import ShrinkRequest
    from taut_deploy.frontier.walk import Frontier
    from taut_deploy.recipe import Recipe
    from taut_deploy.validate.policy import Policy

EXIT_NONE_PASSES, EXIT_BUDGET_SPENT = 1, 3
_MOST_BITS = 16.0


@dataclass(frozen=True)
class Question:
    """Which model, judged by what on which text, and where the results go.

    Args:
        output: Directory of ledger, checkpoints and results.
        sign: Private key in PEM: sign the verdict of what passes.
    """

    model: ModelArgument
    policy: PolicyOption
    text: JudgedTextOption = None
    output: Path | None = None
    sign: Path | None = None

    @property
    def judged(self) -> Path:
        """The text.

        Raises:
            BadParameter: none was given.
        """
        if self.text is None:
            raise typer.BadParameter(NO_TEXT)
        return self.text


@dataclass(frozen=True)
class Search:
    """What is tried, up to which size, and for how long.

    Args:
        memory: Of the device that serves it, such as 24GiB.
        target_bytes: At most, of its weights, such as 5GiB.
        recipe: Built-in recipe or YAML file; repeat for more. [default: all]
        target_bits: Bits a weight of the mixtures, with commas.
        budget_minutes: Stop then; the next run goes on.
        keep_all: Keep checkpoints that did not pass.
    """

    memory: str | None = None
    target_bytes: str | None = None
    recipe: list[str] | None = None
    target_bits: str | None = None
    budget_minutes: float | None = None
    keep_all: Annotated[bool, typer.Option("--keep-all")] = False


@dataclass(frozen=True)
class Machines:
    """Where the checkpoint is to run, what computes, and what may be taken and run.

    Args:
        served_by: Machine that is to serve it: here, cpu, h100 or h200.
        served: Start a worker for each candidate and compare what it serves.
    """

    served_by: str = "here"
    served: Annotated[bool, typer.Option("--served/--no-served")] = True
    device: DeviceOption = "cpu"
    requantize: RequantizeFlag = False
    trust_remote_code: TrustRemoteCodeFlag = False


@with_groups
def shrink(
    *,
    question: Question,
    search: Search,
    sampling: Sampling,
    machines: Machines,
    as_json: JsonFlag = False,
) -> None:
    """Find the smallest checkpoint that passes: 0 found, 1 none passes, 3 out of time.

    Recipes are compressed and validated from the smallest on. Every try is kept in a ledger: the
    same command again goes on, and another policy judges the figures that are there.
    """
    require_device(machines.device)
    limits = _read_limits(question, search)
    from taut_deploy.attestation import read_signer
    from taut_deploy.bench.serve_report import describe_run
    from taut_deploy.frontier import report as results
    from taut_deploy.frontier.candidates import chosen_recipes
    from taut_deploy.frontier.walk import search as find
    from taut_deploy.validate.record import sign_recorded

    signer = None if question.sign is None else read_signer(question.sign, "--sign")
    recipes, left_out = chosen_recipes(tuple(search.recipe or ()))
    request = _request(question, search, sampling, machines, limits, recipes)
    with progress_reporter(quiet=as_json) as progress:
        found = find(request, left_out, progress, line_reporter(quiet=as_json))
    content = results.write(request, found, describe_run())
    if signer is not None and found.checkpoint is not None:
        sign_recorded(found.checkpoint, signer)
    if as_json:
        print_json(content)
    else:
        typer.echo((request.output / results.MARKDOWN_NAME).read_text(encoding="utf-8"))
    _end(found, question.policy)


@dataclass(frozen=True)
class _Limits:
    """What decides, and how far the search goes."""

    policy: "Policy"
    size: "SizeLimit | None"
    bits: tuple[float, ...]
    budget_s: float | None


def _read_limits(question: Question, search: Search) -> _Limits:
    """Read policy, text and numbers before a tensor library is loaded, which takes seconds."""
    from taut_deploy.frontier.limits import read_limit
    from taut_deploy.validate.policy import load_policy
    from taut_deploy.validate.text import read_text

    budget = search.budget_minutes
    if budget is not None and not budget >= 0.0:
        raise RecipeError(f"--budget-minutes: {budget} is no number of minutes")
    size, bits = read_limit(search.memory, search.target_bytes), _read_bits(search.target_bits)
    policy = load_policy(question.policy)
    read_text(question.judged)
    return _Limits(policy, size, bits, None if budget is None else 60.0 * budget)


def _request(
    question: Question,
    search: Search,
    sampling: Sampling,
    machines: Machines,
    limits: _Limits,
    recipes: "tuple[Recipe, ...]",
) -> "ShrinkRequest":
    """What is asked for; all that the user wrote is read before the model is fetched."""
    from taut_deploy.frontier.candidates import DEFAULT_BITS
    from taut_deploy.frontier.request import ShrinkRequest

    require_machine(machines.served_by)
    output = None if question.output is None else checked_output(question.output)
    home = TautHome.from_environment()
    model = fetch_model(home, question.model, trust_remote_code=machines.trust_remote_code)
    output = output or home.root / "shrink" / checked_name(model.name, model.path)
    return ShrinkRequest(
        model=model,
        recipes=recipes,
        target_bits=limits.bits or DEFAULT_BITS,
        limit=limits.size,
        policy=limits.policy,
        validation=ValidationJob(
            baseline=model.path,
            candidate="",
            text=question.judged,
            policy=question.policy,
            output=output,
            sampling=sampling.for_job(),
            directories=Directories(
                device=machines.device,
                served=not sampling.quick and _compares_served(machines),
                trust_remote_code=machines.trust_remote_code,
            ),
        ),
        served_by=machines.served_by,
        output=output,
        cache=home.root,
        budget_s=limits.budget_s,
        keep_all=search.keep_all,
        requantize=machines.requantize,
    )


def _end(found: "Frontier", policy: str) -> None:
    """Say what there is to do, and end with the status."""
    from taut_deploy.frontier.report import told_miss

    if found.status == "found":
        say(f"serve it: taut worker {found.checkpoint}")
        return
    if found.status == "budget":
        say("--budget-minutes: the time is used up; run the same command again to go on")
        raise typer.Exit(EXIT_BUDGET_SPENT)
    miss = found.nearest_miss
    nearest = "every candidate was refused" if miss is None else f"nearest is {told_miss(miss)}"
    say(f"nothing passes {policy}: {nearest}")
    raise typer.Exit(EXIT_NONE_PASSES)


def _compares_served(machines: Machines) -> bool:
    """Whether workers are started: not on a machine of another kind than is to serve."""
    from taut_deploy.frontier.served import platform_of

    if not machines.served or platform_of(machines.served_by) == platform_of("here"):
        return machines.served
    say(f"--served-by {machines.served_by}: no worker is compared here; validate it there as well")
    return False


def _read_bits(text: str | None) -> tuple[float, ...]:
    """The values of ``--target-bits``; none where it is not given.

    Raises:
        RecipeError: one is no number of bits.
    """
    if text is None:
        return ()
    found = []
    for part in text.split(","):
        try:
            bits = float(part)
        except ValueError:
            bits = 0.0
        if not 0.0 < bits <= _MOST_BITS:
            raise RecipeError(
                f"--target-bits: {part[:20]!r} is no number of bits up to {_MOST_BITS:g}; write "
                "them as 4.5,5,6"
            )
        found.append(bits)
    return tuple(dict.fromkeys(found))
