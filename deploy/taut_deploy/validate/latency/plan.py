"""How much latency is measured: requests, concurrencies, lengths."""

import math
from dataclasses import dataclass

from taut_deploy.validate.errors import CouldNotValidateError

LEAST_BLOCKS = 8
"""Blocks below which no interval is worth its name."""
_LEAST_BLOCK = 4
_MOST_CONCURRENCY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPlan:
    """What each of the two models is asked, at every concurrency.

    Requests are grouped in blocks: the unit that is interleaved and resampled. A block holds as
    many requests as run at a time, but at least four, so that at concurrency 1 it is not a single
    one; the last block is filled up.

    Args:
        requests: measured requests per model and concurrency, the warm-up not counted.
        concurrency: requests in flight, one closed loop each.
        prompt_tokens: tokens of every prompt, a BOS included.
        output_tokens: tokens of every answer; at least two, or there is no gap between them.
        timeout_s: seconds within which an answer must have ended, or it counts as failed.

    Raises:
        CouldNotValidateError: a number is out of range; the flag is named.
    """

    requests: int = 96
    concurrency: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 128
    output_tokens: int = 32
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in {"requests": 1, "prompt_tokens": 2, "output_tokens": 2}.items():
            if getattr(self, name) < least:
                flag = "--latency-" + name.replace("_", "-")
                raise CouldNotValidateError(f"{flag}: {getattr(self, name)} is below {least}")
        if not 0 < self.timeout_s < math.inf:
            raise CouldNotValidateError(
                f"--latency-timeout-s: {self.timeout_s} is not a positive number of seconds"
            )
        self._check_concurrency()

    def _check_concurrency(self) -> None:
        flag = "--latency-concurrency"
        if not self.concurrency:
            raise CouldNotValidateError(f"{flag}: give at least one number")
        if len(set(self.concurrency)) < len(self.concurrency):
            raise CouldNotValidateError(f"{flag}: a number is given twice")
        for level in self.concurrency:
            if not 1 <= level <= _MOST_CONCURRENCY:
                raise CouldNotValidateError(f"{flag}: {level} is not in 1 to {_MOST_CONCURRENCY}")
            if self.blocks(level) < LEAST_BLOCKS:
                needed = self.block_requests(level) * (LEAST_BLOCKS - 1) + 1
                raise CouldNotValidateError(
                    f"--latency-requests: {self.requests} make {self.blocks(level)} blocks of "
                    f"{self.block_requests(level)} at concurrency {level}, an interval needs "
                    f"{LEAST_BLOCKS}; give at least {needed}"
                )

    def block_requests(self, concurrency: int) -> int:
        """Requests per model in one block."""
        return max(_LEAST_BLOCK, concurrency)

    def blocks(self, concurrency: int) -> int:
        """Measured blocks at one concurrency."""
        return math.ceil(self.requests / self.block_requests(concurrency))


def parse_concurrency(text: str) -> tuple[int, ...]:
    """Read ``1,8``.

    Raises:
        CouldNotValidateError: not whole numbers with commas between them.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise CouldNotValidateError(
            f"--latency-concurrency: {text!r} is not a list of whole numbers such as 1,8"
        ) from error
