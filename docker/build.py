#!/usr/bin/env python3
"""Build taut's images with Docker or, without a daemon, with buildah.

``python3 docker/build.py gateway worker-cpu toolbox`` needs nothing but an engine, syft (or
``--no-sbom``) and the open internet. ``--wheels DIR`` is for machines whose pip has settings of
its own (an index, a proxy, a certificate): wheels are downloaded by this machine's pip and the
build reaches no index at all.
Standard library only. ``--help`` lists the options, docker/README.md says more.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from locked_wheels import COMPILED, LOCKS, WITH_TORCH, download_wheels
from platforms import MACHINES, BuildError, is_foreign, require_base, require_runnable

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ("gateway", "worker-cpu", "toolbox")
_PACKAGES = "opt/lock/debian-packages.txt"
_PACKAGES_ALONE = (
    "SYFT_FILE_METADATA_SELECTION=none",
    "SYFT_RELATIONSHIPS_PACKAGE_FILE_OWNERSHIP=false",
)


@dataclass(frozen=True)
class Publish:
    """A push in place of a local image.

    Args:
        name: of the image in its registry, tag included.
        platforms: as Docker spells them, ``linux/amd64``.
        metadata: file that gets the digest.
    """

    name: str
    platforms: tuple[str, ...]
    metadata: Path


@dataclass(frozen=True)
class Options:
    """How to build.

    Args:
        engine: ``docker`` or ``buildah``.
        base_image: instead of the Dockerfile's own; must hold CPython 3.11.
        wheels: directory with every wheel the locks name; no index is asked then.
        pip_conf: pip's settings for the build, given as a secret.
        torch_index: index of CPU builds of torch.
        compiled: whether the gateway's hot path is compiled.
        publish: where Docker pushes instead of keeping the image here.
        platform: as Docker spells it; None for this machine's.
    """

    engine: str
    base_image: str | None = None
    wheels: Path | None = None
    pip_conf: Path | None = None
    torch_index: str | None = None
    compiled: bool = True
    publish: Publish | None = None
    platform: str | None = None


def project_version() -> str:
    """The version in pyproject.toml, which is the tag."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise BuildError("pyproject.toml: no version")
    return found[1]


def tag_of(image: str, platform: str | None = None) -> str:
    """``taut/gateway:0.1.0``; of a platform not this machine's ``taut/gateway:0.1.0-arm64``."""
    return f"taut/{image}:{project_version()}{_suffix(platform)}"


def _suffix(platform: str | None) -> str:
    if platform is None or not is_foreign(platform):
        return ""
    return f"-{platform.partition('/')[2]}"


def build_command(image: str, options: Options) -> list[str]:
    """The engine's command line that builds ``image``."""
    publish = options.publish
    if options.engine == "docker" and publish is not None:
        command = ["docker", "buildx", "build", "--push", "--provenance=mode=max"]
        command += ["--platform", ",".join(publish.platforms)]
        command += ["--metadata-file", str(publish.metadata)]
    elif options.engine == "docker":
        command = ["docker", "buildx", "build", "--load"]
    else:
        # No user namespace and no runtime are needed this way; health checks need Docker's format.
        command = ["buildah", "bud", "--isolation", "chroot", "--format", "docker", "--layers"]
    command += ["--network", "host", "--file", str(ROOT / "docker" / f"{image}.Dockerfile")]
    tag = (
        publish.name
        if options.engine == "docker" and publish is not None
        else tag_of(image, options.platform)
    )
    command += ["--tag", tag, "--build-arg", f"VERSION={project_version()}"]
    command += ["--build-arg", f"REVISION={_revision()}"]
    if options.platform is not None and publish is None:
        command += ["--platform", options.platform]
    if options.base_image is not None:
        command += ["--build-arg", f"BASE_IMAGE={options.base_image}"]
    if options.torch_index is not None and image in WITH_TORCH:
        command += ["--build-arg", f"TAUT_TORCH_INDEX={options.torch_index}"]
    if not options.compiled and image in COMPILED:
        command += ["--build-arg", "TAUT_COMPILE=0"]
    if options.pip_conf is not None:
        command += ["--secret", f"id=pip_conf,src={options.pip_conf}"]
    if options.wheels is not None:
        command += ["--build-context", f"wheelhouse={options.wheels}"]
    return [*command, str(ROOT)]


