"""What launches would compile, found without the card: the launchers run, the kernels do not.

A call is made on meta tensors, which have shapes and types and no memory. The card is pretended,
and where Triton would look a form up, what it would look for is noted: types, alignments and
constants as its own specialisation finds them, and the options the launcher gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from taut_kernels.launch import assembler as launch_assembler
from taut_kernels.launch import launcher

BOTH, HOPPER = ("sm_80", "sm_90"), ("sm_90",)
"""Architectures."""
_SIZES = re.compile(r"\b[DKNV]=\d+|[\d+x]*\d+x\d+|M≤\d+|\[[\d, ]+\]|page \d+")
"""Of a label."""
_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132}


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One specialisation of a kernel, as a launch asks for it.

    Attributes:
        label: op, dtype and options, for the report.
        kernel: the `triton.jit` function.
        tile: what it is compiled for; hashable, and ``str`` names it in the report.
        target: ``sm_80`` or ``sm_90``.
        signature: argument name → type as Triton spells it.
        constants: argument name → value fixed at compile time (None for an absent tensor).
        attributes: argument name → what Triton knows of its value (``tt.divisibility``).
        options: what the launcher passes to the compiler.
        allowed_spill_bytes: local memory a thread may use; more than 0 only for a measured tile
            that is faster with it (kernels/README.md).
        assembler: what the launcher compiles in (:mod:`taut_kernels.launch.assembler`).
    """

    label: str
    kernel: Any
    tile: object
    target: str
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[str, Any]
    options: dict[str, Any]
    allowed_spill_bytes: int = 0
    assembler: launch_assembler.Choice = nullcontext

    @property
    def form(self) -> tuple[object, str]:
        """The kernel, and the label without sizes: what one variant stands for."""
        return self.kernel, _SIZES.sub("", self.label)

    @property
    def pointers(self) -> dict[str, str]:
        """Argument name → element type of the tensors that are there."""
        return {name: kind[1:] for name, kind in self.signature.items() if kind.startswith("*")}

    @property
    def descriptors(self) -> dict[str, str]:
        """Argument name → element type, block and layout of what TMA reads or writes."""
        return {
            name: kind.removeprefix("tensordesc<")[:-1]
            for name, kind in self.signature.items()
            if kind.startswith("tensordesc<")
        }


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call whose launch of one kernel is to be compiled ahead of time.

    Attributes:
        label: as of :class:`KernelVariant`, as are ``tile`` and ``allowed_spill_bytes``.
        kernel: whose launches count; what else the call launches belongs to another label.
        tile: likewise.
        run: calls a launcher on meta tensors.
        targets: architectures it is launched on.
        allowed_spill_bytes: likewise.
    """

    label: str
    kernel: Any
    tile: object
    run: Callable[[], object]
    targets: tuple[str, ...] = BOTH
    allowed_spill_bytes: int = 0


@cache
def _backend(target: str) -> Any:
    return make_backend(GPUTarget("cuda", int(target.removeprefix("sm_")), 32))


@cache
def _binder(kernel: Any, target: str) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, _backend(target))


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch of a kernel asks for; fields as of :class:`KernelVariant`."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[str, Any]
    options: dict[str, Any]
    assembler: launch_assembler.Choice


class _Card:
    """Takes the place of launches on one architecture."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._assembler: launch_assembler.Choice = nullcontext
        self.launches: list[Launch] = []

    def form(
        self, form: Any, grid: Any, pointers: Any, numbers: Any, constants: Any, *_: Any
    ) -> None:
        """Launch what a launcher's form would, as if it had never been launched."""
        self._assembler = form._assembler
        named, options = constants()
        form._kernel[grid](*pointers, *numbers, **named, **options)
        self._assembler = nullcontext

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Note what Triton would compile."""
        del grid, warmup
        bound, specialization, _ = _binder(kernel, self._target)(*args, **named)
        kinds = dict(zip(kernel.arg_names, specialization, strict=False))
        backend = _backend(self._target)
        constants = {name: bound[name] for name, (kind, _) in kinds.items() if kind == "constexpr"}
        attributes = {
            name: backend.parse_attr(known)
            for name, (kind, known) in kinds.items()
            if kind != "constexpr" and isinstance(known, str) and known
        }
        signature = {name: kind for name, (kind, _) in kinds.items()}
        options = {name: value for name, value in named.items() if name not in kinds}
        self.launches.append(
            Launch(kernel, signature, constants, attributes, options, self._assembler)
        )


@contextmanager
def pretended(target: str, gpu: str | None = None) -> Iterator[list[Launch]]:
    """Let launchers see a card of an architecture; yields what is launched meanwhile.

    Args:
        target: ``sm_80`` or ``sm_90``.
        gpu: the card's name, None of one that has no tables.
    """
    card = _Card(target)
    capability = (int(target[3]), int(target[4]))

    # Functions, which become methods of what they stand in for; bound methods would not.
    def launch(form: launcher.Form, *call: Any) -> None:
        card.form(form, *call)

    def run(kernel: Any, *arguments: Any, **named: Any) -> None:
        card.run(kernel, *arguments, **named)

    with (
        mock.patch.object(launcher, "capability", lambda device: capability),
        mock.patch.object(launcher, "gpu_name", lambda device: gpu),
        mock.patch.object(launcher, "multiprocessors", lambda device: _MULTIPROCESSORS[target]),
        mock.patch.object(launcher.Form, "__call__", launch),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield card.launches


def variants_of(call: KernelCall) -> Iterator[KernelVariant]:
    """Make a call on each of its architectures and yield the form it launches there.

    Args:
        call: what to make.

    Raises:
        RuntimeError: it launches no form of its kernel, or several.
    """
    for target in call.targets:
        with pretended(target) as launches:
            call.run()
        found = [launch for launch in launches if launch.kernel is call.kernel]
        if not found or any(other != found[0] for other in found):
            name = call.kernel.__name__
            raise RuntimeError(f"{call.label} launched {len(found)} forms of {name} on {target}")
        one = found[0]
        yield KernelVariant(
            call.label, call.kernel, call.tile, target, one.signature, one.constants,
            one.attributes, one.options, call.allowed_spill_bytes, one.assembler,
        )  # fmt: skip


def each_once(calls: Iterable[KernelCall]) -> Iterator[KernelVariant]:
    """Record calls, leaving out those it had: a table may name a rule's own tile.

    Args:
        calls: some whose label tells them apart, with the tile and the targets.
    """
    seen: set[tuple[object, ...]] = set()
    for call in calls:
        key = (call.label, call.tile, call.targets)
        if key not in seen:
            seen.add(key)
            yield from variants_of(call)
