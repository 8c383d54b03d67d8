"""What ``taut serve`` needs before a process starts: model, checkpoint, the gateway's file."""

import importlib.metadata
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_deploy.checkpoint import Manifest, is_checkpoint, read_manifest, verify
from taut_deploy.compress.calibrate.texts import describe_text
from taut_deploy.errors import WorkerError
from taut_deploy.files import sha256_json
from taut_deploy.home import TautHome
from taut_deploy.models import ModelRecord, ModelStore
from taut_deploy.models.directory import read_shape
from taut_deploy.models.names import checked_name
from taut_deploy.models.remote_code import describe_code
from taut_deploy.ports import free_port
from taut_deploy.progress import Report, Say
from taut_deploy.recipe import Recipe, Training, load_recipe
from taut_deploy.serve.provenance import UNCOMPRESSED, provenance_of
from taut_deploy.serve.settings import ServeSettings


@dataclass(frozen=True)
class ServedModel:
    """One model on the API and the directory its workers load.

    Args:
        name: public name.
        directory: checkpoint or model directory.
        manifest: manifest of a compressed checkpoint, None for the baseline.
        ports: one worker per port.
    """

    name: str
    directory: Path
    manifest: Manifest | None
    ports: tuple[int, ...]


def prepare_models(
    settings: ServeSettings, home: TautHome, say: Say, progress: Report
) -> list[ServedModel]:
    """Fetch, compress where needed, verify, and assign ports.

    Raises:
        TautError: whatever is wrong with the model, the recipe or the disk.
    """
    # Before minutes of fetching, not after them.
    recipe = load_recipe(settings.recipe)
    path = Path(settings.model).expanduser()
    if is_checkpoint(path):
        say(f"using the checkpoint {path}")
        manifest = verify(path, settings.verify, say)
        return [_served(manifest.name, path, manifest, settings.workers)]
    say(f"fetching {settings.model}")
    base = ModelStore(home.models, progress=progress).fetch(settings.model)
    for line in describe_code(Path(base.path)) if settings.trust_remote_code else ():
        say(line)
    compressed = _compressed(base, recipe, settings, home, say, progress)
    served = [compressed]
    if settings.baseline:
        served.append(_served(f"{base.name}-baseline", Path(base.path), None, settings.workers))
    return served


def gateway_configuration(settings: ServeSettings, models: list[ServedModel]) -> dict[str, Any]:
    """The gateway's configuration as plain data (its shape is the service room's contract)."""
    return {
        "listen": {"host": settings.host, "port": settings.port},
        "models": [_gateway_model(model, settings) for model in models],
        **settings.gateway,
    }


def require_free_port(host: str, port: int) -> None:
    """Refuse early if something listens there already.

    Raises:
        WorkerError: naming the address and the flag.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise WorkerError(
                f"{host}:{port}: cannot listen there ({error.strerror}); choose another --port"
            ) from error


def _compressed(
    base: ModelRecord,
    recipe: Recipe,
    settings: ServeSettings,
    home: TautHome,
    say: Say,
    progress: Report,
) -> ServedModel:
    # The key holds what determines the bytes, so a changed recipe of the same name gets its own
    # directory.
    version = importlib.metadata.version("taut")
    key = sha256_json([base.digest, recipe.hash, version])[:16]
    name = checked_name(base.name, base.path)
    output = home.checkpoints / f"{name}--{recipe.name}--{key}"
    say(f"{'reusing' if output.exists() else 'compressing into'} {output}")
    if not _is_finished(base, recipe, output):
        # Six CPU seconds of imports, and their memory for as long as this process serves.
        from taut_deploy.compress.job import CompressionJob
        from taut_deploy.compress.pipeline import compress

        trusted = settings.trust_remote_code
        job = CompressionJob(base, recipe, output, home.root, trust_remote_code=trusted)
        compress(job, progress)
    return _served(base.name, output, verify(output, settings.verify, say), settings.workers)


def _is_finished(base: ModelRecord, recipe: Recipe, output: Path) -> bool:
    """Whether nothing is left to do; True only where the manifest alone can tell.

    Everything else is compression's to look at: text to train on, and what a killed run left.
    """
    left = (output / ".state", output.parent / f".{output.name}.stages")
    if output.is_symlink() or not is_checkpoint(output) or any(path.exists() for path in left):
        return False
    if any(isinstance(stage, Training) for stage in recipe.stages):
        return False
    manifest = read_manifest(output)
    made_of = (manifest.recipe_hash, manifest.base_model.get("digest"))
    text = recipe.calibration.path and describe_text(Path(recipe.calibration.path))
    described = str(manifest.calibration.get("description"))
    return made_of == (recipe.hash, base.digest) and (not text or text in described)


def _served(name: str, directory: Path, manifest: Manifest | None, workers: int) -> ServedModel:
    # The name becomes the names of log files; a manifest's is whatever its author wrote.
    checked_name(name, str(directory))
    return ServedModel(name, directory, manifest, tuple(free_port() for _ in range(workers)))


def _gateway_model(model: ServedModel, settings: ServeSettings) -> dict[str, Any]:
    workers = [
        {"name": f"{model.name}-{index}", "url": f"http://127.0.0.1:{port}"}
        for index, port in enumerate(model.ports)
    ]
    entry: dict[str, Any] = {"name": model.name, "workers": workers}
    manifest = model.manifest
    if manifest is None:
        longest = read_shape(
            model.directory, trust_remote_code=settings.trust_remote_code
        ).max_position_embeddings
        provenance = UNCOMPRESSED
    else:
        longest = manifest.max_model_len
        entry["golden"] = {
            "prompt": manifest.golden.prompt,
            "expected_text": manifest.golden.expected_text,
        }
        provenance = provenance_of(manifest)
    entry["max_model_len"] = settings.max_model_len or longest
    entry["provenance"] = dict(provenance)
    return entry
