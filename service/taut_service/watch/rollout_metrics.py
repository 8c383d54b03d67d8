"""What is read of rollouts at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from taut_service.rollout.controller import Rollouts
from taut_service.rollout.state import PHASES
from taut_service.watch.gauges import Reading, Source


def read_rollouts(rollouts: Rollouts) -> Source:
    """Return a source of where rollouts stand."""

    def source() -> Iterator[Reading]:
        yield Reading("rollout_journal_up", (), rollouts.up)
        yield Reading("rollout_webhook_failures", (), rollouts.webhook_failures)
        yield Reading("rollout_event_failures", (), rollouts.event_failures)
        for model in {model for model, _ in rollouts.guard.pairs()}:
            state = rollouts.state(model)
            yield Reading("rollout_rollbacks", (model,), rollouts.rollbacks[model])
            if state is None or rollouts.missing(state):
                continue
            yield Reading("rollout_percent", (model, state.candidate), state.percent)
            for phase in PHASES:
                yield Reading("rollout_phase", (model, phase), state.phase == phase)

    return source
