"""Sets the weights that a rollout says, by the means that the admin API uses too."""

from __future__ import annotations

import logging

from taut_service.rollout.state import Rollout
from taut_service.route.variants import Model

logger = logging.getLogger(__name__)


def weights_of(state: Rollout, model: Model) -> dict[str, float]:
    """Return the weights of all variants.

    Candidate and baseline keep together what the configuration gives them together; the others
    have what it says.

    Args:
        state: whose ``percent`` the candidate gets.
        model: has both variants.
    """
    pair = state.candidate, state.baseline
    whole = sum(model.variants[name].settings.weight for name in pair) or 1.0
    return {
        **{name: variant.settings.weight for name, variant in model.variants.items()},
        state.candidate: whole * state.percent / 100,
        state.baseline: whole * (100 - state.percent) / 100,
    }


def why_not_there(state: Rollout, model: Model | None) -> str:
    """Say what the configuration in force lacks of a rollout, ``""`` if nothing."""
    if model is None:
        return f"the configuration has no model {state.model!r} any more"
    for name in (state.candidate, state.baseline):
        if name not in model.variants:
            return f"the configuration has no variant {name!r} of {state.model!r} any more"
    if model.settings.baseline != state.baseline:
        return f"the baseline of {state.model!r} is another one now"
    return ""


def apply_shares(state: Rollout, model: Model | None) -> None:
    """Let the weights be what a rollout says, if it decides them and the variants are there."""
    if not state.weighs or model is None or why_not_there(state, model):
        return
    wanted = weights_of(state, model)
    if any(model.weights[name] != weight for name, weight in wanted.items()):
        model.set_weights(wanted)
        logger.info("rollout: weights of %s are %s", model.name, model.weights)
