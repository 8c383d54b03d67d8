"""Gateway pods of the chart in containers: they serve, and are replaced without a lost request.

The worker behind them is a stand-in; ``test_pods_model.py`` has the real one.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from chart_rendering import Document, changed, needs_helm, render, set_values, the

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "images"))

from built_images import image
from container_engine import engine, wait_for
from podman_pods import Node, Pod, node

pytestmark = [needs_helm, pytest.mark.timeout(1800)]  # the first test may build the image
MODEL = "smollm2-135m-instruct"
VALUES = changed(
    changed(set_values("cpu-minimal"), "gateway.drain", {"acceptSeconds": 2, "timeoutSeconds": 30}),
    "modelStore.existingClaim",
    "none",
)
WORKER = "rel-taut-worker-w8a8.ns.svc.cluster.local"
STAND_IN = Path(__file__).with_name("stand_in_worker.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    here, gateway = engine(), image("gateway")
    with node(here, tmp_path_factory.mktemp("pods")) as cluster:
        rendered = render(VALUES)
        cluster.config_maps = [the(rendered, "ConfigMap", end) for end in ("-gateway", "-scripts")]
        options = ("--network", f"{cluster.name}:alias={WORKER}", "-v", f"{STAND_IN}:/worker.py:ro")
        with here.container(gateway, "/worker.py", options=(*options, "--entrypoint", "python3")):
            yield cluster


def deployment() -> Document:
    return the(render(VALUES), "Deployment", "-gateway")


def get(pod: Pod, path: str) -> int:
    """What an HTTP probe sees; 0 if nobody answers."""
    connection = http.client.HTTPConnection(pod.address, 8000, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def start(cluster: Node, name: str) -> Pod:
    """Play a gateway pod and wait for its readiness probe."""
    pod = cluster.play(deployment(), name)
    probe = deployment()["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
    wait_for(lambda: get(pod, probe["path"]) == 200, 240, lambda: pod.problem + pod.logs("gateway"))
    return pod


def end(pod: Pod) -> None:
    """What the kubelet does to a pod that is deleted: stop hook, then SIGTERM."""
    spec = deployment()["spec"]["template"]["spec"]
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert pod.exec("gateway", *hook) == (0, "")
    code = pod.stop("gateway", spec["terminationGracePeriodSeconds"])
    assert code == 0, pod.logs("gateway")


class Clients:
    """Threads in a closed loop that do what a load balancer does.

    They go round the addresses and ask the next one where a connection is refused, is closed
    before the first byte, or is answered 503 by a gateway that drains.
    """

    def __init__(self, pods: list[Pod], count: int) -> None:
        self.addresses = [pod.address for pod in pods]
        self.ended: Counter[str] = Counter()
        self.retries = 0
        self.open = True
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._visit, args=(number,)) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> Counter[str]:
        self.open = False
        for thread in self._threads:
            thread.join()
        return self.ended

    def _visit(self, number: int) -> None:
        turn = number
        while self.open:
            turn += 1
            ended = self._ask(turn, stream=number % 2 == 0)
            with self._lock:
                self.ended[ended] += 1

    def _ask(self, turn: int, *, stream: bool) -> str:
        failure = "no address"
        for attempt in range(50):
            addresses = list(self.addresses)
            address = addresses[(turn + attempt) % len(addresses)]
            with self._lock:
                self.retries += attempt > 0
            with closing(http.client.HTTPConnection(address, 8000, timeout=60)) as connection:
                try:
                    answer = self._request(connection, stream=stream)
                except (OSError, http.client.HTTPException) as problem:
                    failure = type(problem).__name__  # refused, or closed before the first byte
                    continue
                failure = self._judge(answer, stream=stream)
            if "draining" not in failure:
                return failure or "ok"
        return failure

    @staticmethod
    def _request(
        connection: http.client.HTTPConnection, *, stream: bool
    ) -> http.client.HTTPResponse:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "stream": stream}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection.getresponse()

    @staticmethod
    def _judge(answer: http.client.HTTPResponse, *, stream: bool) -> str:
        try:
            text = answer.read()
        except http.client.HTTPException as problem:
            return f"cut: {type(problem).__name__}"
        if answer.status != 200:
            return f"{answer.status} {text[:300]!r}"
        if stream and not text.endswith(b"data: [DONE]\n\n"):
            return "stream without its end"
        return ""


def test_gateway_pod_runs_as_the_chart_says(cluster: Node):
    pod = start(cluster, "alone")
    assert pod.exec("gateway", "id", "-u") == (0, "10001\n")
    _, status = pod.exec("gateway", "cat", "/proc/1/status")
    facts = dict(line.split(":\t", 1) for line in status.split("\n") if ":\t" in line)
    assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
    assert facts["NoNewPrivs"].strip() == "1"
    assert pod.exec("gateway", "touch", "/tmp/x")[0] == 0
    for place in ("/x", "/etc/taut/config/x"):
        code, said = pod.exec("gateway", "touch", place)
        assert code == 1 and "Read-only file system" in said
    ended = Clients([pod], 2)
    wait_for(lambda: sum(ended.ended.values()) > 3, 240, lambda: str(ended.ended))
    assert set(ended.finish()) == {"ok"}
    assert pod.stop("gateway", 30) == 0


def test_gateways_are_replaced_one_after_the_other_without_a_lost_request(cluster: Node):
    first, second = start(cluster, "first"), start(cluster, "second")
    clients = Clients([first, second], 8)
    try:
        wait_for(lambda: clients.ended["ok"] > 20, 240, lambda: str(clients.ended))
        for old, name in ((first, "third"), (second, "fourth")):
            new = start(cluster, name)
            clients.addresses.append(new.address)
            end(old)
            # The old address was asked to the end, as by a load balancer that has not heard.
            clients.addresses.remove(old.address)
        before = clients.ended["ok"]
        wait_for(lambda: clients.ended["ok"] > before + 20, 240, lambda: str(clients.ended))
    finally:
        ended = clients.finish()
    assert set(ended) == {"ok"}
    assert clients.retries > 0, "no client met a gateway that was going"
