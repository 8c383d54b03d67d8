"""Checkpoints that come from outside the cluster: copied by rclone, or mounted as an OCI image."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chart_rendering import (
    Document,
    changed,
    every_container,
    needs_helm,
    of_kind,
    pod_templates,
    render,
    set_values,
    template,
    the,
)
from test_commands import parse

pytestmark = needs_helm
CPU = set_values("cpu-minimal")
BESIDE = Path(sys.executable).parent / "rclone"
RCLONE = str(BESIDE) if BESIDE.exists() else shutil.which("rclone")
needs_rclone = pytest.mark.skipif(
    RCLONE is None, reason="NO rclone HERE: copying is NOT run; 'make chart-tools' installs it"
)
STORE = "store:bucket/w8a8"
COPIED = changed(
    changed(changed(CPU, "model.source", ""), "variants.0.recipe", None),
    "prepare",
    {
        "copy": {
            "env": {"RCLONE_CONFIG_STORE_TYPE": "s3", "RCLONE_CONFIG_STORE_PROVIDER": "Rclone"},
            "existingSecret": "s3-access",
            "directories": [{"from": STORE, "to": "checkpoints/w8a8"}],
        }
    },
)
del COPIED["variants"][0]["recipe"]
ARTIFACT = {"reference": "registry.example/models/w8a8@sha256:" + "1" * 64}
MOUNTED = changed(COPIED, "variants.0.artifact", ARTIFACT)
MOUNTED["prepare"] = {"enabled": False}


def steps(values: Document) -> list[Document]:
    (job,) = [d for d in of_kind(render(values), "Job") if "prepare" in d["metadata"]["name"]]
    return every_container(job["spec"]["template"])


def test_directories_are_copied_before_anything_is_fetched_or_compressed():
    both = changed(COPIED, "model.source", "smollm2-135m-instruct")
    both = changed(both, "variants.0.recipe", "w8a8")
    assert [step["name"] for step in steps(both)] == [
        "copy-0",
        "place-0",
        "verify-0",
        "fetch",
        "compress-w8a8",
        "list",
    ]
    assert [step["name"] for step in steps(COPIED)] == [
        "copy-0",
        "place-0",
        "verify-0",
        "list",
    ]
    verify = steps(COPIED)[2]
    assert verify["args"] == ["model", "verify", "/models/checkpoints/w8a8"]
    assert str(parse(verify["args"]).params["directory"]) == "/models/checkpoints/w8a8"
    elsewhere = changed(COPIED, "prepare.copy.directories", [{"from": STORE, "to": "base"}])
    assert [step["name"] for step in steps(elsewhere)] == ["copy-0", "place-0", "list"]


def test_access_comes_from_a_secret_and_only_there():
    copy = steps(COPIED)[0]
    assert copy["image"] == "rclone/rclone:1.75.2"
    assert copy["envFrom"] == [{"secretRef": {"name": "s3-access"}}]
    assert {"name": "RCLONE_CONFIG_STORE_TYPE", "value": "s3"} in copy["env"]
    digest = "sha256:" + "a" * 64
    image = {"repository": "mirror.example/rclone", "digest": digest}
    own = steps(changed(COPIED, "prepare.copy.image", image))[0]
    assert own["image"] == f"mirror.example/rclone@{digest}"
    assert all("envFrom" not in step for step in steps(COPIED)[1:])


def run_step(step: Document, volume: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one step of the Job here, with its volume at ``volume``."""
    moved = [part.replace("/models/", f"{volume}/") for part in step["args"]]
    program = step.get("command", [RCLONE])
    given = {entry["name"]: entry["value"] for entry in step["env"]} if "env" in step else {}
    given |= {"HOME": str(volume), "RCLONE_CONFIG": str(volume / "rclone.conf")} | env
    return subprocess.run(
        [*program, *moved],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], **given},
    )


