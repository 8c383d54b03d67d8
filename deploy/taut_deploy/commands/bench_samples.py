"""What the benches of compressed models share: samples, the model they are of, their results."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taut_deploy.commands.options import DeviceOption
from taut_deploy.commands.output import make_folder, print_json
from taut_deploy.home import TautHome
from taut_deploy.models import ModelStore

if TYPE_CHECKING:
    from taut_deploy.bench.distil_students import Place


@dataclass(frozen=True)
class Samples:
    """What models are calibrated and judged on.

    Args:
        calibration: corpus, articles or a text file.
        calibration_sequences: Sequences of it.
        sequences: Sequences to judge on.
        sequence_length: Tokens of each.
    """

    calibration: str = "corpus"
    calibration_sequences: Annotated[int, typer.Option(min=1)] = 128
    sequences: Annotated[int, typer.Option(min=2)] = 64
    sequence_length: Annotated[int, typer.Option(min=16)] = 512


@dataclass(frozen=True)
class Making:
    """Where models are made to be measured.

    Args:
        work: Folder of the models that are measured.
        device: cpu or cuda.
    """

    work: Annotated[Path | None, typer.Option(file_okay=False)] = None
    device: DeviceOption = "cpu"


def make_folders(output: Path, work: Path | None, name: str) -> Path:
    """Make the folder of the results and the one of what is measured.

    Args:
        output: of the results.
        work: of what is measured; None for one in there.
        name: of that one.

    Returns:
        The folder of what is measured.

    Raises:
        OutputError: one cannot be made.
    """
    work = output / name if work is None else work
    for folder in (output, work):
        make_folder(folder)
    return work


def open_place(model: str, samples: Samples, device: str, fit_steps: int = 0) -> "Place":
    """Fetch the base model; say where, and of what, others are made of it.

    Raises:
        ModelError: there is no such model.
    """
    from taut_deploy.bench.distil_students import Place

    home = TautHome.from_environment()
    record = ModelStore(home.models).fetch(model)
    calibrated = (samples.calibration, samples.calibration_sequences, samples.sequence_length)
    return Place(record, *calibrated, home.root, device, fit_steps)


def tell(table: Path, rows: Sequence[Any], *, as_json: bool) -> None:
    """Print rows as one document, or the table of them that is on disk."""
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    typer.echo(table.read_text(encoding="utf-8"))
