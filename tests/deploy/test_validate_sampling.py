"""Prompts that both servers continue by their defaults are asked several at a time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from taut_deploy.validate import CouldNotValidateError, Sampling, Verdict, default_sampling
from taut_deploy.validate.default_sampling import AT_A_TIME, PROMPTS, compare_sampling

SEQUENCES = [tuple(range(48)), tuple(range(100, 148))]


class Server:
    """Says of a prompt's end and seed, after ``wait``, what no other prompt gets."""

    def __init__(self, wait=lambda: None) -> None:
        self.wait, self.asked = wait, []

    def sampled(self, ids, max_tokens, seed):
        self.asked.append((ids, seed))
        self.wait()
        return np.full(max_tokens, -0.01 * (seed - 7))


def compared(baseline, candidate, told=None):
    progress = None if told is None else lambda *each: told.append(each)
    job = SimpleNamespace(sampling=Sampling(seed=7), progress=progress)
    (rule,) = compare_sampling(job, SEQUENCES, baseline, candidate)
    return rule


def test_a_server_has_several_prompts_at_a_time():
    # Whoever waits is let go when as many wait; with fewer in flight this ends in an error.
    baseline, candidate, told = Server(threading.Barrier(AT_A_TIME, timeout=60).wait), Server(), []
    rule = compared(baseline, candidate, told)
    assert rule.verdict is Verdict.PASS
    assert told == [("sampling", at + 1, PROMPTS) for at in range(PROMPTS)]
    for server in (baseline, candidate):
        assert sorted(seed for _, seed in server.asked) == list(range(7, 7 + PROMPTS))
        wanted = default_sampling._prompts(SEQUENCES)
        assert all(ids == wanted[seed - 7] for ids, seed in server.asked)


def test_after_a_refusal_the_prompts_that_wait_are_not_asked():
    def refuse():
        raise CouldNotValidateError("candidate: refused")

    baseline = Server()
    with pytest.raises(CouldNotValidateError, match="candidate: refused"):
        compared(baseline, Server(refuse))
    assert len(baseline.asked) < PROMPTS
