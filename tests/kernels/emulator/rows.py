"""Runs a Gluon kernel of rows on NumPy, its programs beside each other in threads.

Beside :mod:`emulator.gluon`, for kernels whose programs wait for each other through
global memory and whose numbers are scalars of the program. Addresses, masks, the ring's slots, the
exchange between programs and the arithmetic are checked; layouts and barriers are not. A copy to
shared memory happens as late as it may: when its group is waited for. Until then, and at first,
shared memory holds NaN patterns.
"""

from __future__ import annotations

import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from emulator.memory import floats, rounded

_POISON = 0x7FC17FC1
_SECONDS = 60.0
_KINDS: dict[torch.dtype, Any] = {
    torch.bfloat16: "bf16",
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.int64: np.int64,
}


def _raw(value: Any) -> Any:
    return value.array if isinstance(value, Value) else value


class Value:
    """A block or a scalar of a program, with the operators of `gl.tensor`."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes of a block; none of a scalar."""
        return self.array.shape

    def to(self, kind: Any, bitcast: bool = False) -> Value:
        """Convert to a NumPy type, or read the bits as one; bf16 is rounded where it is stored."""
        if kind == "bf16":
            return self
        return Value(self.array.view(kind) if bitcast else self.array.astype(kind))

    def __bool__(self) -> bool:
        return bool(self.array)

    def __index__(self) -> int:
        return int(self.array)

    def __neg__(self) -> Value:
        return Value(-self.array)


def _operator(function: Callable[[Any, Any], Any], reverse: bool) -> Callable[[Any, Any], Value]:
    def apply(self: Value, other: Any) -> Value:
        pair = (_raw(other), self.array) if reverse else (self.array, _raw(other))
        return Value(function(*pair))

    return apply


for _name in "add sub mul truediv floordiv mod lshift rshift and or xor lt le gt ge eq ne".split():  # noqa: SIM905
    _function = getattr(operator, f"__{_name}__")
    setattr(Value, f"__{_name}__", _operator(_function, False))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{_name}__", _operator(_function, True))


