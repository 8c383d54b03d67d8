"""A loaded block on several devices, to which the batches of its input go in turns.

Which device a batch goes to depends on its position alone, and results come in the batches' order:
neither the bytes of outputs nor the order of any sum depend on how fast a device is.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from taut_deploy.compress.source.calls import PerRow, call_block
from taut_deploy.compress.threads import (
    at_device,
    load_linalg,
    modes_of_caller,
    over_batches,
    results_in_order,
    single_thread,
)
from taut_deploy.errors import RecipeError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Replica:
    """A block on one of its devices.

    Args:
        number: its position among them; 0 is the block itself.
        module: loaded.
        arguments: recorded keyword arguments, on the device.
        device: of both; None where inputs are there already.
    """

    number: int
    module: nn.Module
    arguments: dict[str, Any]
    device: torch.device | None = None

    def call(self, hidden: torch.Tensor) -> torch.Tensor:
        """The block's output for a batch [b, T, H], on the replica's device."""
        return call_block(self.module, self.moved(hidden), self.arguments)

    def moved(self, hidden: torch.Tensor) -> torch.Tensor:
        """A tensor on the replica's device."""
        return hidden if self.device is None else hidden.to(self.device)


def replicas_of(
    block: nn.Module, arguments: dict[str, Any], devices: Sequence[torch.device] = ()
) -> list[Replica]:
    """A block as it is now, and a copy of it on every further device.

    Args:
        block: loaded, on the first device.
        arguments: its recorded keyword arguments, which may hold :class:`PerRow` parts.
        devices: all of them, the first included; none or one makes no copies.
    """
    if len(devices) < 2:
        return [Replica(0, block, arguments)]
    first = Replica(0, block, arguments, devices[0])
    return [first, *(_copied(first, i, device) for i, device in enumerate(devices[1:], 1))]


def _copied(first: Replica, number: int, device: torch.device) -> Replica:
    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor | PerRow) else value

    module = copy.deepcopy(first.module).to(device)
    return Replica(number, module, tree_map(there, first.arguments), device)


def require_batches(devices: int, sequences: int, batch_size: int) -> None:
    """Refuse more devices than can be given a batch.

    Args:
        devices: that share the calibration.
        sequences: of the calibration.
        batch_size: sequences in a batch.

    Raises:
        RecipeError: says how many batches there are.
    """
    batches = -(-sequences // batch_size)
    if devices > batches:
        raise RecipeError(
            f"--devices: {devices} devices for {batches} batches of {batch_size} calibration "
            "sequences; name fewer devices, or raise 'calibration.sequences'"
        )


def over_replicas(
    function: Callable[[Replica, torch.Tensor], Result],
    hidden: torch.Tensor,
    batch_size: int,
    replicas: Sequence[Replica],
) -> Iterator[Result]:
    """Apply a function to each batch of a block's input; results come in the batches' order.

    Args:
        function: what to do with [b, T, H] on a replica; runs on several threads at a time.
        hidden: [B, T, H] the block's input; on the block's device where there is but one.
        batch_size: sequences per call.
        replicas: of :func:`replicas_of`.
    """
    first = replicas[0]
    if len(replicas) == 1:
        yield from over_batches(
            lambda batch: function(first, batch), hidden, batch_size, first.module
        )
        return
    load_linalg(replica.device for replica in replicas)
    modes = modes_of_caller()

    def call(replica: Replica, batch: torch.Tensor) -> Result:
        with modes(), at_device(replica.device):
            return function(replica, batch)

    with ExitStack() as held:
        if first.device == torch.device("cpu"):
            held.enter_context(single_thread())  # as batches that go side by side have
        pools = [held.enter_context(ThreadPoolExecutor(1)) for _ in replicas]
        turns = zip(cycle(zip(pools, replicas, strict=True)), torch.split(hidden, batch_size))
        submitted = (pool.submit(call, replica, batch) for (pool, replica), batch in turns)
        yield from results_in_order(submitted, len(replicas))
