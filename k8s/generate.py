"""Write the generated files of k8s/: ``python k8s/generate.py [--check]``.

* ``chart/values.schema.json`` from ``values.schema.yaml`` and the gateway's own settings,
* ``chart/files/rules`` and ``chart/files/dashboards`` from ``docker/observability``,
* the table of values, ``VALUES.md``, from ``values.schema.yaml`` and ``chart/values.yaml``,
* ``manifests/*.yaml`` from the chart and a CI value set; needs helm (``$HELM``, or on the PATH).

With ``--check`` nothing is written; exit 1 names what is not current.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from taut_service.config.settings import Settings

HERE = Path(__file__).parent
CHART = HERE / "chart"
OBSERVABILITY = HERE.parent / "docker" / "observability"
MANIFESTS = {"cpu-minimal": "cpu-minimal.yaml"}
"""Name of a CI value set → file in ``manifests``."""
RELEASE, NAMESPACE = "taut", "taut"
REGISTRY = "registry.example"
"""In the manifests: a name that is kept free for examples, so that nobody owns it."""
PASSED_ON = {"model.gateway", "variants[].gateway", "gateway.config"}
"""Values that hold the gateway's own keys: docs/gateway-settings.md has their table."""
GATEWAYS_OWN = "x-settings"
"""Marks a section with keys of the gateway's file among its own: which section, and what not."""
SPELLINGS = CHART / "files" / "spellings.yaml"
"""Keys as other charts spell them: they pass the schema, so that the chart can name its own."""


class HelmError(Exception):
    """helm is missing, or refuses the chart."""


def find_helm() -> str | None:
    """Return the path of helm: ``$HELM``, beside this interpreter, or on the PATH."""
    beside = Path(sys.executable).parent / "helm"
    return os.environ.get("HELM") or (str(beside) if beside.exists() else shutil.which("helm"))


def run_helm(*arguments: str) -> str:
    """Run helm and return what it prints.

    Args:
        arguments: after ``helm``.

    Raises:
        HelmError: helm is missing, or ends with an error.
    """
    helm = find_helm()
    if helm is None:
        raise HelmError("helm is missing: make chart-tools")
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HelmError(done.stderr.strip())
    return done.stdout


def schema() -> dict[str, Any]:
    """Return the chart's JSON schema, with the gateway's sections among its definitions."""
    written = described()
    _let_spellings_pass(written)
    _require_defaults(written, written, yaml.safe_load((CHART / "values.yaml").read_text()))
    text = json.dumps(Settings.model_json_schema()["$defs"]).replace("#/$defs/", "#/definitions/")
    of_gateway: dict[str, Any] = json.loads(text)
    for section in written["properties"].values():
        if taken := section.pop(GATEWAYS_OWN, None):
            _take_over(section, of_gateway[taken["of"]], taken["without"])
    written["definitions"] |= {name: of_gateway[name] for name in _reached(written, of_gateway)}
    return written


