"""Which worker of a variant is next: power of two choices, or affinity within bounds.

Two candidates, the one whose turn it is and another at random; the less loaded one gets the
request. Looking at all of them would send every replica of the gateway to the same worker at once.
With affinity, the worker that wins the request's key gets it unless that worker has too much.
Sources: M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 2001;
V. Mirrokni et al., "Consistent hashing with bounded loads", SODA 2018.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

from taut_service.config.settings import Affinity
from taut_service.route.rendezvous import draw, seed_of
from taut_service.worker.worker import Worker, WorkerState

_READY = WorkerState.READY


class Balancer:
    """Chooses among the workers of one variant.

    Args:
        variant: its name, part of every affinity key.
        affinity: how far affinity may go.
        rng: for the second candidate; seeded by tests.
    """

    def __init__(self, variant: str, affinity: Affinity, rng: random.Random | None = None) -> None:
        self._seed = seed_of(variant.encode())
        self._affinity = affinity
        # Not for secrets: which worker is compared with which.
        self._rng = rng or random.Random()  # noqa: S311
        self._turn = 0

    def choose(
        self,
        workers: Sequence[Worker],
        tried: Collection[Worker] = (),
        keys: Iterable[int] = (),
        *,
        last_resort: bool = False,
    ) -> Worker | None:
        """Return the worker to send a request to.

        Args:
            workers: all of the variant.
            tried: workers that already failed this request.
            keys: affinity keys of the request, in the order in which they are to be followed.
            last_resort: take a worker whose breaker is open, too: there is no other.

        Returns:
            An available worker that was not tried, preferably one that is not busy; None if there
            is none.
        """
        # Written out: a property costs as much as all of this, for each worker and request.
        candidates = [
            worker
            for worker in workers
            if worker.state is _READY
            and not worker.draining
            and (worker.breaker.closed or last_resort or worker.breaker.lets_through())
            and worker not in tried
        ]
        if len(candidates) > 1:
            for worker in candidates:
                if worker.back_off_s:
                    candidates = [w for w in candidates if not w.busy] or candidates
                    break
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        return self._preferred(candidates, keys) or self._less_loaded(candidates)

    def _less_loaded(self, candidates: Sequence[Worker]) -> Worker:
        count = len(candidates)
        self._turn = turn = (self._turn + 1) % count
        first = candidates[turn]
        second = candidates[(turn + 1 + int(self._rng.random() * (count - 1))) % count]
        return second if second.load() < first.load() else first

    def _preferred(self, candidates: Sequence[Worker], keys: Iterable[int]) -> Worker | None:
        bound: float | None = None
        for key in keys:
            winner = _winner(candidates, key ^ self._seed)
            if winner.outstanding < self._affinity.min_requests:
                return winner
            if bound is None:
                mean = sum(worker.load() for worker in candidates) / len(candidates)
                bound = mean * self._affinity.max_load_ratio
            if winner.load() <= bound:
                return winner
        return None


def _winner(candidates: Sequence[Worker], key: int) -> Worker:
    draws = [draw(key, worker.seed) for worker in candidates]
    return candidates[draws.index(max(draws))]
