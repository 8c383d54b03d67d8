"""Count the bytes and FLOPs of anything that runs in torch, as it runs.

Two counts come out. *Dispatched*: every operation that reaches the device reads its operands and
writes its results once; what eager mode moves. *Compulsory*: every byte that was there before the
call and is looked at is read once, every byte that is there after it is written once; what a
perfect fusion would still move. Their ratio says what fusing can gain.

Rules    views move nothing; a dimension of stride 0 is one element; an operand that is written in
         place is also read, but for fills, copies and ``out=``; a lookup (embedding, index, gather)
         reads as much as it returns, and its indices; an op of ours counts by its formula
         (:mod:`.op_work`)
FLOPs    products and convolutions by `torch.utils.flop_counter`, with what its table lacks for
         CPUs; attention as two products (backward five) of the whole square, masked or not; one per
         output of a pointwise operation, one per input of a reduction, five per element of a
         softmax or a norm that ATen runs as one operation
Limits   caches are not modelled: an operand that stays in one is counted all the same
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from taut_bench.instruments import aten_traits as traits
from taut_bench.instruments.op_work import OP_TABLES, OP_WORK
from taut_bench.instruments.subject import Subject, dense_parts, tensors_in
from taut_bench.instruments.work import Work, arguments_of


@dataclass(frozen=True, slots=True)
class OpCount:
    """One kind of operation.

    Attributes:
        op: for example ``aten::mm``.
        calls: how often it was dispatched.
        work: of all calls.
    """

    op: str
    calls: int
    work: Work


@dataclass(frozen=True, slots=True)
class Count:
    """What one step did.

    Attributes:
        by_op: the most bytes first; views, which move nothing, are left out.
        dispatched: sum of ``by_op``.
        compulsory: bytes that cannot be avoided, and the same FLOPs.
    """

    by_op: tuple[OpCount, ...]
    dispatched: Work
    compulsory: Work


def count(subject: Subject) -> Count:
    """Run one step and count it.

    Args:
        subject: what to run; on any device.
    """
    counter = _Counter()
    with counter:
        result = subject.step()
    gradients = [leaf.grad for leaf in subject.leaves()] if subject.backward else []
    return counter.summary(_parts_in((result, gradients)))


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements a tensor shows: dimensions of stride 0 count once.

    Args:
        tensor: of any layout; of a sparse one its indices and values count.
    """
    if not _is_strided(tensor):
        parts = dense_parts(tensor)
        if parts[0] is tensor:
            return tensor.numel() * tensor.element_size()
        return sum(map(touched_bytes, parts))
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return 0
        elements *= size if stride else 1
    return elements * tensor.element_size()


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: dict[str, int] = defaultdict(int)
        self._work: dict[str, Work] = defaultdict(Work)
        self._flop_table = FlopCounterMode(display=False).flop_registry
        # Storages made during the step, by identity. None is kept alive: a large model's would not
        # fit. One that dies may pass its identity on, but only to another made here.
        self._made: set[int] = set()
        # Storage → region of it → bytes, for what was there before.
        self._read: dict[int, dict[tuple[Any, ...], int]] = defaultdict(dict)
        self._mutated: dict[int, dict[tuple[Any, ...], int]] = defaultdict(dict)
        self._capacity: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        ours = name.removeprefix("taut::") if name.startswith("taut::") else None
        # Before the call: an op in place changes neither shapes nor storages, but resize_ does.
        operands = _Operands(func, args, kwargs)
        result = func(*args, **kwargs)
        if ours in OP_WORK:
            call = arguments_of(func, args, kwargs)
            work = OP_WORK[ours](call)
            if ours in OP_TABLES:
                tables = OP_TABLES[ours](call)
                self._note_lookup(operands, tables, _parts_in(result))
            else:
                self._note_regions(operands, operands.read, _parts_in(result))
        else:
            work = self._generic(func, name, operands, (args, kwargs), result)
        if work != Work():
            self._calls[name] += 1
            self._work[name] += work
        return result

    def _generic(
        self, func: Any, name: str, operands: _Operands, given: _Given, result: Any
    ) -> Work:
        results = _parts_in(result)
        known = {_storage(tensor) for tensor in operands.all}
        fresh = [tensor for tensor in results if _storage(tensor) not in known]
        if name in traits.READS_SHAPE_ONLY:
            operands.read.clear()
        if name in traits.ALLOCATES or (not fresh and not operands.written and results):
            self._note_regions(operands, [], results)
            return Work()
        flops = self._flops(func, name, operands, given, result)
        if name in traits.LOOKUPS:
            self._note_lookup(operands, {0: sum(map(touched_bytes, results))}, results)
            indices = sum(map(touched_bytes, operands.read[1:]))
            written = sum(map(touched_bytes, results))
            return Work(flops, indices + written, written)
        if name in traits.SCATTERS:
            self._note_regions(operands, operands.read, results)
            sources = [t for t in operands.all if t not in _Identity(operands.written)]
            values = touched_bytes(sources[-1]) if sources else 0
            return Work(flops, sum(map(touched_bytes, sources)), values)
        self._note_regions(operands, operands.read, results)
        written = sum(map(touched_bytes, (*fresh, *operands.written)))
        return Work(flops, sum(map(touched_bytes, operands.read)), written)

    def _flops(self, func: Any, name: str, operands: _Operands, given: _Given, result: Any) -> int:
        args, kwargs = given
        if name in traits.FLOPS:
            return traits.FLOPS[name](args)
        packet = func._overloadpacket
        if packet in self._flop_table:
            return int(self._flop_table[packet](*args, **kwargs, out_val=result))
        outputs = sum(tensor.numel() for tensor in tensors_in(result))
        inputs = sum(tensor.numel() for tensor in operands.read[:1])
        if torch.Tag.pointwise in func.tags and name not in traits.COPIES:
            return outputs
        if name in traits.ROWWISE:
            return traits.ROWWISE_FLOPS * inputs
        # The tag exists from torch 2.12 on.
        reduction = getattr(torch.Tag, "reduction", None)
        if reduction in func.tags or name in traits.REDUCTIONS:
            return inputs
        return 0

    def _note_lookup(
        self, operands: _Operands, tables: dict[int, int], results: list[Tensor]
    ) -> None:
        """Note operands of which only some bytes are read: their places, and how many."""
        for position, looked_up in tables.items():
            storage = _storage(operands.read[position])
            if storage not in self._made:
                key = ("lookup", len(self._read[storage]))
                self._read[storage][key] = looked_up
                self._capacity[storage] = _capacity(operands.read[position])
        rest = [tensor for i, tensor in enumerate(operands.read) if i not in tables]
        self._note_regions(operands, rest, results)

    def _note_regions(self, operands: _Operands, read: list[Tensor], results: list[Tensor]) -> None:
        for tensors, regions in ((read, self._read), (operands.written, self._mutated)):
            for tensor in tensors:
                storage = _storage(tensor)
                if storage not in self._made:
                    regions[storage][_region(tensor)] = touched_bytes(tensor)
                    self._capacity[storage] = _capacity(tensor)
        known = {_storage(tensor) for tensor in operands.all}
        for tensor in results:
            if _storage(tensor) not in known:
                self._made.add(_storage(tensor))

    def summary(self, kept: list[Tensor]) -> Count:
        """Return the count; ``kept`` are the tensors that outlive the step."""
        by_op = [OpCount(op, self._calls[op], work) for op, work in self._work.items()]
        by_op.sort(key=lambda entry: -entry.work.moved)
        dispatched = sum((entry.work for entry in by_op), Work())
        written = sum(
            min(sum(regions.values()), self._capacity[storage])
            for storage, regions in self._mutated.items()
        )
        read = sum(
            min(sum(regions.values()), self._capacity[storage])
            for storage, regions in self._read.items()
        )
        results = {_storage(tensor): tensor for tensor in kept if _storage(tensor) in self._made}
        written += sum(map(touched_bytes, results.values()))
        return Count(tuple(by_op), dispatched, Work(dispatched.flops, read, written))


_Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


class _Operands:
    """Tensors of one call: all, those it reads and those it writes in place."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.all: list[Tensor] = _parts_in((args, kwargs))
        self.written: list[Tensor] = []
        self.read: list[Tensor] = []
        name = func._schema.name
        positional = list(args)
        for i, argument in enumerate(func._schema.arguments):
            if i < len(positional):
                value = positional[i]
            elif argument.name in kwargs:
                value = kwargs[argument.name]
            else:
                continue
            tensors = _parts_in(value)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes:
                self.written += tensors
            if not writes or not (argument.kwarg_only or name in traits.OVERWRITES):
                self.read += tensors


class _Identity:
    """Membership by identity: ``in`` on a list of tensors would compare elements."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._ids = {id(tensor) for tensor in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids


def _parts_in(tree: Any) -> list[Tensor]:
    return [part for tensor in tensors_in(tree) for part in dense_parts(tensor)]


def _is_strided(tensor: Tensor) -> bool:
    """Say whether shape, strides and a storage are all there is to a tensor."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _storage(tensor: Tensor) -> int:
    """Identify a tensor's memory; of one without a storage (oneDNN's) the tensor itself."""
    if tensor.layout is torch.strided:
        return int(tensor.untyped_storage()._cdata)
    return id(tensor)


def _capacity(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return touched_bytes(tensor)


def _region(tensor: Tensor) -> tuple[Any, ...]:
    if not _is_strided(tensor):
        return ("whole",)
    return (tensor.storage_offset(), tensor.shape, tensor.stride())