def _revision() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _run(command: Sequence[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise BuildError(f"failed: {' '.join(command)}")


def find_syft() -> str:
    """The program that writes bills of materials.

    Raises:
        BuildError: there is none; said before a build, which takes minutes.
    """
    syft = shutil.which("syft") or str(ROOT / ".venv" / "bin" / "syft")
    if not Path(syft).exists():
        raise BuildError(
            "no syft for the bill of materials: `make container-tools` puts one into .venv/bin; "
            "--no-sbom builds without"
        )
    return syft


def write_sbom(image: str, options: Options, folder: Path) -> Path:
    """Write ``taut-IMAGE.spdx.json``, by syft from the image's own files; returns its path.

    It names packages, not their files: eighty thousand of a worker, whose digests would take four
    times the work and make 57 MB of 2.

    Raises:
        BuildError: there is no syft, or it failed.
    """
    syft = find_syft()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"taut-{image}{_suffix(options.platform)}.spdx.json"
    scan = [syft, "scan", "--quiet", "--source-name", f"taut/{image}"]
    scan += ["--source-version", project_version(), "--output", f"spdx-json={target}"]
    if options.engine == "docker":
        _run(["env", *_PACKAGES_ALONE, *scan, f"docker:{tag_of(image, options.platform)}"])
        return target
    with _mounted(tag_of(image, options.platform)) as root:
        _run(["env", *_PACKAGES_ALONE, *scan, f"dir:{root}"])
    return target


def debian_packages(image: str, options: Options) -> list[str]:
    """``name=version`` of every Debian package in an image, as the image itself says.

    Raises:
        BuildError: the image cannot be read.
    """
    if options.engine == "docker":
        cat = ["docker", "run", "--rm", "--pull=never", "--entrypoint=cat"]
        named = tag_of(image, options.platform)
        return _output([*cat, named, f"/{_PACKAGES}"]).splitlines()
    with _mounted(tag_of(image, options.platform)) as root:
        return (root / _PACKAGES).read_text().splitlines()


def compare_packages(
    image: str, found: Sequence[str], folder: Path, platform: str | None = None
) -> None:
    """Compare an image's Debian packages with the list that an earlier build left.

    Args:
        image: its name.
        found: what :func:`debian_packages` returned.
        folder: of the earlier build's lists.
        platform: of the image, as Docker spells it; None for this machine's.

    Raises:
        BuildError: naming packages of other versions, or the list that is missing.
    """
    path = folder / _list_name(image, platform)
    if not path.is_file():
        raise BuildError(f"--like {folder}: has no {path.name}")
    earlier = set(path.read_text().splitlines())
    if other := sorted(set(found) ^ earlier):
        signs = [f"{'+' if one in found else '-'}{one}" for one in other[:6]]
        more = f" and {len(other) - 6} more" if len(other) > 6 else ""
        raise BuildError(f"{image}: other Debian packages than in {path}: {' '.join(signs)}{more}")


def _list_name(image: str, platform: str | None) -> str:
    return f"taut-{image}{_suffix(platform)}.debian.txt"


def _record(image: str, options: Options, given: argparse.Namespace) -> None:
    """Write down what an image was made of, and compare it with an earlier build's."""
    packages = debian_packages(image, options)
    given.packages.mkdir(parents=True, exist_ok=True)
    list_of_packages = given.packages / _list_name(image, options.platform)
    list_of_packages.write_text("".join(f"{one}\n" for one in packages))
    if given.like is not None:
        compare_packages(image, packages, given.like, options.platform)
    if not given.no_sbom:
        write_sbom(image, options, given.sbom)


@contextlib.contextmanager
def _mounted(tag: str) -> Iterator[Path]:
    """Where podman shows an image's files meanwhile."""
    root = _output(["podman", "image", "mount", tag]).strip()
    try:
        yield Path(root)
    finally:
        _run(["podman", "image", "unmount", tag])


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"failed: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Build taut's container images.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(LOCKS)}")
    parser.add_argument("--engine", choices=("docker", "buildah"), help="default: what is here")
    parser.add_argument(
        "--platform", choices=list(MACHINES), help="default: this machine's; others are emulated"
    )
    parser.add_argument("--base-image", help="instead of the Dockerfile's; holds CPython 3.11")
    parser.add_argument("--wheels", type=Path, help="download wheels to this directory, use them")
    parser.add_argument("--pip-conf", type=Path, help="pip's settings for the build (a secret)")
    parser.add_argument("--torch-index", help="index of CPU builds of torch")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave the gateway Python, without a C compiler"
    )
    parser.add_argument(
        "--sbom",
        type=Path,
        default=ROOT / "dist" / "sbom",
        metavar="DIR",
        help="where bills of materials go (default dist/sbom)",
    )
    parser.add_argument(
        "--packages",
        type=Path,
        default=ROOT / "dist" / "packages",
        metavar="DIR",
        help="where the lists of Debian packages go (default dist/packages)",
    )
    parser.add_argument(
        "--like", type=Path, metavar="DIR", help="lists of an earlier build, which must be the same"
    )
    parser.add_argument("--no-sbom", action="store_true", help="write no bill of materials")
    return parser


def _engine(asked: str | None) -> str:
    """The engine that was asked for, else Docker where it can build, else buildah.

    Raises:
        BuildError: it is not here, or is a Docker without BuildKit.
    """
    if asked != "buildah" and shutil.which("docker"):
        buildx = ["docker", "buildx", "version"]
        if not subprocess.run(buildx, capture_output=True, check=False).returncode:
            return "docker"
        if asked == "docker":
            raise BuildError("this docker has no buildx: install it, or give --engine buildah")
    engine = asked or "buildah"
    if shutil.which(engine) is None:
        raise BuildError(f"no {engine} here: install Docker, or buildah and podman")
    return engine


def main() -> int:
    """Build what the command line names; returns the exit code."""
    given = _parser().parse_args()
    images = given.images or list(DEFAULT)
    try:
        if unknown := [image for image in images if image not in LOCKS]:
            raise BuildError(f"{unknown[0]}: no such image; there are {', '.join(LOCKS)}")
        engine = _engine(given.engine)
        if given.base_image is None:
            for image in images:
                require_base(image, given.platform)
        if not given.no_sbom:
            find_syft()
        if (
            given.platform is not None and engine == "buildah"
        ):  # a builder of Docker's may be remote
            require_runnable(given.platform)
        wheels = given.wheels.resolve() if given.wheels else None
        options = Options(
            engine,
            given.base_image,
            wheels,
            given.pip_conf,
            given.torch_index,
            compiled=not given.no_compile,
            platform=given.platform,
        )
        if wheels is not None:
            download_wheels(images, wheels, platform=given.platform)
        for image in images:
            _run(build_command(image, options))
            _record(image, options, given)
    except BuildError as error:
        print(f"docker/build.py: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
