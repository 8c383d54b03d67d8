"""``taut shrink``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taut_deploy.commands.device import require_device
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.output import (
    DeviceOption,
    JsonFlag,
    TrustRemoteCodeFlag,
    announce_code,
    print_json,
    say,
)
from taut_deploy.commands.validate_options import NO_TEXT, Sampling
from taut_deploy.diagnose.kernel_choice import CARDS
from taut_deploy.errors import RecipeError
from taut_deploy.files import checked_output
from taut_deploy.home import TautHome
from taut_deploy.models import ModelStore
from taut_deploy.models.names import checked_name
from taut_deploy.progress import progress_reporter
from taut_deploy.validate import ValidationJob

if TYPE_CHECKING:
    from taut_deploy.frontier.request import ShrinkRequest
    from taut_deploy.frontier.walk import Frontier
    from taut_deploy.recipe import Recipe

EXIT_NONE_PASSES, EXIT_BUDGET_SPENT = 1, 3
_MOST_BITS = 16.0


@dataclass(frozen=True)
class Question:
    """Which model, judged by what on which text, and where the results go."""

    model: Annotated[str, typer.Argument(help="Model name, hub id, directory or .gguf file.")]
    policy: Annotated[str, typer.Option(help="Built-in policy or YAML file.")]
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to judge on; not the calibration text.")
    ] = None
    output: Annotated[
        Path | None, typer.Option(help="Directory of ledger, checkpoints and results.")
    ] = None
    sign: Annotated[
        Path | None, typer.Option(help="Private key in PEM: sign the verdict of what passes.")
    ] = None

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
class Size:
    """How large the checkpoint may be; one of both, or neither."""

    memory: Annotated[
        str | None, typer.Option(help="Of the device that serves it, such as 24GiB.")
    ] = None
    target_bytes: Annotated[
        str | None, typer.Option(help="At most, of its weights, such as 5GiB.")
    ] = None


@dataclass(frozen=True)
class Search:
    """What is tried, and for how long."""

    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Built-in recipe or YAML file; repeat for more. [default: all]"),
    ] = None
    target_bits: Annotated[
        str | None, typer.Option(help="Bits a weight of the mixtures, with commas.")
    ] = None
    budget_minutes: Annotated[
        float | None, typer.Option(help="Stop then; the next run goes on.")
    ] = None
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Keep checkpoints that did not pass.")
    ] = False


@dataclass(frozen=True)
class Serving:
    """Where the checkpoint is to run."""

    served_by: Annotated[
        str, typer.Option(help="Machine that is to serve it: here, cpu, h100 or h200.")
    ] = "here"
    served: Annotated[
        bool,
        typer.Option(
            "--served/--no-served",
            help="Start a worker for each candidate and compare what it serves.",
        ),
    ] = True


@dataclass(frozen=True)
class Access:
    """What computes, and what may be taken and run."""

    device: DeviceOption = "cpu"
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Take a model that is quantised already.")
    ] = False
    trust_remote_code: TrustRemoteCodeFlag = False


@with_groups
def shrink(
    *,
    question: Question,
    size: Size,
    search: Search,
    sampling: Sampling,
    serving: Serving,
    access: Access,
    as_json: JsonFlag = False,
) -> None:
    """Find the smallest checkpoint that passes: 0 found, 1 none passes, 3 out of time.

    Recipes are compressed and validated from the smallest on. Every try is kept in a ledger: the
    same command again goes on, and another policy judges the figures that are there.
    """
    from taut_deploy.attestation import read_signer
    from taut_deploy.bench.serve_report import describe_run
    from taut_deploy.frontier import report as results
    from taut_deploy.frontier.candidates import chosen_recipes
    from taut_deploy.frontier.walk import search as find
    from taut_deploy.validate.record import sign_recorded

    require_device(access.device)
    signer = None if question.sign is None else read_signer(question.sign, "--sign")
    recipes, left_out = chosen_recipes(tuple(search.recipe or ()))
    request = _request(question, size, search, sampling, serving, access, recipes)
    with progress_reporter(quiet=as_json) as progress:
        found = find(request, left_out, progress, (lambda _: None) if as_json else say)
    content = results.write(request, found, describe_run())
    if signer is not None and found.checkpoint is not None:
        sign_recorded(found.checkpoint, signer)
    if as_json:
        print_json(content)
    else:
        typer.echo((request.output / results.MARKDOWN_NAME).read_text(encoding="utf-8"))
    _end(found, question.policy)


def _request(
    question: Question,
    size: Size,
    search: Search,
    sampling: Sampling,
    serving: Serving,
    access: Access,
    recipes: "tuple[Recipe, ...]",
) -> "ShrinkRequest":
    """What is asked for; all that the user wrote is read before the model is fetched."""
    from taut_deploy.frontier.limits import read_limit
    from taut_deploy.frontier.request import ShrinkRequest
    from taut_deploy.validate.policy import load_policy
    from taut_deploy.validate.text import read_text

    _require_machine(serving.served_by)
    budget = search.budget_minutes
    if budget is not None and not budget >= 0.0:
        raise RecipeError(f"--budget-minutes: {budget} is no number of minutes")
    limit, bits = read_limit(size.memory, size.target_bytes), _read_bits(search.target_bits)
    policy = load_policy(question.policy)
    read_text(question.judged)
    output = None if question.output is None else checked_output(question.output)
    home = TautHome.from_environment()
    model = ModelStore(home.models).fetch(question.model)
    announce_code(Path(model.path), access.trust_remote_code)
    output = output or home.root / "shrink" / checked_name(model.name, model.path)
    return ShrinkRequest(
        model=model,
        recipes=recipes,
        target_bits=bits,
        limit=limit,
        policy=policy,
        validation=ValidationJob(
            baseline=model.path,
            candidate="",
            text=question.judged,
            policy=question.policy,
            output=output,
            **sampling.for_job(),
            device=access.device,
            served=not sampling.quick and _compares_served(serving),
            trust_remote_code=access.trust_remote_code,
        ),
        served_by=serving.served_by,
        output=output,
        cache=home.root,
        budget_s=None if budget is None else 60.0 * budget,
        keep_all=search.keep_all,
        requantize=access.requantize,
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


def _require_machine(served_by: str) -> None:
    if served_by not in (known := ("here", "cpu", *CARDS)):
        raise RecipeError(f"--served-by: {served_by!r} is none of {', '.join(known)}")


def _compares_served(serving: Serving) -> bool:
    """Whether workers are started: not on a machine of another kind than is to serve."""
    from taut_deploy.frontier.served import platform_of

    if not serving.served or platform_of(serving.served_by) == platform_of("here"):
        return serving.served
    say(f"--served-by {serving.served_by}: no worker is compared here; validate it there as well")
    return False


def _read_bits(text: str | None) -> tuple[float, ...]:
    """The values of ``--target-bits``.

    Raises:
        RecipeError: one is no number of bits.
    """
    from taut_deploy.frontier.candidates import DEFAULT_BITS

    if text is None:
        return DEFAULT_BITS
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