def _require_defaults(
    root: dict[str, Any], section: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Require what ``values.yaml`` gives: Helm drops a key that is null, or left blank.

    An empty text is as good as none, and so are no requests and limits.
    """
    keys = [key for key in defaults if key in section["properties"] and defaults[key] != ""]
    below = {key: _resolved(root, section["properties"][key]) for key in keys}
    required = [key for key in keys if below[key] is not root["definitions"]["resources"]]
    section["required"] = sorted({*section.get("required", []), *required})
    for key, part in below.items():
        if "properties" in part and key in required and isinstance(defaults[key], dict):
            _require_defaults(root, part, defaults[key])


def _resolved(root: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    name = part.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = root["definitions"].get(name, part)
    return found


def _take_over(section: dict[str, Any], of_gateway: dict[str, Any], without: list[str]) -> None:
    """Let a section have the gateway's keys, too; its own come first where both have one."""
    keys = {key: below for key, below in of_gateway["properties"].items() if key not in without}
    section["properties"] = keys | section["properties"]


def described() -> dict[str, Any]:
    """Return ``values.schema.yaml`` with the keys of a pod in every section that has a pod."""
    written: dict[str, Any] = yaml.safe_load((HERE / "values.schema.yaml").read_text())
    of_pod = written["definitions"].pop("pod")["properties"]
    for section in _with_pods(written):
        left_out = section.pop("x-pod")
        taken = {key: below for key, below in of_pod.items() if key not in left_out}
        section["properties"] = taken | section["properties"]
    return written


def pod_keys() -> dict[str, Any]:
    """Return the keys that every section with a pod has, and how they are described."""
    written = yaml.safe_load((HERE / "values.schema.yaml").read_text())
    keys: dict[str, Any] = written["definitions"]["pod"]["properties"]
    return keys


def _with_pods(written: dict[str, Any]) -> list[dict[str, Any]]:
    sections = [*written["properties"].values(), written["properties"]["variants"]["items"]]
    return [section for section in sections if "x-pod" in section]


def _let_spellings_pass(written: dict[str, Any]) -> None:
    """Accept other spellings, which ``_checks_store.tpl`` then refuses with the key to use."""
    variants = written["properties"]["variants"]["items"]
    places = {"": [written], "variants[]": [variants]}
    places["pod"] = [
        section
        for section in [*written["properties"].values(), variants]
        if "podAnnotations" in section.get("properties", {})
    ]
    for kind, keys in yaml.safe_load(SPELLINGS.read_text()).items():
        for place in places.get(kind) or [_section(written, kind)]:
            clash = set(keys) & place["properties"].keys()
            if clash:
                raise ValueError(f"{SPELLINGS.name}: {kind}: keys of the chart: {sorted(clash)}")
            place["properties"] |= {key: {} for key in keys}


def _section(written: dict[str, Any], path: str) -> dict[str, Any]:
    """The part of the schema that describes a section, its names apart by dots."""
    for name in path.split("."):
        written = written["properties"][name]
    return written


def _reached(schema_part: object, definitions: dict[str, Any]) -> list[str]:
    """Names of the definitions that a schema refers to, directly or not, sorted."""
    found: set[str] = set()
    parts = [schema_part]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name in definitions and name not in found:
                found.add(name)
                parts.append(definitions[name])
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return sorted(found)


def values_table() -> str:
    """Return the Markdown table of every value."""
    written = yaml.safe_load((HERE / "values.schema.yaml").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = ["| value | default | meaning |", "|---|---|---|"]
    rows += _rows(written, written, defaults, "")
    return "\n".join(rows)


def pod_table() -> str:
    """Return the Markdown table of the keys that every section with a pod has."""
    written = yaml.safe_load((HERE / "values.schema.yaml").read_text())
    rows = ["| key | meaning |", "|---|---|"]
    for key, below in written["definitions"]["pod"]["properties"].items():
        rows.append(f"| `{key}` | {below['description']} |")
        for nested, deeper in below.get("properties", {}).items():
            rows.append(f"| `{key}.{nested}` | {deeper['description']} |")
    return "\n".join(rows)


def _rows(root: dict[str, Any], part: dict[str, Any], default: object, path: str) -> list[str]:
    """Rows of one object: its keys in the order of the schema."""
    rows: list[str] = []
    for key, below in part["properties"].items():
        name = f"{path}.{key}" if path else key
        mine = default.get(key) if isinstance(default, dict) else None
        reference = str(below.get("$ref", "")).rpartition("/")[2]
        shown = root["definitions"][reference] if reference == "image" else below
        nested = "properties" in shown and name not in PASSED_ON
        described = below.get("description")
        if described:
            rows.append(_row(name, None if nested else mine, described))
        if nested:
            rows += _rows(root, shown, mine, name)
        elif "properties" in shown.get("items", {}):
            rows += _rows(root, shown["items"], None, f"{name}[]")
    return rows


def _row(name: str, default: object, description: str) -> str:
    shown = "–" if default is None else f"`{json.dumps(default)}`"
    return f"| `{name}` | {shown} | {description} |"


def values_page() -> str:
    """Return VALUES.md: every value, and the keys of a pod once."""
    return (
        "# Values of the chart\n\n"
        "Written by `k8s/generate.py`. `model.gateway`, `variants[].gateway` and `gateway.config` "
        "hold keys of the gateway's own file: "
        "[docs/gateway-settings.md](../docs/gateway-settings.md).\n\n"
        f"{values_table()}\n\n"
        "## Keys of a pod\n\n"
        "`gateway`, `worker`, `variants[]`, `prepare`, `validation` and `smokeTest` each have "
        "these, Jobs without probes and variants without an account of their own. A variant's come "
        "over `worker`'s: maps are merged, lists joined, single values replaced.\n\n"
        f"{pod_table()}\n"
    )


def manifest(value_set: str) -> str:
    """Return the chart rendered with a CI value set, without what only Helm runs (its tests).

    Args:
        value_set: name of a file in ``chart/ci``.

    Raises:
        HelmError: helm is missing, or refuses the chart.
    """
    values = str(CHART / "ci" / f"{value_set}.yaml")
    rendered = run_helm(
        "template",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--values",
        values,
        "--no-hooks",
        "--set=prepare.run=pod",
        f"--set=global.imageRegistry={REGISTRY}",
    )
    written = f"# Rendered from k8s/chart with ci/{value_set}.yaml by k8s/generate.py."
    return f"{written}\n# Put your registry in the place of {REGISTRY}.\n{rendered}"


def expected() -> dict[Path, str]:
    """Return every generated file but the manifests, with what it should hold."""
    files = {
        CHART / "values.schema.json": json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
    }
    for source in sorted(OBSERVABILITY.glob("prometheus/rules/*.yml")):
        files[CHART / "files" / "rules" / source.name] = source.read_text()
    for source in sorted(OBSERVABILITY.glob("grafana/dashboards/*.json")):
        files[CHART / "files" / "dashboards" / source.name] = source.read_text()
    files[HERE / "VALUES.md"] = values_page()
    return files


def strangers() -> list[Path]:
    """Return copies whose original is gone."""
    copies = [*CHART.glob("files/rules/*"), *CHART.glob("files/dashboards/*")]
    known = expected()
    return [path for path in copies if path not in known]


def _apply(files: dict[Path, str], *, check: bool) -> list[Path]:
    """Write what differs, or only say which files do."""
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in [] if check else stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path])
    return stale


def main(arguments: list[str]) -> int:
    """Write or check everything; the schema first, since helm reads it."""
    check = arguments == ["--check"]
    stale = _apply(expected(), check=check)
    for path in strangers():
        stale.append(path)
        if not check:
            path.unlink()
    try:
        rendered = {HERE / "manifests" / file: manifest(name) for name, file in MANIFESTS.items()}
    except HelmError as error:
        print(f"k8s/manifests: {error}", file=sys.stderr)  # noqa: T201
        return 1
    stale += _apply(rendered, check=check)
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.relative_to(HERE.parent)}")  # noqa: T201
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
