"""The chart comes up in every order of arrival: played by a model, not by a cluster."""

from __future__ import annotations

import copy

import pytest
from chart_rendering import (
    OWN_IMAGES,
    Document,
    changed,
    documents,
    helm,
    needs_helm,
    of_kind,
    render,
    set_values,
    the,
)
from cluster_names import Names, is_dns_label
from generate import CHART
from scheduler_model import Cluster, Node, State, Volume
from scheduler_pods import phases

pytestmark = needs_helm
GPU, ZONE = "nvidia.com/gpu", "topology.kubernetes.io/zone"
CPU_NODE = Node("cpu", {ZONE: "a"})
ONE = set_values("one-gpu")
GPU_NODE = Node("gpu", {ZONE: "a", **ONE["variants"][0]["nodeSelector"]}, (GPU,), {GPU: 1})
DEFAULT = {
    "image": {"worker": {"repository": "taut/worker-cuda"}},
    "model": {"name": "m", "source": "owner/m", "maxModelLen": 8192},
    "variants": [
        {"name": "w4a16", "checkpoint": "checkpoints/w4a16", "recipe": "w4a16", "gpus": 1}
    ],
}
"""A GPU model as most people begin: compressed on a CPU, nothing said of nodes."""
CLUSTERS = {
    "local volumes": Cluster((CPU_NODE, GPU_NODE), Volume(local=True)),
    "volumes of a zone": Cluster((CPU_NODE, GPU_NODE), Volume(local=False)),
    "GPUs in another zone": Cluster((Node("cpu", {ZONE: "b"}), GPU_NODE), Volume(local=False)),
}
SETS = {
    "default": DEFAULT,
    "one-gpu": ONE,
    "argocd": changed(ONE, "prepare.run", "argocd"),
    "pod": changed(ONE, "prepare.run", "pod"),
    "default in the pod": changed(DEFAULT, "prepare", {"run": "pod"}),
    "emptyDir": changed(DEFAULT, "modelStore", {"emptyDir": {}}),
}


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", SETS)
def test_every_order_comes_up(name: str, cluster: str):
    assert CLUSTERS[cluster].play(render(SETS[name])) == []


def as_objects(rendered: list[Document]) -> list[Document]:
    """The same without hooks: everything arrives at once, as with a Job beside the workers."""
    plain = copy.deepcopy(rendered)
    for document in plain:
        notes = document["metadata"].get("annotations", {})
        if "pre-install" in notes.get("helm.sh/hook", ""):
            del notes["helm.sh/hook"]
    return plain


@pytest.mark.parametrize("name", ["default", "one-gpu"])
def test_model_finds_the_deadlock_of_a_job_beside_the_workers(name: str):
    stuck = CLUSTERS["local volumes"].play(as_objects(render(SETS[name])))
    waiting = {pod for run in stuck for pod in run.waiting}
    assert waiting == {"rel-taut-prepare", "rel-taut-worker-w4a16-0"}


def test_model_finds_a_volume_that_was_made_where_no_worker_fits():
    """Without a worker's GPU the Job may choose the node of the volume, and chooses wrong."""
    values = changed(DEFAULT, "prepare", {"holdGpus": False})
    for name in CLUSTERS:
        stuck = CLUSTERS[name].play(render(values))
        assert bool(stuck) is (name != "volumes of a zone"), name


def test_compressing_on_a_gpu_and_on_a_cpu_takes_the_worker_s_node():
    for values in (DEFAULT, changed(DEFAULT, "prepare", {"device": "cuda", "gpus": 1})):
        ends = CLUSTERS["local volumes"].ends(render(values))
        assert {dict(end.bound)["rel-taut-models"] for end in ends} == {"gpu"}
        assert all("rel-taut-prepare" in end.ended for end in ends)


def serving(values: Document) -> State:
    """How a release came up, with a worker on the GPU node."""
    ends = CLUSTERS["local volumes"].ends(render(values))
    (end,) = ends
    assert dict(end.placed) == {"rel-taut-worker-w4a16-0": "gpu"}
    return end


BOUND = changed(DEFAULT, "prepare", {"holdGpus": False})
"""As the chart renders it where the claim has its volume (test_releases.py)."""


def test_new_recipe_is_compressed_beside_the_worker_that_serves():
    other = changed(BOUND, "variants.0.recipe", "w8a8")
    other = changed(other, "variants.0.checkpoint", "checkpoints/w8a8")
    (job,) = phases(render(other))[0]
    assert job.wants() == {}
    assert CLUSTERS["local volumes"].play(render(other), serving(DEFAULT)) == []


def test_new_recipe_on_the_gpu_that_serves_has_to_wait_for_it():
    """What README says of a single GPU: compress on the CPU then, or stop the worker first."""
    computes = changed(BOUND, "prepare", {"holdGpus": False, "device": "cuda", "gpus": 1})
    stuck = CLUSTERS["local volumes"].play(render(computes), serving(DEFAULT))
    assert {run.waiting for run in stuck} == {("rel-taut-prepare",)}


JUDGED = changed(
    changed(DEFAULT, "validation", {"enabled": True, "baseline": "base", "candidate": "w4a16"}),
    "validation.text",
    {"configMap": "text"},
)
JUDGED["variants"].append({"name": "base", "checkpoint": "models/m", "gpus": 1})
TWO_GPUS = Node("gpu", {ZONE: "a"}, (GPU,), {GPU: 2})


def test_validation_reaches_the_volume_on_the_node_of_the_workers():
    rendered = render(JUDGED)
    assert Cluster((CPU_NODE, TWO_GPUS)).play(rendered) == []
    job = the(rendered, "Job", "-validation")
    del job["spec"]["template"]["spec"]["tolerations"]
    stuck = Cluster((CPU_NODE, TWO_GPUS)).play(rendered)
    assert {run.waiting for run in stuck} == {("rel-taut-validation",)}


def test_all_variants_of_one_volume_must_fit_on_one_node():
    two = copy.deepcopy(DEFAULT)
    two["variants"].append({**two["variants"][0], "name": "fp8", "checkpoint": "checkpoints/fp8"})
    rendered = render(two)
    assert CLUSTERS["local volumes"].play(rendered) != [], "one GPU is not enough for two"
    assert Cluster((CPU_NODE, TWO_GPUS)).play(rendered) == []


MULTI = set_values("multi-node")


def test_followers_find_a_leader_that_waits_for_them():
    rendered = render(MULTI)
    group = the(rendered, "LeaderWorkerSet")
    assert Names.of(rendered).unready_leader_resolves(group)
    assert group["metadata"]["name"] not in {
        each["metadata"]["name"] for each in of_kind(rendered, "Service")
    }


def test_model_finds_a_group_that_is_called_as_a_service():
    rendered = copy.deepcopy(render(MULTI))
    group = the(rendered, "LeaderWorkerSet")
    group["metadata"]["name"] = the(rendered, "Service", "-worker-fp8")["metadata"]["name"]
    assert not Names.of(rendered).unready_leader_resolves(group)


@pytest.mark.parametrize("release", ["a" * 53, "taut.v1.2", "1taut", "9", "my-taut"])
def test_services_have_names_that_a_service_may_have(release: str):
    files = [f"--values={path}" for path in (OWN_IMAGES, CHART / "ci/cpu-minimal.yaml")]
    done = helm("template", release, str(CHART), *files)
    assert done.returncode == 0, done.stderr
    names = [each["metadata"]["name"] for each in of_kind(documents(done.stdout), "Service")]
    assert names and all(is_dns_label(name) for name in names), names
