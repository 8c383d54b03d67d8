"""Whether two servers draw tokens alike where a request does not say how.

A server's own temperature (``--override-generation-config``, a ``generation_config.json``) shows in
no distribution over a given text, and decides what most clients get. So both servers continue the
same prompts by their defaults, with the same seeds, and the log-probabilities of what they wrote
are compared: a colder server writes likelier tokens. What compression does to a distribution moves
this by hundredths of a nat; a temperature of 0.7 in place of 1 by tenths to one.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from scipy import stats

from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.outcome import RuleOutcome, Verdict
from taut_deploy.validate.server_source import ServerSource

METRIC = "default_sampling"
LIMIT = 0.25
"""Nats a token that compression may move the log-probability of what is written."""
PROMPTS = 64
TOKENS = 8
AT_A_TIME = 8
"""Prompts in flight: a small model takes for a step of eight hardly more than for one of one."""
_CONFIDENCE = 0.999  # of 1000 comparisons of equal servers one may fail
_LEAST_PROMPT = 0.25  # of a sequence


def compare_sampling(
    job: ValidationJob,
    sequences: Sequence[tuple[int, ...]],
    baseline: ServerSource | None,
    candidate: ServerSource | None,
) -> tuple[RuleOutcome, ...]:
    """Have both servers continue prompts by their defaults, and judge what they wrote.

    Args:
        job: the validation; its seed draws.
        sequences: token ids that prompts are cut from.
        baseline: the server; None for a directory, whose defaults are compared as files.
        candidate: likewise.

    Returns:
        One rule; none where one of both is a directory.

    Raises:
        CouldNotValidateError: a server refuses.
    """
    if baseline is None or candidate is None:
        return ()
    differences = []
    for at, difference in enumerate(
        _differences(job.sampling.seed, sequences, baseline, candidate)
    ):
        differences.append(difference)
        if job.progress is not None:
            job.progress("sampling", at + 1, PROMPTS)
    return (_judged(np.array(differences)),)


def _differences(
    seed: int,
    sequences: Sequence[tuple[int, ...]],
    baseline: ServerSource,
    candidate: ServerSource,
) -> Iterator[float]:
    """Yield, for each prompt, how much likelier is what the candidate wrote, nats a token."""

    def ask(at: int, prompt: tuple[int, ...]) -> float:
        first, second = (
            float(server.sampled(prompt, TOKENS, seed + at).mean())
            for server in (baseline, candidate)
        )
        return second - first

    pool = ThreadPoolExecutor(AT_A_TIME)
    try:
        yield from pool.map(ask, range(PROMPTS), _prompts(sequences))
    finally:  # after a refusal the prompts that wait are not asked
        pool.shutdown(cancel_futures=True)


def _prompts(sequences: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Beginnings of the sequences, of lengths that are spread."""
    found = []
    for at in range(PROMPTS):
        ids = sequences[at % len(sequences)]
        share = _LEAST_PROMPT + (1.0 - _LEAST_PROMPT) * at / PROMPTS
        found.append(ids[: max(1, int(share * len(ids)) - TOKENS)])
    return found


def _judged(differences: np.ndarray) -> RuleOutcome:
    mean, error = float(differences.mean()), float(stats.sem(differences))
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(differences) - 1)) * error
    margin = LIMIT - max(abs(mean) - half, 0.0)
    found = (
        f"what is written by default is {mean:+.3g} nats a token likelier than the baseline's, "
        f"99.9 % interval [{mean - half:.3g}, {mean + half:.3g}]"
    )
    right = margin >= 0
    why = found if right else f"{found}: the servers' default temperature or sampling differs"
    verdict = Verdict.PASS if right else Verdict.FAIL
    return RuleOutcome(METRIC, "max", LIMIT, verdict, margin, why)
