"""A model on several nodes: how ranks find each other, start, and are asked whether they live."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from chart_rendering import (
    Document,
    changed,
    needs_helm,
    render,
    render_set,
    set_values,
    template,
    the,
)

pytestmark = needs_helm
MULTI = set_values("multi-node")
DATA = changed(
    MULTI, "variants.0.multiNode", {"size": 2, "dataParallelSize": 16, "masterPort": 13345}
)
DATA["variants"][0]["vllmArgs"] = ["--enable-expert-parallel"]


def ranks(rendered: list[Document]) -> tuple[Document, Document]:
    """The containers of the first rank and of the others."""
    group = the(rendered, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, follower = (
        group[key]["spec"]["containers"][0] for key in ("leaderTemplate", "workerTemplate")
    )
    return leader, follower


def run(container: Document, folder: Path, *programs: str, **env: str) -> list[str]:
    """Run a rank's command here, with programs that write down how they were called."""
    for program in programs:
        path = folder / program
        path.write_text(f'#!/bin/sh\necho {program} "$@" >> "{folder}/calls"\n')
        path.chmod(0o755)
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = [*container["command"], *container.get("args", [])]
    for program in ("sh", "sleep"):
        (folder / program).symlink_to(str(shutil.which(program)))
    given = {"PATH": str(folder), "POD_IP": "10.0.0.1", **env}
    subprocess.run(command, check=True, timeout=30, env=given)
    return (folder / "calls").read_text().splitlines()


def test_engines_of_a_node_begin_at_its_share(tmp_path: Path):
    leader, follower = ranks(render(DATA))
    own = ["--data-parallel-size", "16", "--data-parallel-size-local", "8"]
    address = ["--data-parallel-address", "$(LWS_LEADER_ADDRESS)"]
    port = ["--data-parallel-rpc-port", "13345"]
    assert "command" not in leader
    assert leader["args"][-8:] == [*own, *address, *port]
    assert follower["args"][-9:] == [*own, *address, *port, "--headless"]
    (call,) = run(follower, tmp_path, "taut", LWS_WORKER_INDEX="1")
    assert call.startswith("taut worker /models/checkpoints/fp8")
    assert call.endswith("--headless --data-parallel-start-rank 8")


def test_init_of_the_image_stays_where_there_is_one(tmp_path: Path):
    _, follower = ranks(render(DATA))
    (call,) = run(follower, tmp_path, "tini", LWS_WORKER_INDEX="3")
    assert call.startswith("tini -- taut worker")
    assert call.endswith("--data-parallel-start-rank 24")


def test_head_of_ray_starts_before_the_worker(tmp_path: Path):
    leader, _ = ranks(render_set("multi-node-ray"))
    head, worker = run(leader, tmp_path, "ray", "taut")
    assert head.startswith("ray start --head --port=6379 --node-ip-address=10.0.0.1")
    assert worker.startswith("taut worker /models/checkpoints/fp8")
    assert worker.endswith("--distributed-executor-backend ray")


def test_ray_joins_a_head_that_listens(tmp_path: Path):
    values = set_values("multi-node-ray")
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        port = head.getsockname()[1]
        _, follower = ranks(render(changed(values, "variants.0.multiNode.masterPort", port)))
        assert "args" not in follower
        (call,) = run(follower, tmp_path, "ray", LWS_LEADER_ADDRESS="127.0.0.1")
    assert call.startswith(f"ray start --address=127.0.0.1:{port} --node-ip-address=10.0.0.1")
    assert call.endswith("--block")


@pytest.mark.parametrize("listens", [True, False])
def test_follower_is_ready_while_its_leader_can_be_reached(listens: bool):
    with socket.socket() as leader:
        leader.bind(("127.0.0.1", 0))
        if listens:
            leader.listen()
        port = leader.getsockname()[1]
        _, follower = ranks(
            render(changed(MULTI, "variants.0.multiNode", {"size": 2, "masterPort": port}))
        )
        probe = follower["readinessProbe"]["exec"]["command"]
        env = {**os.environ, "LWS_LEADER_ADDRESS": "127.0.0.1"}
        done = subprocess.run(probe, env=env, timeout=30, capture_output=True)
    assert (done.returncode == 0) is listens


def test_topology_queue_network_and_a_store_that_is_only_read():
    rendered = render_set("multi-node-ray")
    group = the(rendered, "LeaderWorkerSet")
    assert group["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "topology.example/rack",
        "taut/replicas": str(group["spec"]["replicas"]),
    }
    assert group["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "models"
    assert group["spec"]["startupPolicy"] == "LeaderCreated"
    for key in ("leaderTemplate", "workerTemplate"):
        pod = group["spec"]["leaderWorkerTemplate"][key]
        assert pod["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma-net"}
        (models,) = [v for v in pod["spec"]["volumes"] if v["name"] == "models"]
        assert models["persistentVolumeClaim"]["readOnly"] is True


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "variants.0.multiNode.dataParallelSize",
            15,
            "dataParallelSize: 15 is no multiple of size 2",
        ),
        ("variants.0.multiNode.engine", "ray", "dataParallelSize: for engine mp"),
        ("variants.0.name", "a-name-of-twenty-four-ch", "fullnameOverride:"),
        ("modelStore.accessMode", "ReadWriteOnce", "needs ReadWriteMany or ReadOnlyMany"),
    ],
)
def test_group_that_cannot_start_is_refused(path: str, value: object, message: str):
    long = changed(DATA, "fullnameOverride", "a" * 24)
    assert template(long).returncode == 0
    done = template(changed(long, path, value))
    assert done.returncode != 0 and message in done.stderr, done.stderr
