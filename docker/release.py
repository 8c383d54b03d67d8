#!/usr/bin/env python3
"""Publish a version: images by digest, bills of materials, the chart, signatures.

``release.py --registry REGISTRY`` prints every command and does nothing; ``--push`` does them.
Needs Docker (or buildah, for one platform at a time), syft, cosign and helm, each logged in to the
registry. The published chart names the images by their digests, so that whoever installs
it sets no name of an image. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from build import LOCKS, ROOT, BuildError, Options, Publish, build_command, project_version, tag_of
from platforms import ONE_PLATFORM, require_runnable

_IN_CHART = {"gateway": "gateway", "worker": "worker-cpu", "toolbox": "toolbox"}
_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9._-]+)*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ReleaseError(Exception):
    """Nothing can be published; one line for the user."""


@dataclass(frozen=True)
class Release:
    """What is published where.

    Args:
        registry: host and path under which the images and ``charts`` lie.
        engine: ``docker`` or ``buildah``.
        platforms: of every image that has them.
        folder: for digests, bills of materials and the chart.
        version: of the project.
        torch_index: index of CPU builds of torch; see docker/build.py.
        signing_key: cosign's key; without one it signs with an identity, and in a public log.
    """

    registry: str
    engine: str
    platforms: tuple[str, ...]
    folder: Path
    version: str
    torch_index: str | None = None
    signing_key: str | None = None

    def cosign(self, verb: str) -> list[str]:
        """A command of cosign's, to which what it is about is added."""
        own = ["--key", self.signing_key, "--tlog-upload=false"] if self.signing_key else []
        return ["cosign", verb, "--yes", *own]

    def repository(self, image: str) -> str:
        """Name of an image in the registry, without a tag."""
        return f"{self.registry}/taut/{image}"

    def digest_file(self, image: str) -> Path:
        """Where the engine writes what it pushed."""
        return self.folder / f"taut-{image}.{'json' if self.engine == 'docker' else 'digest'}"


Step = list[str] | Callable[[], None]
DigestOf = Callable[[str], str]


def steps(release: Release, digest_of: DigestOf) -> Iterator[Step]:
    """Commands, and what is done between them, in order.

    Args:
        release: what is published.
        digest_of: digest of an image, or of ``chart``, once it was pushed.
    """
    for image in LOCKS:
        yield from _image_steps(release, image, digest_of)
    staged = release.folder / "chart"
    yield lambda: stage_chart(release, digest_of, staged)
    package = ["helm", "package", str(staged), "--destination", str(release.folder)]
    yield [*package, "--version", release.version, "--app-version", release.version]
    archive = release.folder / f"taut-{release.version}.tgz"
    yield ["helm", "push", str(archive), f"oci://{release.registry}/charts"]
    yield [*release.cosign("sign"), f"{release.registry}/charts/taut@{digest_of('chart')}"]


def _image_steps(release: Release, image: str, digest_of: DigestOf) -> Iterator[Step]:
    name = f"{release.repository(image)}:{release.version}"
    file = release.digest_file(image)
    if release.engine == "buildah":
        platform = ONE_PLATFORM.get(image, release.platforms[0])
        options = Options("buildah", torch_index=release.torch_index, platform=platform)
        yield build_command(image, options)
        built = tag_of(image, platform)
        yield ["buildah", "push", "--digestfile", str(file), built, f"docker://{name}"]
    else:
        only = ONE_PLATFORM.get(image)
        publish = Publish(name, (only,) if only else release.platforms, file)
        options = Options("docker", torch_index=release.torch_index, publish=publish)
        yield build_command(image, options)
    reference = f"{release.repository(image)}@{digest_of(image)}"
    sbom = release.folder / f"taut-{image}.spdx.json"
    yield ["syft", "scan", "--quiet", f"registry:{reference}", "--output", f"spdx-json={sbom}"]
    yield [*release.cosign("sign"), reference]
    attest = [*release.cosign("attest"), "--type", "spdxjson", "--predicate", str(sbom)]
    yield [*attest, reference]


