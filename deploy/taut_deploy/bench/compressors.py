"""``taut bench compressors``: INT4 weights by taut and by its rivals, on the same text and judge.

A rival runs in an environment of its own, since each pins other versions than taut: its interpreter
is given, taut's own search path for modules is not passed on.
"""

import importlib.metadata
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_deploy.bench import rival_compressors
from taut_deploy.bench.compressors_report import RESULTS, Row
from taut_deploy.bench.distil_students import Place
from taut_deploy.bench.distil_texts import require_apart
from taut_deploy.bench.judge import Judge
from taut_deploy.compress import pipeline
from taut_deploy.compress.calibrate.calibration import make_calibration_set
from taut_deploy.compress.job import CompressionJob
from taut_deploy.documents import read_json
from taut_deploy.errors import MeasureError, RecipeError
from taut_deploy.files import sha256_json, write_json_atomically
from taut_deploy.models.directory import read_config
from taut_deploy.progress import Say

_OURS: dict[str, dict[str, Any]] = {
    "taut gptq": {"algorithm": "gptq"},
    "taut round": {"algorithm": "round", "steps": 200},
}
RIVALS = {
    "llm-compressor": ("llm-compressor", "llm-compressor-awq"),
    "gptqmodel": ("gptqmodel",),
    "auto-round": ("auto-round",),
}
"""Methods of each environment that ``--rival`` names, as the program for rivals knows them."""
_PROGRAM = Path(rival_compressors.__file__)
# What a rival's interpreter must not see of taut's.
_OWN_PATHS = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Grid:
    """One format of 4-bit weights.

    Args:
        name: as ``--formats`` takes it.
        group_size: weights a scale covers; ``channel`` for those of a row.
        symmetric: whether there are no zero points.
    """

    name: str
    group_size: int | str
    symmetric: bool


