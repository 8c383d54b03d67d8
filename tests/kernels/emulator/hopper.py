"""Runs a Gluon kernel of Hopper on NumPy: TMA, `wgmma`, barriers, partitions of warps as threads.

Extends :mod:`emulator.gluon`. Everything asynchronous happens as late as it may: a
block of TMA lands when somebody waits for its barrier (until then its place holds NaN), so does
what a warp copies by `cp.async`, or when its group is waited for; a product is computed, from what
shared memory holds then, when it is waited for, and so is a block stored. So a missing wait, a
place given back too early and a wrong phase show as wrong results, and a barrier that nobody
completes as a deadlock.
Layouts, registers and fences have no meaning here.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from emulator import gluon
from emulator.gluon import Layout
from emulator.memory import POISON, Pointer, Shared, block, floats, load, rounded
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PATIENCE = 10.0
"""Seconds a partition waits before the kernel counts as deadlocked."""
_LANES = 32
_LOCK = threading.Condition()
_BYTE_KINDS: dict[torch.dtype, Any] = {torch.int8: np.int8, torch.float8_e4m3fn: "e4m3"}
"""Types of one byte, which are read only; their values are kept as fp32."""


class BarrierLayout(Layout):
    """The layout that makes shared memory barriers."""


class Descriptor:
    """A tensor as TMA sees it.

    Args:
        given: what the host made, of a tensor on the CPU.
    """

    def __init__(self, given: TensorDescriptor) -> None:
        offset = given.base.storage_offset()
        seen = torch.as_strided(given.base, given.shape, given.strides, offset)
        self.shape = tuple(given.block_shape)
        self.block_shape, self.layout = list(self.shape), given.layout
        self.bytes = int(np.prod(self.shape)) * seen.element_size()
        if seen.dtype in _BYTE_KINDS:
            self.values, self.dtype = seen.float().numpy(), _BYTE_KINDS[seen.dtype]
            return
        if seen.dtype == torch.int32:
            self.values, self.dtype = seen.numpy(), np.int32
            return
        pointer = Pointer.of(seen.contiguous())
        self.memory = pointer.memory.reshape(seen.shape)
        self.values = floats(pointer.memory, pointer.kind).reshape(seen.shape)
        self.dtype = pointer.kind

    def read(self, first: tuple[int, ...]) -> Any:
        """Return the block that begins at ``first``, zero where the tensor has no element."""
        found = np.zeros(self.shape, self.values.dtype)
        inside, there = self._common(first)
        found[inside] = self.values[there]
        return found

    def write(self, first: tuple[int, ...], values: Any) -> None:
        """Write the elements the tensor has of the block that begins at ``first``."""
        inside, there = self._common(first)
        self.memory[there] = rounded(values[inside], self.dtype)

    def _common(self, first: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return what block and tensor share: where in the block, where in the tensor."""
        ranges = [
            (max(at, 0), max(min(at + size, most), at, 0))
            for at, size, most in zip(first, self.shape, self.values.shape, strict=True)
        ]
        inside = tuple(
            slice(low - at, high - at) for (low, high), at in zip(ranges, first, strict=True)
        )
        return inside, tuple(slice(low, high) for low, high in ranges)


class Barrier:
    """An `mbarrier`: a phase ends when all have arrived, and all bytes and copies have landed."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0
        self.blocks: list[tuple[Shared, Any, int]] = []

    def arrive(self, count: int, expected: int = 0) -> None:
        """Arrive, and say how many bytes are to come."""
        with _LOCK:
            assert self.missing >= count, "more arrivals than the barrier was made for"
            self.missing -= count
            self.bytes += expected
            self._advance()

    def wait(self, parity: int) -> None:
        """Return when the phase of this parity has ended."""
        with _LOCK:
            while self.phase % 2 == parity:
                for place, values, size in self.blocks:
                    place.memory[...] = values
                    self.bytes -= size
                self.blocks.clear()
                self._advance()
                if self.phase % 2 == parity and not _LOCK.wait(PATIENCE):
                    raise RuntimeError("deadlock: nobody completes a barrier")

    def _advance(self) -> None:
        if self.missing == 0 and self.bytes == 0 and not self.blocks:
            self.phase += 1
            self.missing = self.count
            _LOCK.notify_all()


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, place: int) -> Barrier:
        """Return one of them."""
        assert 0 <= place < len(self._all)
        return self._all[int(place)]


def _initialise(barrier: Barrier, count: int) -> None:
    assert not barrier.count
    barrier.count = barrier.missing = count


def _arrive(barrier: Barrier, count: int, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)


def _expect(barrier: Barrier, count: int, pred: Any = True) -> None:
    if pred:
        barrier.arrive(1, count)


def _poison(kind: Any) -> Any:
    return POISON if kind is np.int32 else np.float32(np.nan)


def load_block(descriptor: Descriptor, at: Any, barrier: Barrier, place: Shared) -> None:
    """Stand in for TMA's load of a block."""
    values = descriptor.read(tuple(int(each) for each in at))
    assert place.memory.shape == values.shape
    with _LOCK:
        place.memory[...] = _poison(place.dtype)
        barrier.blocks.append((place, values, descriptor.bytes))
        _LOCK.notify_all()