def stage_chart(release: Release, digest_of: DigestOf, target: Path) -> None:
    """Copy the chart with the published images in its values.

    Raises:
        ReleaseError: the chart's values name their images otherwise than expected.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "k8s" / "chart", target)
    values = target / "values.yaml"
    text = values.read_text()
    for key, image in _IN_CHART.items():
        line = f'  {key}: {{repository: registry.invalid/taut/{image}, tag: "", digest: ""}}\n'
        if text.count(line) != 1:
            raise ReleaseError(
                f"k8s/chart/values.yaml: image.{key} is not as docker/release.py knows it"
            )
        named = f'{{repository: {release.repository(image)}, tag: "", digest: {digest_of(image)}}}'
        text = text.replace(line, f"  {key}: {named}\n")
    text = re.sub(r"^ *# Nobody can own this name.*\n", "", text, flags=re.MULTILINE)
    values.write_text(text)


def show(release: Release) -> None:
    """Print every command, with names in the place of digests."""
    for step in steps(release, lambda what: f"sha256:DIGEST-OF-{what}"):
        if isinstance(step, list):
            print(shlex.join(step))  # noqa: T201
        else:
            print("# the chart, with the digests above in its values:")  # noqa: T201


def run(release: Release) -> None:
    """Do it; the first command that fails ends it.

    Raises:
        ReleaseError: naming that command.
    """
    release.folder.mkdir(parents=True, exist_ok=True)
    of_chart: list[str] = []

    def digest_of(what: str) -> str:
        return of_chart[0] if what == "chart" else _pushed(release, what)

    for step in steps(release, digest_of):
        if not isinstance(step, list):
            step()
            continue
        print(shlex.join(step), flush=True)  # noqa: T201
        pushes_chart = step[:2] == ["helm", "push"]
        done = subprocess.run(step, capture_output=pushes_chart, text=True, check=False)
        if done.returncode:
            raise ReleaseError(f"failed: {shlex.join(step)}: {(done.stderr or '').strip()}")
        if pushes_chart:
            of_chart.append(_digest_in(done.stdout + done.stderr, "what helm push printed"))


def _pushed(release: Release, image: str) -> str:
    file = release.digest_file(image)
    text = file.read_text()
    if release.engine == "docker":
        text = str(json.loads(text).get("containerimage.digest"))
    return _digest_in(text, str(file))


def _digest_in(text: str, where: str) -> str:
    found = _DIGEST.search(text)
    if found is None:
        raise ReleaseError(f"{where}: no digest in it")
    return found[0]


def require_ready(release: Release) -> None:
    """Refuse before anything is built.

    Raises:
        ReleaseError: a program is missing, or this is not the commit of the version's tag.
        BuildError: buildah is to build what does not run here.
    """
    for program in (release.engine, "syft", "cosign", "helm"):
        if shutil.which(program) is None:
            raise ReleaseError(f"no {program} here: --push needs it on the PATH")
    if release.engine == "buildah":
        for platform in sorted({*release.platforms, *ONE_PLATFORM.values()}):
            require_runnable(platform)
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    if changed.returncode or changed.stdout.strip():
        raise ReleaseError("the working tree differs from its commit: commit, or put it aside")
    tags = subprocess.run(
        [*git, "tag", "--points-at", "HEAD"], capture_output=True, text=True, check=False
    )
    wanted = f"v{release.version}"
    if wanted not in tags.stdout.split():
        raise ReleaseError(f"HEAD has no tag {wanted}: git tag --sign {wanted}")


def checked_registry(text: str) -> str:
    """The registry, if it can be one.

    Raises:
        ReleaseError: it is not written like one, or is a placeholder.
    """
    if not _REGISTRY.fullmatch(text) or text.partition("/")[0] == "registry.invalid":
        raise ReleaseError(
            f"--registry {text[:80]!r}: write HOST[:PORT][/PATH], of a registry of yours"
        )
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Publish images and chart; prints only, unless --push."
    )
    parser.add_argument("--registry", required=True, help="HOST[:PORT][/PATH] that gets them")
    parser.add_argument(
        "--platforms", default="linux/amd64", help="default linux/amd64; also linux/arm64"
    )
    parser.add_argument("--engine", choices=("docker", "buildah"), default="docker")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "dist" / "release", help="default dist/release"
    )
    parser.add_argument("--torch-index", help="index of CPU builds of torch")
    parser.add_argument(
        "--signing-key",
        help="cosign's key, a file or a KMS address: nothing is written to a public log then",
    )
    parser.add_argument("--push", action="store_true", help="do it, not only say it")
    return parser


def main() -> int:
    """Publish what the command line says; returns the exit code."""
    given = _parser().parse_args()
    platforms = tuple(given.platforms.split(","))
    try:
        registry = checked_registry(given.registry)
        if unknown := [each for each in platforms if each not in ("linux/amd64", "linux/arm64")]:
            raise ReleaseError(f"--platforms {unknown[0]}: linux/amd64 and linux/arm64 are known")
        if given.engine == "buildah" and len(platforms) > 1:
            raise ReleaseError("--engine buildah: builds for one platform; use docker for both")
        release = Release(
            registry,
            given.engine,
            platforms,
            given.folder,
            project_version(),
            given.torch_index,
            given.signing_key,
        )
        if not given.push:
            show(release)
            return 0
        require_ready(release)
        run(release)
    except (BuildError, ReleaseError) as error:
        print(f"docker/release.py: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
