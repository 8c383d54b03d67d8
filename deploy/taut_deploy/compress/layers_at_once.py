"""Layers of a block solved at the same time: each on one thread, or on one of several devices.

The layers that read one input are solved together, so that what only that input decides (the
Cholesky factor of its Hessian) is computed once. Which device they go to depends on their shapes
alone, and every operation has one thread: the bytes are those of solving one after the other.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch

from taut_deploy.compress.state import LayerState
from taut_deploy.compress.threads import at_device, load_linalg, modes_of_caller, single_thread

Result = TypeVar("Result")
# Layers that share their input group -> what was found for each, in their order
SolveGroup = Callable[[Sequence[LayerState]], Sequence[Result]]

# What layers solved at the same time may take on the CPU beside the block. The Hessian of a width
# of 4096 takes a third of it, so that large layers go one after the other.
_WORKING_BYTES = 1 << 29
# Multiplications of the Cholesky factor that take the time of a weight's scales and rounding:
# 130 ns a weight, 30 products a ns on one core of an EPYC.
_PRODUCTS_OF_A_WEIGHT = 4000


def solve_layers(
    solve: SolveGroup[Result],
    layers: Iterable[LayerState],
    devices: Sequence[torch.device] = (),
) -> list[Result]:
    """Apply a function to the layers of a block, those of one input together.

    Args:
        solve: what to do with layers of one input; must be able to run on several threads, and
            must not change them.
        layers: of one block.
        devices: that share the work, the block's own first; none for its own alone.

    Returns:
        What was found for each layer, in their order, on the block's device.
    """
    ordered = list(layers)
    if not ordered:
        return []
    home = ordered[0].module.weight.device
    groups: dict[int, list[int]] = {}
    for position, layer in enumerate(ordered):
        groups.setdefault(id(layer.group), []).append(position)
    tasks = [[ordered[position] for position in positions] for positions in groups.values()]
    places = list(devices) if len(devices) > 1 else [home] * _threads_for(tasks, home)
    if len(places) == 1:
        solved = [solve(task) for task in tasks]
    else:
        with single_thread():
            solved = _side_by_side(solve, tasks, places)
    found: dict[int, Result] = {}
    for positions, results in zip(groups.values(), solved, strict=True):
        found |= zip(positions, results, strict=True)
    return [found[position] for position in range(len(ordered))]


def _side_by_side(
    solve: SolveGroup[Result], tasks: Sequence[Sequence[LayerState]], places: Sequence[torch.device]
) -> list[Sequence[Result]]:
    load_linalg(places)
    modes = modes_of_caller()
    home = tasks[0][0].module.weight.device

    def call(task: Sequence[LayerState], place: torch.device) -> Sequence[Result]:
        with modes(), at_device(place):
            if place == home:
                return solve(task)
            return cast("Sequence[Result]", _moved(solve(_at(task, place)), home))

    with ExitStack() as held:
        pools = [held.enter_context(ThreadPoolExecutor(1)) for _ in places]
        running: dict[int, Future[Sequence[Result]]] = {
            number: pools[place].submit(call, tasks[number], places[place])
            for number, place in _dealt([_cost(task) for task in tasks], len(places))
        }
        try:
            return [running[number].result() for number in range(len(tasks))]
        except BaseException:
            for future in running.values():
                future.cancel()
            raise


def _dealt(costs: Sequence[int], places: int) -> list[tuple[int, int]]:
    """Number and place of every task: the dearest first, each to who has least to do."""
    load = [0] * places
    dealt = []
    for number in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        place = load.index(min(load))
        load[place] += costs[number]
        dealt.append((number, place))
    return dealt


def _threads_for(tasks: Sequence[Sequence[LayerState]], home: torch.device) -> int:
    """How many tasks are worked on at a time: as many as threads and memory allow."""
    if home.type != "cpu":
        return 1
    largest = max(map(_working_bytes, tasks))
    return max(1, min(torch.get_num_threads(), len(tasks), _WORKING_BYTES // largest))


def _cost(task: Sequence[LayerState]) -> int:
    k = task[0].module.weight.shape[1]
    return sum(layer.module.weight.numel() for layer in task) + k**3 // _PRODUCTS_OF_A_WEIGHT


def _working_bytes(task: Sequence[LayerState]) -> int:
    """About three matrices of the Hessian's size and six of the largest weight's, fp32."""
    k = task[0].module.weight.shape[1]
    return 4 * (3 * k * k + 6 * max(layer.module.weight.numel() for layer in task))


def _at(task: Sequence[LayerState], place: torch.device) -> Sequence[LayerState]:
    group = task[0].group.at(place)
    return [layer.at(place, group) for layer in task]


def _moved(value: Any, device: torch.device) -> Any:
    """The same with every tensor in it on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_moved(one, device) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: _moved(part, device) for name, part in parts.items()})
    return value