GRIDS = {
    one.name: one
    for one in (
        Grid("g32-asym", 32, False),
        Grid("g64-sym", 64, True),
        Grid("g128-sym", 128, True),
        Grid("channel-sym", "channel", True),
    )
}


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        place: of taut's own checkpoints, with the calibration.
        text: UTF-8 file to judge on.
        judged: sequences of it.
        grids: formats, each of which divides the model.
        rivals: interpreter of each rival's environment, by the names of :data:`RIVALS`.
        methods: what compresses, in order.
        work: folder of the checkpoints.
        output: folder of the results.
    """

    place: Place
    text: Path
    judged: int
    grids: tuple[Grid, ...]
    rivals: Mapping[str, Path]
    methods: tuple[str, ...]
    work: Path
    output: Path

    @property
    def hash(self) -> str:
        """Of everything that rows of one table must share."""
        place = self.place
        judged = {"base": place.base.digest, "text": str(self.text), "judged": self.judged}
        calibrated = {"calibration": place.calibration, "sequences": place.sequences}
        # 2: rows hold intervals, and versions the settings.
        told = {"length": place.sequence_length, "rows": 2}
        return sha256_json({**judged, **calibrated, **told})[:16]


def parse_rivals(given: list[str]) -> dict[str, Path]:
    """Read ``NAME=PYTHON`` entries.

    Raises:
        MeasureError: an entry is none, no such rival is known, or its interpreter is not there.
    """
    found: dict[str, Path] = {}
    for entry in given:
        name, _, python = entry.partition("=")
        if name not in RIVALS or not python:
            raise MeasureError(
                f"--rival {entry[:80]!r}: write NAME=PYTHON, NAME one of {', '.join(RIVALS)}"
            )
        if not os.access(python, os.X_OK) or not Path(python).is_file():
            raise MeasureError(f"--rival {name}: {python}: is no interpreter that can be run")
        found[name] = Path(python).absolute()
    return found


def choose_methods(names: str | None, rivals: Mapping[str, Path]) -> tuple[str, ...]:
    """Read methods with commas: of taut and of the rivals that are there; None takes all.

    Raises:
        MeasureError: there is no such method, or the environment of its rival was not given.
    """
    there = [*_OURS, *(method for rival in rivals for method in RIVALS[rival])]
    if names is None:
        return tuple(there)
    asked = names.split(",")
    if unknown := [one for one in asked if one not in there]:
        raise MeasureError(
            f"--only: no method {unknown[0][:40]!r}; with these rivals there are {', '.join(there)}"
        )
    return tuple(one for one in there if one in asked)


def choose_grids(names: str, model: Path, say: Say) -> tuple[Grid, ...]:
    """Read formats with commas, or ``all``: those of which groups divide the model.

    Raises:
        MeasureError: there is no such format, or a named one does not fit.
    """
    config = read_config(model)
    widths = [int(config[key]) for key in ("hidden_size", "intermediate_size") if key in config]
    if names != "all" and (unknown := [one for one in names.split(",") if one not in GRIDS]):
        raise MeasureError(
            f"--formats: no format {unknown[0][:40]!r}; there are {', '.join(GRIDS)}"
        )
    chosen = []
    for grid in GRIDS.values() if names == "all" else [GRIDS[one] for one in names.split(",")]:
        size = grid.group_size
        if not (odd := [width for width in widths if isinstance(size, int) and width % size]):
            chosen.append(grid)
        elif names != "all":
            raise MeasureError(
                f"--formats: groups of {grid.group_size} ({grid.name}) do not divide a width of "
                f"{odd[0]}; leave it out"
            )
        else:
            say(f"{grid.name}: left out, groups of {grid.group_size} do not divide {odd[0]}")
    return tuple(chosen)


def measure(plan: Plan, say: Say) -> list[Row]:
    """Compress by every method in every format and judge each; rows of an earlier run stay.

    Raises:
        RecipeError: a text is too short, or calibration holds what is judged.
        MeasureError: a rival failed; names its log.
    """
    place = plan.place
    base = Path(place.base.path)
    judge = Judge(base, plan.text, plan.judged, place.sequence_length, place.device)
    recipe = place.recipe("calibration", _stage(plan.grids[0], {"algorithm": "rtn"}))
    tokens = make_calibration_set(
        recipe.calibration, place.base, place.cache, device=place.device
    ).tokens
    try:
        require_apart(place.calibration, tokens.flatten().numpy(), judge.tokens)
    except RecipeError as error:
        raise MeasureError(str(error).replace("--train", "--calibration")) from error
    file = plan.work / f"calibration-{plan.hash}.json"
    write_json_atomically(file, tokens.tolist())
    done = {(row.method, row.format) for row in RESULTS.read(plan.output, plan.hash)}
    for grid in plan.grids:
        for method in plan.methods:
            if (method, grid.name) in done:
                continue
            row = _measured(plan, grid, method, file, judge)
            RESULTS.append(plan.output, row)
            say(f"{grid.name}, {method}: {row.judged} in {row.seconds:.0f} s")
    return RESULTS.read(plan.output, plan.hash)


def _measured(plan: Plan, grid: Grid, method: str, tokens: Path, judge: Judge) -> Row:
    with tempfile.TemporaryDirectory(dir=plan.work) as folder:
        if method in _OURS:
            started = time.monotonic()
            made = Path(folder) / "checkpoint"
            recipe = plan.place.recipe("bench", _stage(grid, _OURS[method]))
            place = plan.place
            pipeline.compress(CompressionJob(place.base, recipe, made, place.cache, place.device))
            seconds, version = (
                time.monotonic() - started,
                f"taut {importlib.metadata.version('taut')}",
            )
        else:
            made, seconds, version = _by_rival(plan, grid, method, tokens, Path(folder))
        return Row(method, grid.name, plan.hash, judge(made), seconds, version)


def _stage(grid: Grid, how: dict[str, Any]) -> dict[str, Any]:
    shape = {"group_size": grid.group_size, "symmetric": grid.symmetric}
    return {"method": "quantize", "scheme": "W4A16", **shape, **how}


def _by_rival(
    plan: Plan, grid: Grid, method: str, tokens: Path, folder: Path
) -> tuple[Path, float, str]:
    """A dense model of what the rival made, the seconds it took, and its version."""
    rival = next(name for name, methods in RIVALS.items() if method in methods)
    job = {
        "model": plan.place.base.path,
        "method": method,
        "tokens": str(tokens),
        "output": str(folder),
        "group_size": grid.group_size,
        "symmetric": grid.symmetric,
        "device": plan.place.device,
    }
    write_json_atomically(folder / "job.json", job)
    log = plan.output / f"{method}-{grid.name}.log"
    environment = {key: value for key, value in os.environ.items() if key not in _OWN_PATHS}
    with log.open("wb") as sink:
        done = subprocess.run(
            [str(plan.rivals[rival]), str(_PROGRAM), str(folder / "job.json")],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            check=False,
        )
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise MeasureError(
            f"--rival {rival}: {method} ended with {done.returncode} ({''.join(last)[:160]}); "
            f"its log is {log}"
        )
    told = read_json(folder / "measured.json", MeasureError)
    return folder / "dense", float(told["seconds"]), str(told["version"])
