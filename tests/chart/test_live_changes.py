"""``helm upgrade`` after somebody else changed the cluster: scaled pods, claims that are there.

The real helm applies server-side, as Helm 4 does, to a stand-in that knows who set which field.
"""

from __future__ import annotations

import pytest
from api_server import Store
from chart_rendering import Document, changed, needs_helm, set_values
from releases import Helm, about, done

pytestmark = [needs_helm, pytest.mark.timeout(180)]
CPU = set_values("cpu-minimal")
SIX = changed(CPU, "gateway.replicas", 6)
HPA = changed(SIX, "gateway.autoscaling", {"kind": "hpa", "minReplicas": 2, "maxReplicas": 8})
OTHER = changed(SIX, "gateway.drain", {"timeoutSeconds": 90})
GATEWAY, WORKER = "rel-taut-gateway", "rel-taut-worker-w8a8"
CLAIM = "rel-taut-models"
CONTROLLER = "kube-controller-manager"


def replicas(store: Store, name: str = GATEWAY) -> int:
    count: int = store.objects["deployments", name]["spec"]["replicas"]
    return count


def counts(store: Store, name: str = GATEWAY) -> list[int]:
    """Every number of pods that a Deployment was ever given."""
    return [
        document["spec"]["replicas"]
        for _, _, kind, document in store.events
        if kind == "deployments" and document["metadata"]["name"] == name
    ]


@pytest.mark.parametrize("options", [(), ("--server-side=false",)], ids=["apply", "client"])
@pytest.mark.parametrize("name", [GATEWAY, WORKER])
def test_upgrade_leaves_what_kubectl_scaled(
    cluster: tuple[Store, Helm], name: str, options: tuple[str, ...]
):
    store, helm = cluster
    done(helm("install", SIX, *options))
    store.scale(name, 4)
    # Twice: the second one finds what the first one gave.
    for values in (OTHER, SIX):
        done(helm("upgrade", values, *options))
        assert replicas(store, name) == 4


def test_new_number_against_one_that_was_scaled_is_refused_with_the_way_out(
    cluster: tuple[Store, Helm],
):
    store, helm = cluster
    done(helm("install", SIX))
    store.scale(GATEWAY, 4)
    eight = changed(SIX, "gateway.replicas", 8)
    refused = helm("upgrade", eight)
    assert refused.returncode != 0
    assert "gateway.replicas: 8 wanted, but kubectl set Deployment of" in refused.stderr
    assert f"kubectl -n ns scale deployment/{GATEWAY} --replicas=8" in refused.stderr
    store.scale(GATEWAY, 8)
    done(helm("upgrade", eight))
    assert replicas(store) == 8


