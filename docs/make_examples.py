"""Write ``docs/examples/``: what two commands left, as they left it, and pictures of their pages.

``python docs/make_examples.py --validation DIR --rollout DIR`` takes the outputs of
``taut validate`` and of ``taut bench rollout``; one of the two is enough. Only the folders that
hold the output and this repository are left out of paths, the model store is written
``$TAUT_HOME`` where that is set, the home folder ``~``, and pictures have fewer colours. An example
of more than 300 kB is refused.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from taut_deploy.bench.rollout_page import Scheme, photograph

EXAMPLES = Path(__file__).parent / "examples"
_REPOSITORY = Path(__file__).resolve().parents[1]
MOST_BYTES = 300_000
_COLOURS = 64
_PAGE = 900, 1200
_SCHEMES: tuple[Scheme, ...] = ("light", "dark")
_OF_A_ROLLOUT = ("report.json", "report.md", "rollout/audit.jsonl")


class ExampleError(Exception):
    """An example cannot be made; one line for the user."""


def write_validation(source: Path, target: Path) -> None:
    """Copy a validation's report and its page, and take pictures of that in both schemes.

    Args:
        source: ``--output`` of ``taut validate``.
        target: folder of the example.

    Raises:
        ExampleError: a file is missing, there is no Chromium, or it is too large.
    """
    copy_texts(source, target, ("report.json", "report.md", "report.html"))
    page = _there(source, "report.html").resolve().as_uri()
    for scheme in _SCHEMES:
        file = target / f"report-{scheme}.png"
        if not photograph(page, file, _say, scheme=scheme, size=_PAGE):
            raise ExampleError(f"no {file.name}: see the line above")
        shrink(file)
    check_size(target)


def write_rollout(source: Path, target: Path) -> None:
    """Copy a rehearsal's report, audit log and pictures.

    Args:
        source: ``--output`` of ``taut bench rollout``.
        target: folder of the example.

    Raises:
        ExampleError: a file is missing, or it is too large.
    """
    copy_texts(source, target, _OF_A_ROLLOUT)
    pages = sorted(source.glob("ui-*.png"))
    if not pages:
        raise ExampleError(f"{source}: no ui-*.png: taut bench rollout takes them with Chromium")
    for page in pages:
        shutil.copyfile(page, target / page.name)
        shrink(target / page.name)
    check_size(target)


def copy_texts(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy text files without this machine's folders in them.

    Raises:
        ExampleError: one is missing.
    """
    machine = {f"{source.resolve().parent}/": "", f"{_REPOSITORY}/": ""}
    if store := os.environ.get("TAUT_HOME"):
        machine[store] = "$TAUT_HOME"
    machine[str(Path.home())] = "~"
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        text = _there(source, name).read_text(encoding="utf-8")
        for folder, shown in machine.items():
            if name.endswith(".jsonl") and folder in text:
                raise ExampleError(f"{source / name}: names {folder}: its hashes allow no change")
            text = text.replace(folder, shown)
        (target / Path(name).name).write_text(text, encoding="utf-8")


def shrink(picture: Path) -> None:
    """Write a picture anew with few colours: a third of the size."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(_COLOURS).save(picture, optimize=True)


def check_size(example: Path) -> None:
    """Insist on :data:`MOST_BYTES`.

    Raises:
        ExampleError: the folder holds more.
    """
    size = sum(file.stat().st_size for file in example.iterdir())
    if size > MOST_BYTES:
        raise ExampleError(f"{example}: {size} bytes, more than {MOST_BYTES}")


def _there(source: Path, name: str) -> Path:
    file = source / name
    if not file.is_file():
        raise ExampleError(f"{file}: no such file; is {source} the --output of that command?")
    return file


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> int:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(description="Write docs/examples/.")
    parser.add_argument("--validation", type=Path, help="--output of taut validate")
    parser.add_argument("--rollout", type=Path, help="--output of taut bench rollout")
    options = parser.parse_args()
    if options.validation is None and options.rollout is None:
        parser.error("give --validation DIR, --rollout DIR or both")
    try:
        if options.validation is not None:
            write_validation(options.validation, EXAMPLES / "validation")
        if options.rollout is not None:
            write_rollout(options.rollout, EXAMPLES / "rollout")
    except ExampleError as error:
        _say(f"make_examples: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