@contextmanager
def s3(folder: Path) -> Iterator[dict[str, str]]:
    """An S3 server over a folder, by rclone itself; yields what the Secret would hold."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    assert RCLONE is not None
    command = [
        RCLONE,
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        "access-id,secret-key",
    ]
    with (folder.parent / "s3.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, str(folder)],
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"], "RCLONE_CONFIG": str(folder.parent / "none")},
        )
    try:
        deadline = time.monotonic() + 30
        while True:
            assert server.poll() is None and time.monotonic() < deadline
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield {
            "RCLONE_CONFIG_STORE_ENDPOINT": f"http://127.0.0.1:{port}",
            "RCLONE_CONFIG_STORE_ACCESS_KEY_ID": "access-id",
            "RCLONE_CONFIG_STORE_SECRET_ACCESS_KEY": "secret-key",
        }
    finally:
        server.terminate()
        server.wait(20)


@needs_rclone
@pytest.mark.timeout(180)
def test_checkpoint_from_s3_appears_whole_and_is_copied_once(tmp_path: Path):
    source = tmp_path / "s3" / "bucket" / "w8a8"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(os.urandom(100_000))
    volume = tmp_path / "volume"
    volume.mkdir()
    place = volume / "checkpoints" / "w8a8"
    copy, rename, *_ = steps(COPIED)
    with s3(tmp_path / "s3") as secret:
        assert run_step(copy, volume, secret).returncode == 0
        assert not place.exists(), "in its place before it is whole"
        assert run_step(rename, volume, {}).returncode == 0
        assert {path.name: path.read_bytes() for path in place.iterdir()} == {
            path.name: path.read_bytes() for path in source.iterdir()
        }
        before = {path: path.stat().st_mtime_ns for path in place.iterdir()}
        for step in (copy, rename):
            again = run_step(step, volume, secret)
            assert again.returncode == 0, again.stderr
        assert {path: path.stat().st_mtime_ns for path in place.iterdir()} == before
        arriving = [path for path in (volume / ".arriving").rglob("*") if path.is_file()]
        assert arriving == [], "copied a second time"


@needs_rclone
@pytest.mark.timeout(180)
def test_copy_without_access_fails_and_leaves_the_place_empty(tmp_path: Path):
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    volume = tmp_path / "volume"
    volume.mkdir()
    copy, rename, *_ = steps(COPIED)
    with s3(tmp_path / "s3") as secret:
        wrong = {**secret, "RCLONE_CONFIG_STORE_SECRET_ACCESS_KEY": "another-key"}
        copy = {**copy, "args": [*copy["args"], "--retries=1", "--low-level-retries=1"]}
        assert run_step(copy, volume, wrong).returncode != 0
    assert run_step(rename, volume, {}).returncode != 0
    assert not (volume / "checkpoints" / "w8a8").exists()


def test_artifact_takes_the_place_of_the_model_store():
    rendered = render(MOUNTED)
    assert not of_kind(rendered, "PersistentVolumeClaim")
    pod = the(rendered, "Deployment", "-worker-w8a8")["spec"]["template"]
    (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "artifact"]
    assert volume["image"] == {**ARTIFACT, "pullPolicy": "IfNotPresent"}
    (container,) = pod["spec"]["containers"]
    assert container["args"][1] == "/artifact/checkpoints/w8a8"
    assert "/artifact/checkpoints/w8a8" in container["startupProbe"]["exec"]["command"]
    assert {m["name"] for m in container["volumeMounts"]} >= {"artifact"}
    assert "models" not in {m["name"] for m in container["volumeMounts"]}
    assert "affinity" not in pod["spec"] and "taut/store" not in pod["metadata"]["labels"]
    assert "initContainers" not in pod["spec"]


def test_artifact_is_valid_for_every_kubernetes_that_knows_it():
    package = pytest.importorskip("kubernetes_validate", reason="NO kubernetes-validate HERE")
    for minor in range(31, 38):
        for document in render(MOUNTED):
            package.utils.validate(document, f"1.{minor}", strict=True)


def test_older_kubernetes_is_refused():
    done = template(MOUNTED, options=("--kube-version", "1.30.0"))
    assert done.returncode != 0
    assert "variants[w8a8].artifact: needs Kubernetes 1.31" in done.stderr
    assert template(MOUNTED, options=("--kube-version", "1.31.0")).returncode == 0
    assert template(CPU, options=("--kube-version", "1.29.0")).returncode == 0


def test_pods_that_mount_neither_store_nor_cache_may_run_anywhere():
    cache = changed(MOUNTED, "worker", {"cache": {"size": "1Gi"}})
    for values, on_claim in ((MOUNTED, False), (cache, True)):
        for where, pod in pod_templates(render(values)):
            if "worker" in where:
                assert ("affinity" in pod["spec"]) is on_claim, where
