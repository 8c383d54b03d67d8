"""What the answers of a validation depend on, and whether a server still gives them."""

from collections.abc import Sequence

import numpy as np

from taut_deploy.compress.job import library_versions
from taut_deploy.files import sha256_json
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.partial import Partial
from taut_deploy.validate.policy import Policy
from taut_deploy.validate.server_source import OF_THE_CALL, ServerSource
from taut_deploy.validate.side_by_side import Source, compare_sequence
from taut_deploy.validate.sides import Side
from taut_deploy.validate.text import TokenizedText

# Of a job: where things are, who asks, and what is measured anew in any case.
_NOT_ANSWERS = frozenset(
    {
        "baseline",
        "candidate",
        "text",
        "policy",
        "output",
        "progress",
        "resume",
        "api_key",
        "timeout_s",
        "baseline_headers",
        "candidate_headers",
        "latency",
        "latency_plan",
        "served",
        "accept_lower_bound",
        "bootstrap",
    }
)
_SAME = 0.05
"""Nats; how far a server's answer to one sequence may scatter from run to run, mean over it."""


def inputs_of(
    job: ValidationJob,
    policy: Policy,
    asked: Sequence[str],
    text: TokenizedText,
    sides: Sequence[Side],
) -> dict[str, str]:
    """Digests by name of everything that an answer depends on.

    Args:
        job: the validation.
        policy: names tasks and slices.
        asked: digests of the files of their items and prompts.
        text: as it is scored.
        sides: both models.
    """
    settings = {k: value for k, value in job.settings().items() if k not in _NOT_ANSWERS}
    found = {side.role: sha256_json(_of_model(side)) for side in sides}
    return found | {
        "text": sha256_json([text.text_sha256, text.tokens_sha256]),
        "policy": sha256_json(policy.model_dump(mode="json")),
        "tasks and slices": sha256_json(list(asked)),
        "settings": sha256_json(settings),
        "versions": sha256_json(library_versions()),
    }


def _of_model(side: Side) -> object:
    described = side.identity
    if side.server is None:
        return described["digest"]
    card = {key: value for key, value in side.server.card.items() if key not in OF_THE_CALL}
    return {**described, "model": card}


def require_same_answers(
    partial: Partial, sequences: Sequence[tuple[int, ...]], models: tuple[Source, Source]
) -> None:
    """Ask servers for the first sequence again where a run goes on: their weights are not seen.

    Args:
        partial: may have the answer of the run that broke off.
        sequences: token ids.
        models: baseline and candidate.

    Raises:
        CouldNotValidateError: one answers otherwise by now.
    """
    before = partial.known_sequence(0)
    if before is None or not any(isinstance(model, ServerSource) for model in models):
        return
    now = compare_sequence(*models, sequences[0])
    for model, name in zip(models, ("baseline_nll", "candidate_nll"), strict=True):
        apart = float(np.abs(getattr(now, name) - getattr(before, name)).mean())
        if apart > _SAME:
            raise CouldNotValidateError(
                f"{model.role}: answers otherwise than before the validation broke off, by "
                f"{apart:.3g} nats a token; give --no-resume to begin anew"
            )
