"""A release of the chart in a stand-in cluster: the real helm installs, upgrades, rolls back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from api_server import Store, api_server
from chart_rendering import HELM, OWN_IMAGES, Document
from generate import CHART

Helm = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def release(folder: Path) -> Iterator[tuple[Store, Helm]]:
    """A stand-in and helm for it."""
    with api_server(folder) as (store, env):

        def run(
            verb: str, values: Document | None = None, *options: str
        ) -> subprocess.CompletedProcess[str]:
            store.journal.clear()
            command = [str(HELM), verb, "rel", "--namespace", "ns", "--timeout", "20s", *options]
            if values is not None:
                path = folder / "values.yaml"
                path.write_text(json.dumps(values))
                command += [str(CHART), "--values", str(OWN_IMAGES), "--values", str(path)]
                command += ["--disable-openapi-validation"]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=90, env={**os.environ, **env}
            )

        yield store, run


def done(result: subprocess.CompletedProcess[str]) -> None:
    """It must have succeeded."""
    assert result.returncode == 0, result.stderr


def about(store: Store, what: str) -> list[str]:
    """Entries of the journal for one object."""
    return [line for line in store.journal if line.endswith(what)]
