"""A validation from job to report: open both models, compare them, judge, write."""

import datetime
import time
from dataclasses import dataclass
from typing import Any

from taut_deploy.interrupts import sigterm_interrupts
from taut_deploy.validate import identity, report
from taut_deploy.validate.checkpoint_source import (
    CheckpointSource,
    usable_device,
    wider_dtype,
)
from taut_deploy.validate.default_sampling import compare_sampling
from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.inputs import inputs_of, require_same_answers
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.latency_part import check_lengths, compare_latency
from taut_deploy.validate.outcome import RuleOutcome, ValidationResult, Verdict
from taut_deploy.validate.partial import Partial
from taut_deploy.validate.plan import Plan
from taut_deploy.validate.server_source import ServerSource
from taut_deploy.validate.serving import compare_served
from taut_deploy.validate.side_by_side import compare_sources
from taut_deploy.validate.sides import Side, check_tokenizers, find_side
from taut_deploy.validate.slices.run import Speakers, compare_slices
from taut_deploy.validate.tasks.run import Models, compare_tasks
from taut_deploy.validate.text import TokenizedText, tokenize_file
from taut_deploy.validate.text_part import TextCompared, compare_text
from taut_deploy.validate.weights import judge_weights


@dataclass(frozen=True, slots=True)
class _Asked:
    """What both models answered while they were open."""

    text: TextCompared
    tasks: dict[str, Any]
    slices: dict[str, Any]
    rules: tuple[RuleOutcome, ...]


def run(job: ValidationJob, plan: Plan) -> ValidationResult:
    """Carry out ``job``; see :func:`taut_deploy.validate.run_validation`."""
    usable_device(job.directories.device)
    partial = Partial(job.output)
    try:
        with sigterm_interrupts():
            return _compare(job, plan, partial)
    except BaseException as error:
        kept = partial.write(error)
        if kept is not None and isinstance(error, CouldNotValidateError):
            raise CouldNotValidateError(f"{error}; what was measured is in {kept}") from error
        raise


def _compare(job: ValidationJob, plan: Plan, partial: Partial) -> ValidationResult:
    clock, started_at = time.monotonic(), datetime.datetime.now(datetime.UTC)
    baseline, candidate = find_side(job, "baseline"), find_side(job, "candidate")
    text = tokenize_file(
        job.text, baseline.tokenizer, job.sampling.most, job.sampling.sequence_length
    )
    check_tokenizers(job, baseline, candidate)
    check_lengths(job, [baseline.server, candidate.server])
    inputs = inputs_of(job, plan.policy, plan.digests, text, (baseline, candidate))
    journal = partial.begin(inputs, job.resume)
    report.discard_earlier(job.output)
    found = _measure(job, plan, text, (baseline, candidate), partial)
    content = report.build(
        job=job,
        policy=plan.policy,
        found=found,
        text=text,
        tokenizer=baseline.tokenizer,
        models={"baseline": baseline.identity, "candidate": candidate.identity},
        environment=identity.environment(job.directories.device),
        started_at=started_at,
        wall_time_s=time.monotonic() - clock,
    )
    files = report.write(job.output, content)
    journal.remove()
    return ValidationResult(
        Verdict(content["verdict"]), found.measured, tuple(found.rules), content, *files
    )


def _measure(
    job: ValidationJob,
    plan: Plan,
    text: TokenizedText,
    sides: tuple[Side, Side],
    partial: Partial,
) -> report.Findings:
    baseline, candidate = sides
    asked = _ask_both(job, plan, text, sides, partial)
    noise, noise_kind = _score_noise(job, text, baseline, partial)
    measured, _, rules = asked.text.judged(job, plan.policy, noise)
    serving, serving_rules = compare_served(
        job, text.sequences, measured["mean_kl"], lambda: candidate.open(job.directories.device)
    )
    sampling_rules = compare_sampling(job, text.sequences, baseline.server, candidate.server)
    latency, latency_rules = compare_latency(
        job, plan.policy, text, baseline.server, candidate.server
    )
    for server in (baseline.server, candidate.server):
        if server is not None:
            server.require_same_model()
    return report.Findings(
        comparison=asked.text.comparison,
        looks=asked.text.looks,
        noise_kind=noise_kind,
        measured=measured,
        rules=(*rules, *serving_rules, *sampling_rules, *asked.rules, *latency_rules),
        latency=latency,
        serving=serving.as_json(),
        tasks=asked.tasks,
        slices=asked.slices,
    )


def _ask_both(
    job: ValidationJob,
    plan: Plan,
    text: TokenizedText,
    sides: tuple[Side, Side],
    partial: Partial,
) -> _Asked:
    """Score the text and run tasks and slices; neither model outlives the call."""
    first, second = (side.open(job.directories.device) for side in sides)
    length = job.sampling.sequence_length
    for source in (first, second):
        if source.max_positions is not None and length > source.max_positions:
            raise CouldNotValidateError(
                f"--sequence-length: {length} is more than the {source.max_positions} positions of "
                f"the {source.role}"
            )
    sequences = list(text.sequences)
    require_same_answers(partial, sequences, (first, second))
    compared = compare_text(job, plan.policy, text, (first, second), partial)
    models = Models(first, second, sides[0].tokenizer, text.bos_token_id)
    tasks, task_rules = compare_tasks(job, plan.tasks, models, partial)
    speakers = Speakers(
        first,
        second,
        sides[0].tokenizer,
        text.bos_token_id,
        tuple(token for ids in sequences for token in ids if token != text.bos_token_id),
    )
    slices, slice_rules = compare_slices(job, plan.slices, speakers, partial)
    weight_rules = _judge_weights(first, second)
    return _Asked(compared, tasks, slices, (*weight_rules, *task_rules, *slice_rules))


def _judge_weights(
    first: CheckpointSource | ServerSource, second: CheckpointSource | ServerSource
) -> tuple[RuleOutcome, ...]:
    """What files alone show; a server's weights are out of reach."""
    if isinstance(first, CheckpointSource) and isinstance(second, CheckpointSource):
        return judge_weights(first.weights, second.rounded_weights)
    return ()


def _score_noise(
    job: ValidationJob, text: TokenizedText, baseline: Side, partial: Partial
) -> tuple[Comparison | None, str]:
    """Compare the baseline with itself: how small a difference can still be told from rounding.

    A directory is computed again in the next wider type (half precision in fp32, fp32 in fp64):
    rounding inside the model is what kernels, batch shapes and devices vary, and the wider run
    shows its size. Running it again as it is, or in another order, would read exactly zero. A
    server's arithmetic cannot be changed from outside: it is asked twice, which shows its scatter
    from run to run and no more.
    """
    sequences = list(text.sequences[: job.sampling.noise_sequences])
    if not sequences:
        return None, "not measured"
    first = baseline.open(job.directories.device)
    if isinstance(first, CheckpointSource):
        wide = wider_dtype(first.dtype)
        kind = f"baseline again in {str(wide).removeprefix('torch.')}, {len(sequences)} sequences"
        second = baseline.open(job.directories.device, wide)
        return compare_sources(
            first, second, sequences, "noise", job.progress, once=partial.once
        ), kind
    kind = f"baseline server asked twice, {len(sequences)} sequences"
    return compare_sources(first, first, sequences, "noise", job.progress, once=partial.once), kind
