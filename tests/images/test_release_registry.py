"""docker/release.py against a real registry: what it pushed and signed is pulled and verified.

The images are of one file each, built by buildah from Dockerfiles of this test; everything else is
what a release does. The registry speaks TLS with a certificate of this test's own.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from container_engine import REPOSITORY
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent
SEARCHED = f"{BIN}{os.pathsep}{os.environ['PATH']}"
PROGRAMS = ("docker-registry", "buildah", "helm", "syft", "cosign", "git")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
IMAGES = ("gateway", "worker-cpu", "toolbox", "worker-cuda")
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"NO {', '.join(MISSING)} HERE: releases NOT pushed"),
    pytest.mark.timeout(300),
]


@dataclass(frozen=True)
class Published:
    """A release in a registry: where, and how programs reach it."""

    registry: str
    folder: Path
    env: dict[str, str]

    def run(self, *command: object, done: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program beside the release."""
        words = [str(part) for part in command]
        result = subprocess.run(
            words, capture_output=True, text=True, env=self.env, cwd=self.folder, timeout=120
        )
        assert not done or result.returncode == 0, result.stdout + result.stderr
        return result

    def digest(self, image: str) -> str:
        """What buildah says it pushed."""
        return (self.folder / "out" / f"taut-{image}.digest").read_text().strip()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of its own for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "registry")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, private = folder / "registry.crt", folder / "registry.key"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(*encoding, serialization.NoEncryption()))
    return pem, private


@contextmanager
def registry(folder: Path) -> Iterator[tuple[str, Path]]:
    """A registry on a free port; yields its address and the certificate to trust."""
    pem, private = certificate(folder)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "stored")}},
        "http": {
            "addr": f"127.0.0.1:{port}",
            "tls": {"certificate": str(pem), "key": str(private)},
        },
    }
    (folder / "registry.yml").write_text(yaml.safe_dump(config))
    program = shutil.which("docker-registry", path=SEARCHED)
    assert program is not None
    with (folder / "registry.log").open("wb") as log:
        served = subprocess.Popen(
            [program, "serve", str(folder / "registry.yml")], stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + 20
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < end, (folder / "registry.log").read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}/team", pem
    finally:
        served.terminate()
        served.wait(20)


def tagged_checkout(folder: Path, env: dict[str, str]) -> Path:
    """A repository with the release script and the chart, and images of one file each."""
    root = folder / "checkout"
    shutil.copytree(REPOSITORY / "k8s" / "chart", root / "k8s" / "chart")
    (root / "docker").mkdir()
    programs = sorted((REPOSITORY / "docker").glob("*.py"))
    for path in (*programs, REPOSITORY / "pyproject.toml", REPOSITORY / ".gitignore"):
        shutil.copy(path, root / path.relative_to(REPOSITORY))
    for image in IMAGES:
        text = f"FROM scratch\nCOPY pyproject.toml /{image}\n"
        (root / "docker" / f"{image}.Dockerfile").write_text(text)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example", "-C", str(root)]
    for words in (
        ["init", "--quiet"],
        ["add", "."],
        ["commit", "--quiet", "--message", "All"],
        ["tag", "v0.1.0"],
    ):
        subprocess.run([*git, *words], check=True, env=env)
    return root


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    """A version, published by the script as a maintainer would."""
    folder = tmp_path_factory.mktemp("release")
    with registry(folder) as (address, trusted):
        env = {
            "PATH": SEARCHED,
            "HOME": str(folder),
            "SSL_CERT_FILE": str(trusted),
            "COSIGN_PASSWORD": "secret",
            "STORAGE_DRIVER": "vfs",
            "PYTHONSAFEPATH": "1",
        }
        storage = folder / "storage.conf"
        places = f'graphroot = "{folder / "storage"}"\nrunroot = "{folder / "run"}"\n'
        storage.write_text(f'[storage]\ndriver = "vfs"\n{places}')
        env["CONTAINERS_STORAGE_CONF"] = str(storage)
        made = Published(address, folder, env)
        made.run("cosign", "generate-key-pair")
        script = tagged_checkout(folder, env) / "docker" / "release.py"
        options = ["--registry", address, "--engine", "buildah", "--folder", folder / "out"]
        key = ["--signing-key", folder / "cosign.key"]
        made.run(sys.executable, script, *options, *key, "--push")
        yield made


@pytest.mark.parametrize("image", IMAGES)
def test_image_is_pulled_by_its_digest_and_verified(published: Published, image: str):
    name = f"{published.registry}/taut/{image}"
    reference = f"{name}@{published.digest(image)}"
    published.run("buildah", "pull", "--quiet", f"docker://{reference}")
    described = json.loads(published.run("buildah", "inspect", "--type", "image", reference).stdout)
    assert described["FromImageDigest"] == published.digest(image)
    verify = ["--key", "cosign.pub", "--insecure-ignore-tlog=true"]
    published.run("cosign", "verify", *verify, reference)
    attested = ["verify-attestation", *verify, "--type", "spdxjson", reference]
    published.run("cosign", *attested)


def test_signature_of_another_key_and_unsigned_image_are_refused(published: Published):
    name = f"{published.registry}/taut/gateway"
    other = published.folder / "other"
    other.mkdir()
    published.run("cosign", "generate-key-pair", "--output-key-prefix", other / "cosign")
    verify = ["cosign", "verify", "--insecure-ignore-tlog=true", "--key"]
    reference = f"{name}@{published.digest('gateway')}"
    assert published.run(*verify, other / "cosign.pub", reference, done=False).returncode
    (published.folder / "Dockerfile").write_text("FROM scratch\nCOPY cosign.pub /\n")
    published.run("buildah", "bud", "--isolation", "chroot", "--tag", "unsigned", ".")
    target = f"{name}:unsigned"
    published.run("buildah", "push", "unsigned", f"docker://{target}")
    assert published.run(*verify, "cosign.pub", target, done=False).returncode


def test_chart_is_pulled_and_names_the_images_that_were_pushed(published: Published):
    where = f"oci://{published.registry}/charts/taut"
    published.run("helm", "pull", where, "--version", "0.1.0", "--destination", published.folder)
    archive = published.folder / "taut-0.1.0.tgz"
    rendered = published.run("helm", "template", "rel", archive).stdout
    for image in ("gateway", "worker-cpu", "toolbox"):
        reference = f"{published.registry}/taut/{image}@{published.digest(image)}"
        assert f"image: {reference}" in rendered.replace('"', ""), image
    chart = published.run("helm", "pull", where, "--version", "0.1.0")
    digest = (chart.stdout + chart.stderr).partition("Digest: ")[2].split()[0]
    verify = ["cosign", "verify", "--key", "cosign.pub", "--insecure-ignore-tlog=true"]
    published.run(*verify, f"{published.registry}/charts/taut@{digest}")