def load_within(tokens: int) -> Callable[[Descriptor, Any, Barrier, Shared], None]:
    """Return a :func:`load_block` that refuses activations' rows that do not exist.

    Args:
        tokens: of the activations, which tells them from the weights; at least a block's.
    """

    def load(descriptor: Descriptor, at: Any, barrier: Barrier, place: Shared) -> None:
        if len(descriptor.values) == tokens:
            assert 0 <= int(at[0]) <= tokens - descriptor.shape[0], f"block at {int(at[0])}"
        usual(descriptor, at, barrier, place)

    usual = load_block
    return load


def _copy(place: Shared, source: Pointer, mask: Any = None) -> None:
    """Stand in for `cp.async`."""
    values = load(source, mask)
    assert place.memory.shape == values.shape
    with _LOCK:
        place.memory[...] = _poison(place.dtype)
    _copies().append((place, values, 0))


def _commit() -> None:
    """Stand in for `cp.async.commit_group`."""
    _groups().append(list(_copies()))
    _copies().clear()


def _wait_groups(outstanding: int) -> None:
    """Stand in for `cp.async.wait_group`."""
    while len(_groups()) > outstanding:
        for place, values, _ in _groups().pop(0):
            place.memory[...] = values


def _arrive_with_copies(barrier: Barrier, increment_count: bool) -> None:
    """Let each lane of a warp arrive at a barrier with its copies so far."""
    assert not increment_count
    with _LOCK:
        barrier.blocks.extend(_copies())
        _copies().clear()
        barrier.arrive(_LANES)
        _LOCK.notify_all()


def store_block(descriptor: Descriptor, at: Any, place: Shared) -> None:
    """Stand in for TMA's store of a block."""
    assert place.memory.shape == descriptor.shape
    _stores().append((descriptor, tuple(int(each) for each in at), place))


def wait_stores(outstanding: int) -> None:
    """Stand in for the wait until the blocks stored before have been read."""
    queue = _stores()
    while len(queue) > outstanding:
        descriptor, at, place = queue.pop(0)
        descriptor.write(at, place.memory)


@dataclass
class Product:
    """A product under way, or done."""

    compute: Callable[[], Any]
    result: Any = None


_running = threading.local()


def _queue() -> list[Product]:
    if not hasattr(_running, "products"):
        _running.products = []
    found: list[Product] = _running.products
    return found


def _stores() -> list[tuple[Descriptor, tuple[int, ...], Shared]]:
    if not hasattr(_running, "stores"):
        _running.stores = []
    found: list[tuple[Descriptor, tuple[int, ...], Shared]] = _running.stores
    return found


def _copies() -> list[tuple[Shared, Any, int]]:
    if not hasattr(_running, "copies"):
        _running.copies = []
    found: list[tuple[Shared, Any, int]] = _running.copies
    return found


def _groups() -> list[list[tuple[Shared, Any, int]]]:
    if not hasattr(_running, "groups"):
        _running.groups = []
    found: list[list[tuple[Shared, Any, int]]] = _running.groups
    return found


def _operand(value: Any) -> Any:
    if isinstance(value, Product):
        assert value.result is not None, "a product's result is used before it was waited for"
        return value.result
    return value.memory if isinstance(value, Shared) else value