class Pointer:
    """A tensor's bytes, a type to read them as, and offsets in elements of it."""

    def __init__(self, memory: Any, kind: Any, offset: Any) -> None:
        self.memory, self.kind, self.offset = memory, kind, np.asarray(offset, np.int64)

    @property
    def dtype(self) -> Any:
        """The pointer's type, of which kernels ask what it points at."""
        return types.SimpleNamespace(element_ty=self.kind)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.kind, self.offset + _raw(more))

    def to(self, kind: Any, bitcast: bool) -> Pointer:
        """Point at the same place as another type."""
        assert bitcast
        place = self.offset * self._elements().itemsize
        size = np.dtype(kind).itemsize
        assert np.all(place % size == 0), "misaligned"
        return Pointer(self.memory, kind, place // size)

    def _elements(self) -> Any:
        return self.memory.view(np.uint16 if self.kind == "bf16" else self.kind)

    def _allowed(self, mask: Any) -> Any:
        every = mask is None
        allowed = np.broadcast_to(np.array(True) if every else _raw(mask), self.offset.shape)
        inside = (self.offset >= 0) & (self.offset < self._elements().size)
        assert inside[allowed].all(), "out of bounds"
        return allowed

    def load(self, mask: Any = None, other: float = 0, volatile: bool = False) -> Value:
        """Stand in for `gl.load`; zeros where masked."""
        assert other == 0
        allowed, elements = self._allowed(mask), self._elements()
        found = np.where(allowed, elements[np.where(allowed, self.offset, 0)], 0)
        return Value(floats(found, "bf16") if self.kind == "bf16" else found.astype(self.kind))

    def store(self, value: Any, mask: Any = None) -> None:
        """Stand in for `gl.store`."""
        allowed = self._allowed(mask)
        array = np.broadcast_to(np.asarray(_raw(value)), self.offset.shape)
        if self.kind == "bf16":
            array = rounded(array, "bf16").reshape(array.shape)
        self._elements()[self.offset[allowed]] = array[allowed]


class Shared:
    """A shared memory descriptor."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes of the allocation."""
        found: tuple[int, ...] = self.memory.shape
        return found

    def index(self, place: Any) -> Shared:
        """Return one place along the first axis, which goes."""
        assert 0 <= int(place) < len(self.memory)
        return Shared(self.memory[int(place)])

    def load(self, _layout: Any) -> Value:
        """Return what is there."""
        return Value(self.memory.copy())


def _poison(memory: Any) -> Any:
    """Fill words with two NaN patterns each, numbers with NaN, in place."""
    memory[...] = np.nan if memory.dtype.kind == "f" else _POISON
    return memory


def _allocate(kind: Any, shape: Any, _layout: Any) -> Shared:
    """Make shared memory; bf16 is kept as fp32."""
    return Shared(_poison(np.empty(tuple(shape), np.float32 if kind == "bf16" else kind)))


class _Copies:
    """One program's `cp.async`: what was asked for, in groups, oldest first."""

    def __init__(self) -> None:
        self.groups: list[list[Callable[[], None]]] = []
        self.open: list[Callable[[], None]] = []

    def copy(
        self, slot: Shared, pointer: Pointer, mask: Any = None, cache_modifier: str = ""
    ) -> None:
        assert slot.memory.shape == pointer.offset.shape
        _poison(slot.memory)

        def arrive() -> None:
            slot.memory[...] = pointer.load(mask).array

        self.open.append(arrive)

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        while len(self.groups) > pending:
            for arrive in self.groups.pop(0):
                arrive()


def _inline_asm(
    text: str, _constraints: str, args: Any, _kind: Any, is_pure: bool, pack: int
) -> Any:
    """Run the row kernels' instructions."""
    first, *others = (np.asarray(_raw(value)) for value in args)
    opcode = text.split()[0]
    if opcode == "ex2.approx.ftz.f32":
        return Value(np.exp2(first.astype(np.float32)))
    if opcode == "lg2.approx.ftz.f32":
        return Value(np.log2(first.astype(np.float32)))
    kind = "bf16" if "bf16" in text else "fp16"
    if "cvt.f32.f16" in text:
        word = first.view(np.uint32)
        return tuple(Value(floats((word >> shift) & 0xFFFF, kind)) for shift in (0, 16))
    if opcode in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        return _pair(rounded(others[0], kind), rounded(first, kind))
    assert opcode in ("max.bf16x2", "max.f16x2"), text
    words = [x.view(np.uint32) for x in np.broadcast_arrays(first, np.int32(others[0]))]
    halves = [np.fmax(*(floats((w >> s) & 0xFFFF, kind) for w in words)) for s in (0, 16)]
    return _pair(*(rounded(half, kind) for half in halves))


def _pair(low: Any, high: Any) -> Value:
    """Return words of two 16-bit patterns."""
    return Value(((high.astype(np.uint32) << 16) | low).view(np.int32))


def _reduce(value: Any, axis: int, combine: Callable[..., Any]) -> Any:
    """Stand in for `gl.reduce` of one block or of several at once."""
    blocks = value if isinstance(value, tuple) else (value,)
    found = tuple(Value(np.take(block.array, 0, axis)) for block in blocks)
    for place in range(1, blocks[0].shape[axis]):
        more = (Value(np.take(block.array, place, axis)) for block in blocks)
        combined = combine(*found, *more)
        found = combined if isinstance(combined, tuple) else (combined,)
    return found if isinstance(value, tuple) else found[0]


def _range(*bounds: Any) -> Iterator[Value]:
    """Stand in for a loop, whose variable is a number of the program."""
    return (Value(np.int32(number)) for number in range(*bounds))


def _where(condition: Any, a: Any, b: Any) -> Value:
    array = np.where(_raw(condition), _raw(a), _raw(b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        array = array.astype(np.int32 if isinstance(a, int) else np.float32)
    return Value(array)


def _to_tensor(number: float) -> Value:
    return Value(np.int32(number) if isinstance(number, int) else np.float32(number))


def _language(program: int, programs: int) -> Any:
    """Make the `gl` of one program."""

    def nothing(*_: Any) -> None:
        return None

    return types.SimpleNamespace(
        BlockedLayout=nothing,
        SliceLayout=nothing,
        SwizzledSharedLayout=nothing,
        allocate_shared_memory=_allocate,
        arange=lambda start, end, _: Value(np.arange(start, end, dtype=np.int32)),
        constexpr=None,
        convert_layout=lambda value, _, assert_trivial: value,
        expand_dims=lambda value, axis: Value(np.expand_dims(value.array, axis)),
        float16=np.float16,
        float32=np.float32,
        full=lambda shape, value, kind, _: Value(np.full(shape, value, kind)),
        inline_asm_elementwise=_inline_asm,
        int32=np.int32,
        int64=np.int64,
        load=lambda pointer, **options: pointer.load(**options),
        log2=lambda value: Value(np.log2(value.array.astype(np.float32))),
        max=lambda value, axis: Value(np.fmax.reduce(value.array, axis=axis)),
        maximum=lambda a, b: Value(np.fmax(_raw(a), _raw(b))),
        minimum=lambda a, b: Value(np.fmin(_raw(a), _raw(b))),
        num_programs=lambda _: Value(np.int32(programs)),
        pointer_type=lambda kind: kind,
        program_id=lambda _: Value(np.int32(program)),
        reduce=_reduce,
        reshape=lambda value, shape: Value(value.array.reshape(shape)),
        static_range=range,
        store=lambda pointer, value, **options: pointer.store(value, **options),
        sum=lambda value, axis: Value(value.array.sum(axis=axis, dtype=np.float32)),
        to_tensor=_to_tensor,
        where=_where,
    )


def _python(function: Any) -> types.FunctionType | None:
    found = getattr(function, "fn", None)
    return found if isinstance(found, types.FunctionType) else None


def _scope(function: Any, gl: Any, copies: _Copies, scopes: dict[str, Any]) -> dict[str, Any]:
    """Return a function's globals with Gluon, and the jit functions of ours, replaced."""
    if function.__module__ in scopes:
        found: dict[str, Any] = scopes[function.__module__]
        return found
    scope = scopes[function.__module__] = dict(function.__globals__)
    scope["gl"] = gl
    scope["copy"] = copies.copy
    scope["barrier"] = lambda: None
    scope["range"] = _range
    scope["async_copy"] = types.SimpleNamespace(commit_group=copies.commit, wait_group=copies.wait)
    for name, value in function.__globals__.items():
        inner = _python(value)
        if inner is not None and "gl" in inner.__globals__:
            inside = _scope(inner, gl, copies, scopes)
            scope[name] = types.FunctionType(inner.__code__, inside, name, inner.__defaults__)
    return scope


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        memory = value.view(torch.uint8) if value.dim() == 1 else value.view(-1).view(torch.uint8)
        return Pointer(memory.numpy(), _KINDS[value.dtype], 0)
    return value


def run(kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Run every program of a grid, each in a thread of its own.

    Args:
        kernel: a `gluon.jit` function.
        programs: of the grid.
        arguments: by name; tensors are contiguous and on the CPU, or None.
        constants: by name.

    Raises:
        AssertionError: a program read or stored out of bounds, or still waits after a minute.
    """
    outer = _python(kernel)
    assert outer is not None
    given = {name: _argument(value) for name, value in arguments.items()}
    given = {n: Value(np.int32(v)) if isinstance(v, int) else v for n, v in given.items()}
    failed: list[BaseException] = []

    def program(place: int) -> None:
        scope = _scope(outer, _language(place, programs), _Copies(), {})
        try:
            # -inf - -inf and overflow are a GPU's to ignore.
            with np.errstate(all="ignore"):
                types.FunctionType(outer.__code__, scope)(**given, **constants)
        except (AssertionError, TypeError, ValueError, AttributeError, IndexError) as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # programs that wait give way to those they wait for
    try:
        threads = [
            threading.Thread(target=program, args=(i,), daemon=True) for i in range(programs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS)
    finally:
        sys.setswitchinterval(before)
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "programs wait for each other"
