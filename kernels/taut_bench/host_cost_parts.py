"""What stands around a launch: a call in parts, for :mod:`.host_cost`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from taut_kernels.launch import launcher

Call = Callable[[], object]
PARTS = ("dispatcher", "with allocations", "function", "launches", "C calls")
"""Of our call, each without what surrounds it but for the first two, which grow towards it."""
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Case:
    """One call of ours and what it is compared with.

    Attributes:
        name: of the call.
        tokens: M.
        op: ours.
        function: what its dispatcher calls on CUDA.
        operands: of both.
        rivals: whose → how to call it, prepared by calling this.
    """

    name: str
    tokens: int
    op: torch._ops.OpOverload
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    rivals: Mapping[str, Callable[[], Call]] = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    """What one call of a function did: the memory it asked for, the launches, what it returned."""

    memory: list[tuple[tuple[int, ...], torch.dtype, torch.device]]
    outputs: list[int]
    launches: list[tuple[Any, ...]]
    result: Any


def _observe(function: Callable[..., Any], operands: Sequence[Any]) -> _Seen:
    """Call once and note what it asks for, in the order in which it does."""
    empty, launch = launcher.empty, launcher.Form.__call__
    seen = _Seen([], [], [], None)
    made: list[Tensor] = []

    def noted_empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        seen.memory.append((tuple(shape), dtype, device))
        made.append(empty(shape, dtype=dtype, device=device))
        return made[-1]

    def noted_launch(form: launcher.Form, *arguments: Any) -> None:
        seen.launches.append((form, *arguments))
        launch(form, *arguments)

    with (
        mock.patch.object(launcher, "empty", noted_empty),
        mock.patch.object(launcher.Form, "__call__", noted_launch),
    ):
        seen.result = function(*operands)
    returned = seen.result if isinstance(seen.result, tuple) else (seen.result,)
    seen.outputs = [i for i, tensor in enumerate(made) if any(tensor is each for each in returned)]
    return seen


def _stand_in(case: Case, name: str, function: Callable[..., Any]) -> Call:
    """Return a call of a new op that has our op's schema and this function behind it."""
    schema = str(case.op._schema)
    unique = f"{case.op._schema.name.rpartition(':')[2]}_{name}_{next(_NUMBERS)}"
    key = "CUDA" if case.operands[0].is_cuda else "CPU"
    torch.library.define(f"taut_host_cost::{unique}", schema[schema.index("(") :])
    torch.library.impl(f"taut_host_cost::{unique}", key, function)
    op = getattr(torch.ops.taut_host_cost, unique).default
    return functools.partial(op, *case.operands)


def _bare(launches: Sequence[tuple[Any, ...]]) -> list[Call]:
    """Return the C calls of launches that were made, their arguments ready."""
    calls: list[Call] = []
    for form, grid, pointers, numbers, *_ in launches:
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in pointers]
        arguments = (*addresses, *numbers, *form._values)
        call, fixed, packed = form._route
        ready = (*grid, form._stream(form._device), *fixed)
        calls.append(functools.partial(call, *ready, *((arguments,) if packed else arguments)))
    return calls


def parts(case: Case) -> dict[str, Call]:
    """Return the parts of our call, by :data:`PARTS`.

    Args:
        case: whose operands the launches read and write.

    Returns:
        As many as the call has: no allocations where it makes none, no C calls where Triton's
        interpreter launched.
    """
    for _ in range(2):  # the second finds what the first compiled
        seen = _observe(case.function, case.operands)
    result, memory, outputs = seen.result, seen.memory, seen.outputs

    def nothing(*_: Any) -> Any:
        return result

    def allocating(*_: Any) -> Any:
        made = [launcher.empty(shape, dtype=dtype, device=at) for shape, dtype, at in memory]
        returned = tuple(made[i] for i in outputs)
        return returned if isinstance(result, tuple) else returned[0]

    def launching() -> None:
        for form, *arguments in seen.launches:
            form(*arguments)

    found: dict[str, Call] = {"dispatcher": _stand_in(case, "empty", nothing)}
    if outputs:
        found["with allocations"] = _stand_in(case, "allocating", allocating)
    found["function"] = functools.partial(case.function, *case.operands)
    found["launches"] = launching
    if all(form._compiled is not None for form, *_ in seen.launches):
        bare = _bare(seen.launches)
        found["C calls"] = bare[0] if len(bare) == 1 else lambda: [call() for call in bare]
    return found