def multiply(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    """Stand in for `warpgroup_mma`."""
    assert is_async

    def compute() -> Any:
        found = _operand(a).astype(np.float32) @ b.memory
        return block(found + _operand(acc) if use_acc else found)

    product = Product(compute)
    _queue().append(product)
    return product


def wait_products(outstanding: int, deps: Any) -> Any:
    """Stand in for `warpgroup_mma_wait`."""
    queue = _queue()
    while len(queue) > outstanding:
        product = queue.pop(0)
        product.result = product.compute()
    found = [
        dep.result if isinstance(dep, Product) and dep.result is not None else dep for dep in deps
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _partitions(functions: Any, _warps: Any, _registers: Any) -> None:
    """Stand in for `warp_specialize`: every partition a thread."""
    failures: list[BaseException] = []

    def run(function: Any, arguments: Any) -> None:
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                function(*arguments)
            assert not _queue(), "a partition ends with products under way"
            assert not _stores(), "a partition ends with stores under way"
            assert not _copies(), "a partition ends with copies that no barrier waits for"
        except BaseException as error:  # handed to the thread that waits for all of them
            failures.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _log2(value: Any) -> Any:
    with np.errstate(divide="ignore"):
        return block(np.log2(value, dtype=np.float32))


def _allocate(kind: Any, shape: Any, layout: Any) -> Any:
    if isinstance(layout, BarrierLayout):
        return Barriers(shape[0])
    poison = _poison(kind)
    return Shared(np.full(tuple(shape), poison), kind)


def _language(program: tuple[int, ...], programs: int) -> Any:
    base = vars(gluon.language(program))
    mine = {
        "DotOperandLayout": Layout,
        "NVMMADistributedLayout": Layout,
        "NVMMASharedLayout": Layout,
        "allocate_shared_memory": _allocate,
        "cast": lambda value, _: value,
        "constexpr": lambda value: value,
        "convert_layout": lambda value, _, **__: value,
        "int8": np.int8,
        "exp2": lambda value: block(np.exp2(value, dtype=np.float32)),
        "log2": _log2,
        "max": lambda value, axis: block(value.max(axis=axis)),
        "maximum": lambda a, b: block(np.maximum(a, b)),
        "num_programs": lambda _: programs,
        "permute": lambda value, order: block(np.transpose(value, order)),
        "reshape": lambda value, shape: block(np.reshape(value, shape)),
        "split": lambda value: (block(value[..., 0]), block(value[..., 1])),
        "warp_specialize": _partitions,
        "zeros": lambda shape, kind, _: block(
            np.zeros(shape, np.float32 if isinstance(kind, str) else kind)
        ),
    }
    return types.SimpleNamespace(**base | mine)


def _seen_as(place: Shared, dtype: Any, shape: Any, _layout: Any) -> Shared:
    assert dtype == place.dtype
    return place.reshape(shape)


def _stand_ins() -> dict[str, Any]:
    hopper = types.SimpleNamespace(
        fence_async_shared=lambda: None,
        warpgroup_mma=multiply,
        warpgroup_mma_wait=wait_products,
    )
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=BarrierLayout,
        init=_initialise,
        arrive=_arrive,
        expect=_expect,
        wait=lambda barrier, parity: barrier.wait(parity),
    )
    return {
        "copy": _copy,
        "async_copy": types.SimpleNamespace(
            mbarrier_arrive=_arrive_with_copies, commit_group=_commit, wait_group=_wait_groups
        ),
        "barrier": lambda: None,
        "hopper": hopper,
        "load_block": load_block,
        "mbarrier": mbarrier,
        "seen_as": _seen_as,
        "store_block": store_block,
        "tma": types.SimpleNamespace(store_wait=wait_stores),
    }


def run(kernel: Any, grid: int | tuple[int, int, int], arguments: dict[str, Any]) -> None:
    """Run every program.

    Args:
        kernel: a `gluon.jit` function that asks how many programs there are along axis 0 only.
        grid: programs along each axis, or along the only one.
        arguments: by name; tensors are contiguous and on the CPU, or None; descriptors as the
            host makes them.

    Raises:
        RuntimeError: partitions wait for one another.
    """
    given = {
        name: Descriptor(value) if isinstance(value, TensorDescriptor) else value
        for name, value in arguments.items()
    }
    programs, along_1, along_2 = (grid, 1, 1) if isinstance(grid, int) else grid
    for last in range(along_2):

        def language(program: tuple[int, int], last: int = last) -> Any:
            return _language((*program, last), programs)

        gluon.run(kernel, (programs, along_1), given, language, _stand_ins)