def test_number_that_nobody_else_set_changes(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", SIX))
    done(helm("upgrade", changed(SIX, "gateway.replicas", 3)))
    assert replicas(store) == 3


@pytest.mark.parametrize("options", [(), ("--server-side=false",)], ids=["apply", "client"])
def test_fixed_number_gives_way_to_an_autoscaler_without_a_drop(
    cluster: tuple[Store, Helm], options: tuple[str, ...]
):
    store, helm = cluster
    done(helm("install", SIX, *options))
    # An autoscaler that finds six right changes nothing; then it does.
    done(helm("upgrade", HPA, *options))
    done(helm("upgrade", changed(HPA, "gateway.drain", {"timeoutSeconds": 90}), *options))
    assert set(counts(store)) == {6}
    store.scale(GATEWAY, 5, CONTROLLER)
    done(helm("upgrade", HPA, *options))
    done(helm("upgrade", changed(HPA, "gateway.drain", {"timeoutSeconds": 70}), *options))
    assert set(counts(store)) == {6, 5} and replicas(store) == 5


def test_autoscaler_gives_way_to_a_fixed_number_by_name(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", HPA))
    store.scale(GATEWAY, 5, CONTROLLER)
    refused = helm("upgrade", SIX)
    assert "delete its autoscaler, then kubectl -n ns scale" in refused.stderr
    store.scale(GATEWAY, 6)
    done(helm("upgrade", SIX))
    assert replicas(store) == 6


def test_release_without_the_annotation_keeps_what_was_scaled(cluster: tuple[Store, Helm]):
    """An earlier chart did not write down how many pods it asked for."""
    store, helm = cluster
    done(helm("install", SIX))
    del store.objects["deployments", GATEWAY]["metadata"]["annotations"]["taut/replicas"]
    store.scale(GATEWAY, 4)
    done(helm("upgrade", OTHER))
    assert replicas(store) == 4


def storage(store: Store, name: str = CLAIM) -> str:
    size: str = store.objects["persistentvolumeclaims", name]["spec"]["resources"]["requests"][
        "storage"
    ]
    return size


def made_by_an_earlier_chart(store: Store, **spec: object) -> None:
    """A claim of 20Gi that is an object of the release."""
    owner = {"meta.helm.sh/release-name": "rel", "meta.helm.sh/release-namespace": "ns"}
    metadata = {
        "name": CLAIM,
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": owner,
    }
    wanted = {"resources": {"requests": {"storage": "20Gi"}}, **spec}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    store.put("persistentvolumeclaims", {**claim, "metadata": metadata, "spec": wanted})


def give_class(store: Store, name: str, *, grows: bool) -> None:
    metadata = {"name": name}
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": metadata}
    store.put("storageclasses", {**kind, "allowVolumeExpansion": grows})


BIGGER = changed(CPU, "modelStore.size", "40Gi")


@pytest.mark.parametrize("storage_class", ["", "fixed", "gone"])
@pytest.mark.parametrize("of_the_release", [True, False])
def test_larger_store_on_a_volume_that_cannot_grow_is_refused_first(
    cluster: tuple[Store, Helm], of_the_release: bool, storage_class: str
):
    store, helm = cluster
    if of_the_release:
        made_by_an_earlier_chart(store)
    done(helm("install", CPU))
    give_class(store, "fixed", grows=False)
    if storage_class:
        store.objects["persistentvolumeclaims", CLAIM]["spec"]["storageClassName"] = storage_class
    refused = helm("upgrade", BIGGER)
    assert refused.returncode != 0
    assert "modelStore.size: 40Gi, but the claim rel-taut-models asks for 20Gi" in refused.stderr
    assert "cannot grow" in refused.stderr and "set modelStore.size back" in refused.stderr
    assert storage(store) == "20Gi" and not about(store, f"Deployment/{GATEWAY}")


def test_larger_store_grows_where_it_can(cluster: tuple[Store, Helm]):
    store, helm = cluster
    made_by_an_earlier_chart(store, storageClassName="elastic")
    give_class(store, "elastic", grows=True)
    done(helm("install", CPU))
    done(helm("upgrade", BIGGER))
    assert storage(store) == "40Gi"
    # Back again: what has grown does not shrink, and Kubernetes would refuse to.
    done(helm("upgrade", CPU))
    assert storage(store) == "40Gi"


def test_larger_store_of_a_kept_claim_names_the_command(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", CPU))
    give_class(store, "elastic", grows=True)
    claim = store.objects["persistentvolumeclaims", CLAIM]
    claim["spec"]["storageClassName"] = "elastic"
    refused = helm("upgrade", BIGGER)
    assert f"kubectl -n ns patch pvc {CLAIM} -p" in refused.stderr
    claim["spec"]["resources"]["requests"]["storage"] = "40960Mi"
    done(helm("upgrade", BIGGER))
    assert storage(store) == "40960Mi"


def test_larger_compile_cache_on_a_volume_that_cannot_grow_is_refused_first(
    cluster: tuple[Store, Helm],
):
    store, helm = cluster
    done(helm("install", changed(CPU, "worker.cache", {"size": "5Gi"})))
    refused = helm("upgrade", changed(CPU, "worker.cache", {"size": "6Gi"}))
    assert "worker.cache.size: 6Gi, but the claim" in refused.stderr
    assert not about(store, f"Deployment/{GATEWAY}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("accessMode", "ReadWriteMany"), "modelStore.accessMode: ReadWriteMany, but the claim"),
        (("storageClass", "other"), "modelStore.storageClass: other, but the claim"),
    ],
)
def test_what_nobody_can_change_of_a_claim_is_refused_first(
    cluster: tuple[Store, Helm], change: tuple[str, str], message: str
):
    _, helm = cluster
    done(helm("install", CPU))
    values: Document = changed(CPU, f"modelStore.{change[0]}", change[1])
    assert message in helm("upgrade", values).stderr
