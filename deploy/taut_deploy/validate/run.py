"""A validation from job to report: open both models, score them side by side, judge, write."""

import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_deploy.validate import identity, metrics, report
from taut_deploy.validate.behaviour import require_same_behaviour
from taut_deploy.validate.checkpoint_source import (
    CheckpointSource,
    CheckpointTokenizer,
    read_config,
    usable_device,
    wider_dtype,
)
from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.gate import judge
from taut_deploy.validate.headers import described as described_headers
from taut_deploy.validate.headers import request_headers
from taut_deploy.validate.job import ValidationJob, ValidationResult, Verdict
from taut_deploy.validate.latency_part import check_latency, check_lengths, compare_latency
from taut_deploy.validate.policy import load_policy
from taut_deploy.validate.server_source import ServerConnection, ServerSource, is_url
from taut_deploy.validate.serving import compare_served
from taut_deploy.validate.side_by_side import Source, compare_sources
from taut_deploy.validate.text import TokenizedText, Tokenizer, read_text, tokenize_file

_PROBE_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two models before it is loaded: a server found, or a directory checked."""

    role: str
    tokenizer: Tokenizer
    identity: Mapping[str, Any]
    server: ServerSource | None
    directory: Path | None
    trust_remote_code: bool = False

    def open(self, device: str, dtype: torch.dtype | None = None) -> Source:
        if self.server is not None:
            return self.server
        assert self.directory is not None  # noqa: S101 - narrows the type
        return CheckpointSource(
            self.directory,
            self.role,
            device,
            dtype,
            trust_remote_code=self.trust_remote_code,
        )


def run(job: ValidationJob) -> ValidationResult:
    """Carry out ``job``; see :func:`taut_deploy.validate.run_validation`."""
    clock, started_at = time.monotonic(), datetime.datetime.now(datetime.UTC)
    # Cheap checks first: a mistyped flag must not cost the loading of two models.
    report.check_output(job.output)
    policy = load_policy(job.policy)
    usable_device(job.device)
    read_text(job.text)
    for role in ("baseline", "candidate"):
        if not is_url(getattr(job, role)):
            read_config(Path(getattr(job, role)), role)
    check_latency(job)
    baseline, candidate = _find_side(job, "baseline"), _find_side(job, "candidate")
    text = tokenize_file(job.text, baseline.tokenizer, job.sequences, job.sequence_length)
    _check_tokenizers(job, baseline, candidate)
    check_lengths(job, [baseline.server, candidate.server])
    report.discard_earlier(job.output)

    comparison = _score_both(job, text, baseline, candidate)
    noise, noise_kind = _score_noise(job, text, baseline)
    measured = metrics.measure(comparison, noise, resamples=job.bootstrap, seed=job.seed)
    _, rules = judge(
        policy,
        measured,
        accept_lower_bound=job.accept_lower_bound,
        sequences=len(text.sequences),
    )
    serving, serving_rules = compare_served(
        job, text.sequences, measured["mean_kl"], lambda: candidate.open(job.device)
    )
    rules += serving_rules
    latency, latency_rules = compare_latency(job, policy, text, baseline.server, candidate.server)
    rules += latency_rules
    content = report.build(
        job=job,
        policy=policy,
        found=report.Findings(
            comparison=comparison,
            noise_kind=noise_kind,
            measured=measured,
            rules=rules,
            latency=latency,
            serving=serving.as_json(),
        ),
        text=text,
        tokenizer=baseline.tokenizer,
        models={"baseline": baseline.identity, "candidate": candidate.identity},
        environment=identity.environment(job.device),
        started_at=started_at,
        wall_time_s=time.monotonic() - clock,
    )
    files = report.write(job.output, content)
    return ValidationResult(Verdict(content["verdict"]), measured, rules, content, *files)


def _find_side(job: ValidationJob, role: str) -> _Side:
    reference: str = getattr(job, role)
    if is_url(reference):
        extra = getattr(job, f"{role}_headers")
        headers = request_headers(job.api_key, extra)
        connection = ServerConnection(reference, role, headers, job.timeout_s)
        server = ServerSource(connection, getattr(job, f"{role}_model"), job.top_k)
        described = identity.server_identity(connection.root, server.card, described_headers(extra))
        return _Side(role, server.tokenizer, described, server, None)
    path = Path(reference)
    trusted = job.trust_remote_code
    tokenizer = CheckpointTokenizer(path, trust_remote_code=trusted)
    described = identity.directory_identity(path, role)
    return _Side(role, tokenizer, described, None, path, trusted)


def _check_tokenizers(job: ValidationJob, baseline: _Side, candidate: _Side) -> None:
    """Refuse models that would read the same ids as different text, or answer by other rules."""
    ours, theirs = baseline.tokenizer, candidate.tokenizer
    if isinstance(ours, CheckpointTokenizer) and isinstance(theirs, CheckpointTokenizer):
        same = ours.vocabulary == theirs.vocabulary
    else:
        probe = read_text(job.text)[0][:_PROBE_CHARACTERS]
        same = ours.encode(probe, special=False) == theirs.encode(probe, special=False)
    if not same:
        raise CouldNotValidateError(
            f"--candidate {job.candidate}: its tokenizer differs from that of {job.baseline}; only "
            "models over the same vocabulary can be compared"
        )
    if baseline.directory is not None and candidate.directory is not None:
        require_same_behaviour(
            baseline.directory,
            candidate.directory,
            trust_remote_code=job.trust_remote_code,
        )


def _score_both(
    job: ValidationJob, text: TokenizedText, baseline: _Side, candidate: _Side
) -> Comparison:
    """Score both models sequence by sequence; neither model outlives the call."""
    first, second = baseline.open(job.device), candidate.open(job.device)
    for source in (first, second):
        if source.max_positions is not None and job.sequence_length > source.max_positions:
            raise CouldNotValidateError(
                f"--sequence-length: {job.sequence_length} is more than the {source.max_positions} "
                f"positions of the {source.role}"
            )
    return compare_sources(first, second, list(text.sequences), "compare", job.progress)


def _score_noise(
    job: ValidationJob, text: TokenizedText, baseline: _Side
) -> tuple[Comparison | None, str]:
    """Compare the baseline with itself: how small a difference can still be told from rounding.

    A directory is computed again in the next wider type (half precision in fp32, fp32 in fp64):
    rounding inside the model is what kernels, batch shapes and devices vary, and the wider run
    shows its size. Running it again as it is, or in another order, would read exactly zero. A
    server's arithmetic cannot be changed from outside: it is asked twice, which shows its scatter
    from run to run and no more.
    """
    sequences = list(text.sequences[: job.noise_sequences])
    if not sequences:
        return None, "not measured"
    first = baseline.open(job.device)
    if isinstance(first, CheckpointSource):
        wide = wider_dtype(first.dtype)
        kind = f"baseline again in {str(wide).removeprefix('torch.')}, {len(sequences)} sequences"
        second = baseline.open(job.device, wide)
        return compare_sources(first, second, sequences, "noise", job.progress), kind
    kind = f"baseline server asked twice, {len(sequences)} sequences"
    return compare_sources(first, first, sequences, "noise", job.progress), kind
