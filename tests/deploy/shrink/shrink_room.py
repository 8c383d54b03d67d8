"""What the tests of ``taut shrink`` work on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from tiny_models import recipe_data, write_calibration_text, write_llama, write_recipe
from validate_setup import write_text

from taut_deploy.frontier.ledger import Key, Try
from taut_deploy.models.store import ModelRecord

SAMPLING = (
    *("--sequences", "6", "--sequence-length", "24"),
    *("--bootstrap", "300", "--noise-sequences", "2"),
)
# Two bits lose much, eight next to nothing; what lies between is decided by the policy.
STAGES = {
    "w2": {"scheme": "W2A16", "algorithm": "rtn"},
    "w4": {"scheme": "W4A16", "algorithm": "rtn"},
    "w8": {"scheme": "W8A16", "group_size": 64, "algorithm": "rtn"},
}
MODEL = ModelRecord("m", "/m", "sha256:" + "a" * 64, 1, "local directory")
POLICIES = {"loose": 1000.0, "middling": 0.01, "tight": 1e-7}


class Room:
    """The folder, and the commands of the tests."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(
        self,
        policy: str,
        output: str,
        *more: str,
        recipes: tuple[str, ...] = ("w2", "w4", "w8"),
        served_by: str = "h100",
    ) -> list[str]:
        """Arguments of ``taut``; no worker is started."""
        named = [part for name in recipes for part in ("--recipe", f"{name}.yaml")]
        return [
            *("shrink", "model", "--policy", f"{policy}.yaml", "--text", "text.txt"),
            *("--output", output, "--no-served", "--served-by", served_by),
            *SAMPLING,
            *named,
            *more,
        ]

    def ledger(self, output: str) -> list[dict[str, Any]]:
        """The lines of a ledger."""
        lines = (self.path / output / "ledger.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def tries(self, output: str) -> list[str]:
        """What is left of the tries."""
        return sorted(path.name for path in (self.path / output / "tries").iterdir())


def write_room(path: Path) -> None:
    """Write model, texts, recipes and policies."""
    write_llama(path / "model", dtype=torch.bfloat16)
    calibration = write_calibration_text(path / "calibration.txt")
    write_text(path / "text.txt", 600, seed=9)
    for name, stage in STAGES.items():
        write_recipe(path / f"{name}.yaml", {**recipe_data(calibration, **stage), "name": name})
    write_recipe(path / "mix.yaml", mixture(calibration))
    for name, limit in POLICIES.items():
        write_policy(path / f"{name}.yaml", name, mean_kl={"max": limit})


def mixture(calibration: Path) -> dict[str, Any]:
    """A recipe that mixes INT4 and INT8."""
    candidates = [
        {"scheme": "W4A16", "group_size": 32, "algorithm": "rtn"},
        {"scheme": "W8A16", "group_size": 64, "algorithm": "rtn"},
    ]
    stage = {"method": "mixed", "target_bits": 6.0, "candidates": candidates}
    return {**recipe_data(calibration), "name": "mix", "stages": [stage]}


def write_policy(path: Path, name: str, *, latency: Any = None, **require: Any) -> None:
    """Write a policy of limits on accuracy."""
    data = {"name": name, "require": require} | ({"latency": latency} if latency else {})
    path.write_text(yaml.safe_dump(data))


def make_try(recipe: str = "r", policy_digest: str = "p", **changes: Any) -> Try:
    """A line of the ledger of :data:`MODEL`."""
    key = Key(model=MODEL.digest, recipe=recipe, data="d", versions="v", policy=policy_digest)
    plain = {
        "key": key,
        "name": recipe,
        "recipe": {},
        "outcome": "FAIL",
        "predicted_bytes": 1,
        "metrics": {"mean_kl": {"estimate": 0.5}},
        "sequences": 2,
        "policy": {},
        "versions": {},
        "compress_seconds": 1.0,
        "validate_seconds": 2.0,
        "finished_at": "2026-01-01T00:00:00Z",
    }
    return Try.model_validate({**plain, **changes})
