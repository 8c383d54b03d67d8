"""The model store: who fills it, who waits for it, and that its pods can all reach it."""

from __future__ import annotations

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


def test_prepare_is_another_job_when_its_content_changes():
    def job(values: Document) -> str:
        (name,) = [
            doc["metadata"]["name"]
            for doc in of_kind(render(values), "Job")
            if "prepare" in doc["metadata"]["name"]
        ]
        return name

    assert job(CPU) == job(changed(CPU, "gateway.replicas", 3))
    assert job(CPU) != job(changed(CPU, "variants.0.recipe", "w4a16"))


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
