"""What a training step asks of the processes that share it: one alone, or one of several.

Several share a step's micro-batches and hold a part of every weight each (FSDP2). What is saved is
whole in either case: one form of state, from which the checkpoint is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


class Alone:
    """One process that holds everything."""

    rank, count = 0, 1

    def share(self, batches: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those of a step's micro-batches that this process takes."""
        return batches

    def turns(self, batches: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
        """What this process computes of any number of batches, and whether each one counts.

        All processes take equally many turns: each takes part in putting weights together.
        """
        return [(batch, True) for batch in batches]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the processes of each value."""
        return values

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the processes of each value."""
        return values

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor, put together where every process holds a part of it."""
        return value

    def part(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What this process holds of a whole tensor.

        Args:
            value: the whole.
            like: what is held as it is to be.
        """
        del like
        return value

    def random_states(self, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The states of all processes' random numbers; the first one's keep their names."""
        return mine


@dataclass(frozen=True)
class Sharded(Alone):
    """One of several processes of a :mod:`torch.distributed` group.

    Args:
        rank: of this one.
        count: of all.
    """

    rank: int
    count: int

    def share(self, batches: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Every so many of them; how many there are is a multiple of the processes."""
        return batches[self.rank :: self.count]

    def turns(self, batches: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
        """Every so many of them; who has none in the last turn computes the last one uncounted."""
        places = range(self.rank, -(-len(batches) // self.count) * self.count, self.count)
        return [(batches[min(i, len(batches) - 1)], i < len(batches)) for i in places]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the processes of each value."""
        return self.total(values) / self.count

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the processes of each value."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor, put together where every process holds a part of it."""
        return value.full_tensor() if isinstance(value, DTensor) else value

    def part(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What this process holds of a whole tensor."""
        if not isinstance(like, DTensor) or value.shape != like.shape:
            return value
        # Every process has read the whole: nothing is sent.
        placed: torch.Tensor = distribute_tensor(
            value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        )
        return placed

    def random_states(self, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The states of all processes' random numbers; the first one's keep their names."""
        every: list[dict[str, torch.Tensor]] = [{} for _ in range(self.count)]
        dist.all_gather_object(every, mine)
        return dict(_named(every))


def own_name(name: str, rank: int) -> str:
    """What the state of a process's random numbers is called."""
    return name if rank == 0 else f"{name}|{rank}"


def _named(every: Sequence[dict[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for rank, states in enumerate(every):
        for name, state in states.items():
            yield own_name(name, rank), state
