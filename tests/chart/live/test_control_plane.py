"""The control plane starts; where its programs are missing the run says what is not tried."""

from __future__ import annotations

import pytest
from chart_rendering import NOTES
from control_plane import missing
from live_release import Plane

MISSING = missing()
REASON = (
    f"NO {', '.join(MISSING)} HERE: the chart is NOT tried against Kubernetes' control plane; put"
    " etcd and the programs of Kubernetes' server archive where KUBEBUILDER_ASSETS says"
)
if MISSING:
    NOTES.add(REASON)


@pytest.mark.skipif(bool(MISSING), reason=REASON)
def test_control_plane_makes_what_every_namespace_has(plane: Plane):
    found = plane.api.get("v1", "Namespace", None, "kube-system")
    assert found["status"]["phase"] == "Active"
    NOTES.add(f"tried against the control plane of Kubernetes {plane.api.version()}")
