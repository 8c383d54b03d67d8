"""A Kubernetes control plane on this machine: etcd, API server, scheduler, controller manager.

No package index has these programs, so the tests take those that are there: in the folder that
``KUBEBUILDER_ASSETS`` names, as other projects do, or on ``PATH``. They listen on the loopback
address alone. There is no node: what a kubelet does is done by ``node_agents.py``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml
from cluster_api import ClusterApi
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
TOKEN = "admin"
START_SECONDS = 90.0
# Without a kubelet no node sends heartbeats.
CONTROLLERS = "*,-node-lifecycle-controller,-node-ipam-controller,-ttl-controller"


class NotStartedError(Exception):
    """A program ended, or did not answer in time."""


def find(name: str) -> str | None:
    """Where a program is, or None."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    return shutil.which(name, path=folder) or shutil.which(name)


def missing() -> list[str]:
    """Programs that are not there."""
    return [name for name in PROGRAMS if find(name) is None]


@contextmanager
def control_plane(folder: Path) -> Iterator[tuple[ClusterApi, Path]]:
    """Start it; yields its API and a kubeconfig.

    Raises:
        NotStartedError: with the end of the log of what did not start.
    """
    etcd, peer, api = _free_ports(3)
    config = _kubeconfig(folder, f"https://127.0.0.1:{api}")
    key = _service_account_key(folder)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    with ExitStack() as running:
        for name, arguments in (
            ("etcd", _etcd(folder, etcd, peer)),
            ("kube-apiserver", _api_server(folder, etcd, api, key)),
        ):
            process = running.enter_context(_running(folder, name, arguments))
        client = running.enter_context(ClusterApi(f"https://127.0.0.1:{api}", TOKEN))
        _wait_until_ready(client, process, folder / "kube-apiserver.log")
        controllers = _controller_manager(config, key)
        running.enter_context(_running(folder, "kube-controller-manager", controllers))
        scheduler = [f"--kubeconfig={config}", "--leader-elect=false", "--secure-port=0"]
        running.enter_context(_running(folder, "kube-scheduler", scheduler))
        yield client, config


def _etcd(folder: Path, client: int, peer: int) -> list[str]:
    here, there = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={here}",
        f"--advertise-client-urls={here}",
        f"--listen-peer-urls={there}",
        f"--initial-advertise-peer-urls={there}",
        f"--initial-cluster=default={there}",
        "--unsafe-no-fsync",
    ]


def _api_server(folder: Path, etcd: int, port: int, key: Path) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--cert-dir={folder}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-cluster-ip-range=10.96.0.0/16,fd00:96::/108",
        "--allow-privileged=true",
    ]


def _controller_manager(config: Path, key: Path) -> list[str]:
    return [
        f"--kubeconfig={config}",
        "--leader-elect=false",
        "--secure-port=0",
        f"--controllers={CONTROLLERS}",
        f"--service-account-private-key-file={key}",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--horizontal-pod-autoscaler-sync-period=2s",
        "--pvclaimbinder-sync-period=2s",
    ]


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has: held together, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _service_account_key(folder: Path) -> Path:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    path = folder / "service-account.key"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return path


def _kubeconfig(folder: Path, address: str) -> Path:
    path = folder / "kubeconfig"
    cluster = {"server": address, "insecure-skip-tls-verify": True}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


@contextmanager
def _running(folder: Path, name: str, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    program = find(name)
    assert program is not None, name
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=log, cwd=folder)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(client: ClusterApi, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not client.is_ready():
        if process.poll() is not None or time.monotonic() > end:
            tail = log.read_text(errors="replace")[-2000:]
            raise NotStartedError(f"kube-apiserver did not start: {tail}")
        time.sleep(0.2)
