"""A gateway's settings with quick rollouts and bounds that few answers prove, for tests."""

from __future__ import annotations

import hashlib
from typing import Any

from gateway_harness import variants_for
from mock_reader import ReadingEngine

from taut_service.config.settings import Settings

STEPS = {"steps": [0, 50, 100], "min_step_s": 0.2, "min_answers": 5, "min_tokens": 50}
ADMIN, PLAIN = "sk-admin", "sk-plain"
KEYS = [
    {"name": "root", "sha256": hashlib.sha256(ADMIN.encode()).hexdigest(), "scopes": ["admin"]},
    {"name": "user", "sha256": hashlib.sha256(PLAIN.encode()).hexdigest()},
]


def settings_of(
    base: ReadingEngine,
    small: ReadingEngine,
    rollout: dict[str, Any],
    *,
    guard: dict[str, Any] | None = None,
    **sections: Any,
) -> Settings:
    each = {"base": {"weight": 1.0}, "small": {"weight": 0.0}}
    model = variants_for({"base": [base], "small": [small]}, baseline="base", each=each)
    model["aliases"] = ["other"]
    model["max_model_len"] = 4096
    compared = {
        "sample": 1.0,
        "max_cpu_share": None,
        "max_queued": 500,
        "regenerate": False,
        "max_slowdown": 50,
    }
    bounds = {"max_kl_excess_nats": 0.1, "max_disagreement_excess": 0.2}
    return Settings.model_validate(
        {
            "models": [model],
            "admin": {"port": 0},
            "guard": {**compared, **bounds, **(guard or {})},
            "rollout": {**STEPS, "every_s": 0.05, **rollout},
            **sections,
        }
    )
