"""The model store: who fills it, who waits for it, and that its pods can all reach it."""

from __future__ import annotations

import pytest
from chart_rendering import (
    Document,
    changed,
    every_container,
    needs_helm,
    of_kind,
    pod_templates,
    render,
    render_set,
    set_values,
    the,
)

pytestmark = needs_helm
CPU = set_values("cpu-minimal")


def worker(rendered: list[Document]) -> Document:
    spec: Document = the(rendered, "Deployment", "-worker-w8a8")["spec"]
    return spec


def test_prepare_off_leaves_no_job_and_nobody_waits():
    rendered = render(changed(CPU, "prepare.enabled", False))
    assert [doc["metadata"]["name"] for doc in of_kind(rendered, "Job")] == ["rel-taut-smoke"]
    assert "initContainers" not in worker(rendered)["template"]["spec"]


def prepare_job(values: Document) -> Document:
    (job,) = [d for d in of_kind(render(values), "Job") if "prepare" in d["metadata"]["name"]]
    return job


@pytest.mark.parametrize(
    ("path", "value", "is_another"),
    [
        ("gateway.replicas", 3, False),
        ("prepare.resources", {"limits": {"memory": "9Gi"}}, False),
        ("variants.0.nodeSelector", {"disk": "ssd"}, False),
        ("variants.0.recipe", "w4a16", True),
        ("image.toolbox.tag", "0.2.0", True),
        ("prepare.env", {"HF_ENDPOINT": "https://mirror.example"}, False),
    ],
)
def test_content_of_prepare_is_what_is_made_and_not_where(
    path: str, value: object, is_another: bool
):
    def content(values: Document) -> str:
        found: str = prepare_job(values)["metadata"]["annotations"]["taut/content"]
        return found

    assert (content(CPU) != content(changed(CPU, path, value))) is is_another


def test_job_of_argo_cd_is_another_one_when_its_content_changes():
    argo = changed(CPU, "prepare", {"run": "argocd"})
    names = {
        prepare_job(values)["metadata"]["name"]
        for values in (argo, changed(argo, "gateway.replicas", 3))
    }
    other = prepare_job(changed(argo, "variants.0.recipe", "w4a16"))["metadata"]["name"]
    assert len(names) == 1 and other not in names


def claims(values: Document) -> list[Document]:
    return of_kind(render(values), "PersistentVolumeClaim")


