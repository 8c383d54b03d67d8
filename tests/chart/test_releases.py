"""The real helm installs, upgrades, rolls back, uninstalls: against a stand-in API server.

What it does to the model store, and when, is read from the journal of objects made and deleted.
"""

from __future__ import annotations

import pytest
from api_server import Store
from chart_rendering import Document, changed, needs_helm, set_values
from releases import Helm, about, done

pytestmark = [needs_helm, pytest.mark.timeout(180)]
CPU = set_values("cpu-minimal")
CLAIM, JOB = "PersistentVolumeClaim/rel-taut-models", "Job/rel-taut-prepare"


def test_install_prepares_first_and_with_what_the_job_needs(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", CPU, "--wait"))
    at = store.journal.index(f"make {JOB}")
    early, late = store.journal[:at], store.journal[at + 1 :]
    assert set(early) == {
        f"make {CLAIM}",
        "make ServiceAccount/rel-taut-prepare",
        "make NetworkPolicy/rel-taut-prepare",
    }
    assert "make Deployment/rel-taut-worker-w8a8" in late


def test_upgrade_that_prepares_nothing_new_runs_no_job(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", CPU))
    done(helm("upgrade", changed(CPU, "gateway.replicas", 3), "--wait"))
    assert not about(store, JOB) and not about(store, CLAIM)
    assert "change Deployment/rel-taut-gateway" in store.journal


def test_upgrade_to_another_recipe_runs_it_and_leaves_the_claim(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", CPU))
    done(helm("upgrade", changed(CPU, "variants.0.recipe", "w4a16")))
    assert about(store, JOB) == [f"delete {JOB}", f"make {JOB}"]
    assert not about(store, CLAIM)
    assert store.journal.index(f"make {JOB}") < store.journal.index(
        "change Deployment/rel-taut-worker-w8a8"
    )


def test_rollback_prepares_nothing_and_leaves_the_claim(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", CPU))
    done(helm("upgrade", changed(CPU, "variants.0.recipe", "w4a16")))
    done(helm("rollback", None, "--wait"))
    assert not about(store, JOB) and not about(store, CLAIM)
    assert ("persistentvolumeclaims", "rel-taut-models") in store.objects


def test_uninstall_leaves_the_claim_and_the_next_install_takes_it(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", CPU))
    done(helm("uninstall"))
    assert not about(store, CLAIM)
    assert ("persistentvolumeclaims", "rel-taut-models") in store.objects
    done(helm("install", CPU))
    assert not about(store, CLAIM), "the kept model was thrown away"


def test_new_claim_is_filled_again(cluster: tuple[Store, Helm]):
    store, helm = cluster
    done(helm("install", CPU))
    done(helm("uninstall"))
    assert ("jobs", "rel-taut-prepare") in store.objects, "hooks stay"
    store.delete("persistentvolumeclaims", "rel-taut-models")
    done(helm("install", CPU))
    assert about(store, JOB) == [f"delete {JOB}", f"make {JOB}"]
    # The Job of the first claim again, though not of this one.
    store.delete("persistentvolumeclaims", "rel-taut-models")
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": {}}
    store.put("persistentvolumeclaims", {**claim, "metadata": {"name": "rel-taut-models"}})
    done(helm("upgrade", CPU))
    assert about(store, JOB) == [f"delete {JOB}", f"make {JOB}"]


@pytest.mark.parametrize("upgraded", [False, True])
def test_claim_that_is_not_kept_goes_with_the_release(cluster: tuple[Store, Helm], upgraded: bool):
    store, helm = cluster
    values = changed(CPU, "modelStore", {"keep": False})
    done(helm("install", values))
    if upgraded:
        done(helm("upgrade", changed(values, "gateway.replicas", 3)))
    done(helm("uninstall"))
    assert ("persistentvolumeclaims", "rel-taut-models") not in store.objects


@pytest.mark.parametrize("option", ["--wait", "--rollback-on-failure"])
def test_failed_preparation_makes_no_worker_and_keeps_what_it_fetched(
    cluster: tuple[Store, Helm], option: str
):
    store, helm = cluster
    store.failing.add("rel-taut-prepare")
    failed = helm("install", CPU, option)
    assert failed.returncode != 0 and "rel-taut-prepare" in failed.stderr
    assert not about(store, "Deployment/rel-taut-worker-w8a8")
    assert ("persistentvolumeclaims", "rel-taut-models") in store.objects
    store.failing.clear()
    done(helm("upgrade", CPU, "--install"))
    assert not about(store, CLAIM) and f"make {JOB}" in store.journal


def test_claim_of_an_earlier_chart_stays_an_object_of_the_release(cluster: tuple[Store, Helm]):
    store, helm = cluster
    owner = {"meta.helm.sh/release-name": "rel", "meta.helm.sh/release-namespace": "ns"}
    metadata = {
        "name": "rel-taut-models",
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": owner,
    }
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": {}}
    store.put("persistentvolumeclaims", claim)
    done(helm("install", CPU))
    assert about(store, CLAIM) == [f"change {CLAIM}"]


def test_gpus_are_held_until_the_volume_has_a_node(cluster: tuple[Store, Helm]):
    store, helm = cluster
    values = changed(CPU, "variants.0.gpus", 1)
    del values["variants"][0]["kvCacheGib"]  # of workers on a CPU

    def limits() -> Document:
        spec = store.objects["jobs", "rel-taut-prepare"]["spec"]["template"]["spec"]
        found: Document = spec["containers"][0]["resources"]["limits"]
        return found

    done(helm("install", values))
    assert limits()["nvidia.com/gpu"] == 1
    store.objects["persistentvolumeclaims", "rel-taut-models"]["spec"]["volumeName"] = "pv"
    done(helm("upgrade", changed(values, "variants.0.recipe", "w4a16")))
    assert "nvidia.com/gpu" not in limits()
