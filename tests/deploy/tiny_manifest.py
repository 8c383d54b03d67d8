"""A manifest that says little, for checkpoints that no test computes with."""

from __future__ import annotations

from typing import Any

from taut_deploy.checkpoint import Golden, Manifest


def tiny_manifest(**said: Any) -> Manifest:
    """A manifest of one W8A8 model; ``said`` replaces or adds fields."""
    fields: dict[str, Any] = {
        "name": "m",
        "scheme": "W8A8",
        "bits": 8,
        "recipe": {"name": "r"},
        "recipe_hash": "sha256:0",
        "base_model": {"name": "m", "digest": "sha256:1", "source": "here"},
        "calibration": {},
        "layers": [],
        "golden": Golden("a", "b", 1, 2.0),
        "max_model_len": 64,
        "libraries": {},
    }
    return Manifest(**fields | said)
