"""Policies: the limits a candidate must keep, parsed once, unknown keys refused.

A policy is YAML::

    name: balanced
    require:
      perplexity_ratio: {max: 1.03}
      top1_agreement: {min: 0.915}
    latency:                           # optional; judged at every concurrency that was measured
      itl_p50_ratio_at_most: 1.05      # candidate / baseline
      throughput_ratio_at_least: 0.95
      error_rate_at_most: 0.05         # failed share of the candidate's requests; 0.05 if not given
      required: true                   # false: files, which have no latency, may pass without

``tasks`` and ``slices`` are described in :mod:`taut_deploy.validate.bounds`.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from taut_deploy.strict_yaml import (
    parse_mapping,
    read_shipped_or_file,
    shipped_names,
    validate_mapping,
)
from taut_deploy.validate.bounds import Slices, TaskBounds
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.limits import AnyLimit, Limits, Number, RatioLimit, ShareLimit, Strict


class Requirements(Limits):
    """The metrics a policy may limit; each is compared by the bounds of its 95 % interval."""

    perplexity_ratio: RatioLimit = None
    delta_nll: AnyLimit = None
    mean_kl: RatioLimit = None
    kl_p50: RatioLimit = None
    kl_p90: RatioLimit = None
    kl_p99: RatioLimit = None
    top1_agreement: ShareLimit = None
    rms_delta_p: ShareLimit = None

    @model_validator(mode="after")
    def _not_empty(self) -> "Requirements":
        if not self.limits:
            raise ValueError(f"give at least one of {', '.join(type(self).model_fields)}")
        return self


Ratio = Annotated[Number, Field(gt=0)]
ERROR_RATE = "error_rate"
_SIDES = {"_at_most": "max", "_at_least": "min"}


class LatencyBounds(Strict):
    """Bounds on ratios candidate ÷ baseline, and on the share of the candidate's failed requests.

    Args:
        required: whether a candidate whose latency was not measured may not pass. Without it the
            bounds are judged when there is a measurement, and the report says when there is none.
        error_rate_at_most: always judged: latency is taken from the answers that did not fail.
    """

    required: Annotated[bool, Field(strict=True)] = True
    ttft_p50_ratio_at_most: Ratio | None = None
    ttft_p95_ratio_at_most: Ratio | None = None
    itl_p50_ratio_at_most: Ratio | None = None
    itl_p95_ratio_at_most: Ratio | None = None
    e2e_p50_ratio_at_most: Ratio | None = None
    e2e_p95_ratio_at_most: Ratio | None = None
    throughput_ratio_at_least: Ratio | None = None
    error_rate_at_most: Annotated[Number, Field(ge=0, lt=1)] = 0.05

    @model_validator(mode="after")
    def _not_empty(self) -> "LatencyBounds":
        names = [name for name in type(self).model_fields if name != "required"]
        if all(getattr(self, name) is None for name in names if name in self.model_fields_set):
            raise ValueError(f"give at least one of {', '.join(names)}")
        return self

    @property
    def limits(self) -> list[tuple[str, str, float]]:
        """The bounds that were given as (metric, ``max`` or ``min``, limit)."""
        found = []
        for name in type(self).model_fields:
            for suffix, side in _SIDES.items():
                value = getattr(self, name)
                if name.endswith(suffix) and value is not None:
                    found.append((name.removesuffix(suffix), side, value))
        return found


_TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class Policy(Strict):
    """A named set of limits; all must hold."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")]
    description: str = ""
    require: Requirements
    latency: LatencyBounds | None = None
    tasks: dict[_TaskName, TaskBounds] = Field(default_factory=dict)
    slices: Slices = Field(default_factory=Slices)


def builtin_policies() -> list[str]:
    """Names of the policies that ship with taut."""
    return shipped_names("taut_deploy.validate", "policies")


def load_policy(reference: str | Path) -> Policy:
    """Load a policy by built-in name or from a YAML file.

    Raises:
        CouldNotValidateError: no such policy, not YAML, or a wrong key or value (named).
    """
    text = read_shipped_or_file(
        str(reference), "taut_deploy.validate", "policies", "policy", CouldNotValidateError
    )
    return parse_policy(text, str(reference))


def beside_policy(reference: str | Path, file: str) -> Path:
    """A file that a policy names: it lies beside the policy's own.

    Args:
        reference: of the policy, as :func:`load_policy` takes it.
        file: as the policy names it.
    """
    policy = Path(reference)
    return policy.parent / file if policy.is_file() else Path(file)


def parse_policy(text: str, origin: str) -> Policy:
    """Parse policy YAML; ``origin`` is named in errors.

    Raises:
        CouldNotValidateError: naming the key and what is wrong with it.
    """
    data = parse_mapping(text, origin, CouldNotValidateError, "'name' and 'require'")
    return validate_mapping(Policy, data, origin, CouldNotValidateError)