def test_claim_is_there_before_the_job_and_no_hook_deletes_it():
    (claim,) = claims(CPU)
    job = prepare_job(CPU)
    mine, other = claim["metadata"]["annotations"], job["metadata"]["annotations"]
    assert mine["helm.sh/hook"] == other["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert int(mine["helm.sh/hook-weight"]) < int(other["helm.sh/hook-weight"])
    assert mine["helm.sh/hook-delete-policy"] not in HOOK_DELETES
    assert mine["argocd.argoproj.io/hook"] == "Skip"
    assert mine["helm.sh/resource-policy"] == "keep"
    assert other["helm.sh/hook-delete-policy"] == "before-hook-creation"


HOOK_DELETES = {"before-hook-creation", "hook-succeeded", "hook-failed"}
"""The policies that Helm knows."""


def test_claim_that_is_not_kept_is_taken_by_a_hook_when_the_release_is_gone():
    claim, last = claims(changed(CPU, "modelStore.keep", False))
    assert "helm.sh/resource-policy" not in claim["metadata"]["annotations"]
    assert last["metadata"]["name"] == claim["metadata"]["name"]
    assert last["metadata"]["annotations"]["helm.sh/hook"] == "post-delete"
    deletes = last["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert deletes == "before-hook-creation,hook-succeeded"


def test_for_argo_cd_claim_and_job_are_objects_of_one_wave_before_the_workers():
    rendered = render(changed(CPU, "prepare", {"run": "argocd"}))
    early = {
        doc["kind"]
        for doc in rendered
        if doc["metadata"].get("annotations", {}).get("argocd.argoproj.io/sync-wave") == "-1"
    }
    assert early == {"PersistentVolumeClaim", "ServiceAccount", "NetworkPolicy", "Job"}
    (claim,) = of_kind(rendered, "PersistentVolumeClaim")
    assert "helm.sh/hook" not in claim["metadata"]["annotations"]
    assert claim["metadata"]["annotations"]["argocd.argoproj.io/sync-options"] == (
        "Prune=false,Delete=false"
    )


def test_what_the_job_needs_is_there_before_it():
    rendered = render(CPU)
    early = [doc for doc in rendered if "pre-install" in str(doc["metadata"].get("annotations"))]
    job = prepare_job(CPU)
    spec = job["spec"]["template"]["spec"]
    names = {(doc["kind"], doc["metadata"]["name"]) for doc in early}
    assert ("ServiceAccount", spec["serviceAccountName"]) in names
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert ("PersistentVolumeClaim", claim) in names
        assert "configMap" not in volume
    (policy,) = [doc for doc in early if doc["kind"] == "NetworkPolicy"]
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_in_its_own_pod_a_worker_prepares_what_it_serves():
    values = changed(set_values("canary"), "prepare", {"run": "pod"})
    rendered = render(values)
    assert not [d for d in of_kind(rendered, "Job") if "prepare" in d["metadata"]["name"]]
    pod = the(rendered, "Deployment", "-worker-w4a16")["spec"]["template"]
    steps = [each["name"] for each in pod["spec"]["initContainers"]]
    assert steps == ["fetch", "compress-w4a16", "wait-for-cache"]
    policy = the(rendered, "NetworkPolicy", "-worker-prepares")
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    (claim,) = [d for d in of_kind(rendered, "PersistentVolumeClaim") if "models" in str(d)]
    assert "helm.sh/hook" not in claim["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("store", "volume"),
    [
        (
            {"hostPath": "/mnt/models"},
            {"hostPath": {"path": "/mnt/models", "type": "DirectoryOrCreate"}},
        ),
        ({"emptyDir": {}}, {"emptyDir": {}}),
        ({"emptyDir": {"sizeLimit": "9Gi"}}, {"emptyDir": {"sizeLimit": "9Gi"}}),
    ],
)
def test_store_of_a_node_or_pod_is_filled_by_the_pod(store: Document, volume: Document):
    rendered = render(changed(CPU, "modelStore", store))
    spec = worker(rendered)["template"]["spec"]
    (models,) = [each for each in spec["volumes"] if each["name"] == "models"]
    assert models == {"name": "models", **volume}
    assert [each["name"] for each in spec["initContainers"]] == ["fetch", "compress-w8a8"]
    assert not of_kind(rendered, "PersistentVolumeClaim") and "affinity" not in spec


TOGETHER = {
    "topologyKey": "kubernetes.io/hostname",
    "labelSelector": {
        "matchLabels": {
            "app.kubernetes.io/name": "taut",
            "app.kubernetes.io/instance": "rel",
            "taut/store": "mounted",
        }
    },
}


def test_pods_on_a_volume_of_one_node_keep_together():
    files = changed(set_values("air-gapped"), "prepare.enabled", True)
    for base in (CPU, files):
        for where, pod in pod_templates(render(base)):
            mounts = any("persistentVolumeClaim" in volume for volume in pod["spec"]["volumes"])
            assert (pod["metadata"]["labels"].get("taut/store") == "mounted") is mounts, where
            affinity = pod["spec"].get("affinity", {}).get("podAffinity", {})
            terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
            assert terms == ([TOGETHER] if mounts else []), where
        many = render(changed(base, "modelStore.accessMode", "ReadWriteMany"))
        assert all("affinity" not in pod["spec"] for _, pod in pod_templates(many))


def test_user_s_affinity_stands_beside_it():
    own = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    affinity = worker(render(changed(CPU, "variants.0.affinity", own)))["template"]["spec"][
        "affinity"
    ]
    assert affinity["nodeAffinity"] == own["nodeAffinity"]
    assert affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == [TOGETHER]


def test_prepare_compresses_what_has_a_recipe():
    (job,) = [d for d in of_kind(render_set("canary"), "Job") if "prepare" in d["metadata"]["name"]]
    steps = [each["name"] for each in every_container(job["spec"]["template"])]
    assert steps == ["fetch", "compress-w8a8", "compress-w4a16", "list"]
