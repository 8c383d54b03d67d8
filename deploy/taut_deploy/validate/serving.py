"""Whether what was scored from files is what a worker serves.

A directory is scored by transformers; the worker multiplies with other kernels, on other
roundings, and on some processors wrongly. So a validation of directories starts one worker for the
candidate, has it score a few of the same sequences, and compares. The worker is the candidate's
own: ``taut worker`` as it would serve here.

What may differ is rounding. Where activations are rounded to 8 bits, other roundings before change
codes, and two right computations of SmolLM2 in W8A8 are 0.008 nats apart (RMS of log-probabilities
0.17); the baseline's own rounding, the noise floor of the same run, costs a tenth of that. So the
limit is :data:`LEAST_KL`, or :data:`OF_NOISE` times the noise floor where rounding moves a model
further.
"""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from taut_deploy.checkpoint import is_checkpoint, read_manifest
from taut_deploy.errors import TautError
from taut_deploy.models.directory import read_shape
from taut_deploy.models.remote_code import FLAG
from taut_deploy.ports import free_port
from taut_deploy.serve.one_worker import ask_one_worker
from taut_deploy.serve.process import ChildSpec
from taut_deploy.validate import metrics
from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.outcome import Metric, RuleOutcome, Verdict
from taut_deploy.validate.server_connection import ServerConnection, is_url
from taut_deploy.validate.server_source import ServerSource
from taut_deploy.validate.side_by_side import Source, compare_sources
from taut_deploy.worker import LOOPBACK, WorkerSpec, installed_platform, worker_command

METRIC = "served_kl"
SEQUENCES = 4
LEAST_KL = 0.012
"""Nats; a mean KL of what is served from the files that is rounding in any case."""
OF_NOISE = 10.0
START_TIMEOUT_S = 900.0
_NAME = "candidate"
_LINES = 3


@dataclass(frozen=True, slots=True)
class Serving:
    """What a served batch said.

    Args:
        compared: whether one was asked.
        reason: why not, or how it went, in one line.
        measured: point estimates over the batch; empty where none was asked.
    """

    compared: bool
    reason: str
    measured: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """The section of the report."""
        return {"compared": self.compared, "reason": self.reason, "measured": dict(self.measured)}


def why_not(job: ValidationJob) -> str | None:
    """Say why no served batch is asked, None where one is.

    Args:
        job: the validation.
    """
    if is_url(job.candidate):
        return "the candidate is a server: what was scored is what is served"
    if not job.directories.served:
        return "serving was not compared: --no-served"
    try:
        platform = installed_platform()
    except TautError as error:
        return f"serving was not compared: {error}"
    if platform == "cuda" and not torch.cuda.is_available():
        return "serving was not compared: no GPU for the vLLM that is installed"
    return None


def compare_served(
    job: ValidationJob,
    sequences: Sequence[tuple[int, ...]],
    candidate: Metric,
    open_files: Callable[[], Source],
) -> tuple[Serving, tuple[RuleOutcome, ...]]:
    """Have a worker of the candidate score a batch, and judge how far it is from the files.

    Args:
        job: the validation.
        sequences: token ids that were scored.
        candidate: mean KL of the candidate from the baseline, with its noise floor.
        open_files: loads the candidate's files, once its worker answers.

    Returns:
        What was found, and its limit as a rule; none where nothing was asked.
    """
    reason = why_not(job)
    if reason is not None:
        return Serving(False, reason, {}), ()
    batch = list(sequences[:SEQUENCES])
    try:
        comparison = asyncio.run(_ask(job, batch, open_files))
    except TautError as error:
        return _not_served(error)
    return _judged(comparison, candidate)


async def _ask(
    job: ValidationJob, batch: list[tuple[int, ...]], open_files: Callable[[], Source]
) -> Comparison:
    directory, port = Path(job.candidate), free_port()
    asked = _asked_tokens(job)
    manifest = read_manifest(directory) if is_checkpoint(directory) else None
    spec = WorkerSpec(
        directory,
        name=_NAME,
        port=port,
        max_model_len=asked + 1,
        shutdown_timeout_s=5,
        extra=(FLAG,) if job.directories.trust_remote_code else (),
    )
    url = f"http://{LOOPBACK}:{port}"
    with tempfile.TemporaryDirectory(prefix="taut-validate-") as logs:
        child = ChildSpec(
            "worker", worker_command(spec), {"PYTHONSAFEPATH": "1"}, Path(logs) / "worker.log", 60.0
        )
        return await ask_one_worker(
            child,
            url,
            _NAME,
            None if manifest is None else manifest.golden,
            lambda: _scored(job, [tokens[:asked] for tokens in batch], url, open_files()),
            timeout_s=START_TIMEOUT_S,
            say=lambda _: None,
        )


def _asked_tokens(job: ValidationJob) -> int:
    """Return how many tokens of a sequence are asked: a server writes one more behind a prompt."""
    shape = read_shape(Path(job.candidate), trust_remote_code=job.directories.trust_remote_code)
    window = shape.max_position_embeddings
    return min(job.sampling.sequence_length, window - 1) if window else job.sampling.sequence_length


def _scored(
    job: ValidationJob, batch: list[tuple[int, ...]], url: str, files: Source
) -> Comparison:
    served = ServerSource(
        ServerConnection(url, _NAME, {}, job.servers.timeout_s), _NAME, job.servers.top_k
    )
    return compare_sources(files, served, batch, "serve", job.progress)


def _judged(comparison: Comparison, candidate: Metric) -> tuple[Serving, tuple[RuleOutcome, ...]]:
    points = metrics.point_estimates(comparison)
    difference = comparison.candidate_nll - comparison.baseline_nll
    measured = {
        METRIC: points["mean_kl"],
        "rms_logprob": float(np.sqrt(np.mean(difference**2))),
        "top1_agreement": points["top1_agreement"],
        "tokens": float(difference.size),
    }
    limit = max(LEAST_KL, OF_NOISE * (candidate.noise or 0.0))
    right = measured[METRIC] <= limit
    text = (
        f"a worker's log-probabilities are {measured['rms_logprob']:.3g} (RMS) from those of the "
        f"files over {difference.size} tokens, mean KL at least {measured[METRIC]:.3g}"
    )
    reason = text if right else f"{text}: what is served is not what was scored"
    verdict = Verdict.PASS if right else Verdict.FAIL
    rule = RuleOutcome(METRIC, "max", limit, verdict, limit - measured[METRIC], reason)
    return Serving(True, text, measured), (rule,)


def _not_served(error: TautError) -> tuple[Serving, tuple[RuleOutcome, ...]]:
    """A candidate that no worker here serves is not proved: the verdict stays open."""
    said = " ".join(str(error).splitlines()[:_LINES])
    reason = f"serving was not compared: no worker could be started for it ({said})"
    rule = RuleOutcome(METRIC, "max", LEAST_KL, Verdict.INCONCLUSIVE, None, reason)
    return Serving(False, reason, {}), (rule,)
