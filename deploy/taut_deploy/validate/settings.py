"""The settings of a validation, a dataclass for each matter; the command line has the same groups.

They say nothing of their own range: a job checks them, so that what a command lowers or leaves out
is not held against its user.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from taut_deploy.validate.errors import CouldNotValidateError


def require_at_least(**given: tuple[int | None, int]) -> None:
    """Refuse a number below its least; None is not given.

    Args:
        given: (number, least) by field, the name of its flag.

    Raises:
        CouldNotValidateError: naming the flag.
    """
    for name, (value, least) in given.items():
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            raise CouldNotValidateError(f"{flag}: {value} is below {least}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How much of the text is compared, and how often it is resampled.

    Args:
        sequences: Sequences to compare.
        max_sequences: Draw more, up to so many, while a limit is undecided.
        sequence_length: Tokens per sequence.
        seed: Seed of bootstrap and latency load.
        bootstrap: Bootstrap resamples.
        noise_sequences: Sequences of the baseline-against-itself run; 0 leaves it out.
    """

    sequences: int = 32
    max_sequences: int | None = None
    sequence_length: int = 512
    seed: int = 0
    bootstrap: int = 2000
    noise_sequences: int = 8

    @property
    def most(self) -> int:
        """Sequences that are drawn at most."""
        return self.max_sequences or self.sequences

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            CouldNotValidateError: naming the flag.
        """
        require_at_least(
            sequences=(self.sequences, 2),
            sequence_length=(self.sequence_length, 2),
            seed=(self.seed, 0),
            bootstrap=(self.bootstrap, 200),
            noise_sequences=(self.noise_sequences, 0),
            max_sequences=(self.max_sequences, self.sequences),
        )


@dataclass(frozen=True, kw_only=True)
class Items:
    """What both models are asked beside the text and what the policy names.

    Args:
        tasks: Files of items that both models answer.
        harness: Names of tasks of lm-evaluation-harness.
        harness_path: Directory with the user's own task definitions for it.
        slices: ``NAME`` or ``NAME=FILE`` of slices.
        max_items: At most as many of each task; None leaves it to the policy.
    """

    tasks: tuple[Path, ...] = ()
    harness: tuple[str, ...] = ()
    harness_path: Path | None = None
    slices: tuple[str, ...] = ()
    max_items: int | None = None

    def fewest(self, most: int) -> int:
        """Items of a task that may have so many by its policy."""
        return min(most, self.max_items or most)

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            CouldNotValidateError: naming the flag.
        """
        require_at_least(max_items=(self.max_items, 2))


@dataclass(frozen=True, kw_only=True)
class Directories:
    """How a model that is a directory is loaded and run.

    Args:
        device: cpu, cuda or cuda:N, for directories.
        served: Start a worker for a candidate directory and compare what it serves.
        trust_remote_code: Let Python code in the directories run.
    """

    device: str = "cpu"
    served: bool = False
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what is no name of a device, before anything heavy is imported.

        Raises:
            CouldNotValidateError: naming the flag.
        """
        # torch knows more names: on "meta" every model loads, and none computes.
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise CouldNotValidateError(f"--device {self.device}: use cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class Servers:
    """What is asked of a model behind a URL.

    Args:
        top_k: Log-probabilities asked of a server.
        baseline_model: Model name at its URL.
        candidate_model: Model name at its URL.
        timeout_s: Seconds to wait for one server answer.
    """

    top_k: int = 20
    baseline_model: str | None = None
    candidate_model: str | None = None
    timeout_s: float = 300.0

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            CouldNotValidateError: naming the flag.
        """
        require_at_least(top_k=(self.top_k, 1))
        if not self.timeout_s > 0:
            raise CouldNotValidateError(
                f"--timeout-s: {self.timeout_s} is not a positive number of seconds"
            )


@dataclass(frozen=True, kw_only=True)
class Access:
    """What is sent with every request to a URL; none of it is written to the report.

    Args:
        api_key: Bearer token for both.
        baseline_headers: (name, value), for the baseline's.
        candidate_headers: Likewise for the candidate's.
    """

    api_key: str | None = field(default=None, repr=False)
    baseline_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    candidate_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
