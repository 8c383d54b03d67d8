"""Block values, pointers and shared memory of a Gluon kernel that runs on NumPy.

See :mod:`emulator.gluon`.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

POISON = np.int32(0x7FC17FC1)
"""A NaN in fp32, and two in bf16 and fp16 (0x7FC1 has all exponent bits of either)."""


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


class Tensor(np.ndarray):
    """A block value: an array with the methods of `gl.tensor` that kernels use."""

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        """Convert to a NumPy type; 16-bit floats are rounded and stay fp32."""
        if kind in ("bf16", "f16"):
            return block(floats(rounded(self, kind), kind))
        return self.astype(kind)

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other  # Triton makes a new value, which may be larger


def block(value: Any) -> Any:
    """Make a block value of an array."""
    return np.asarray(value).view(Tensor)


@dataclass
class Pointer:
    """A tensor's memory and an offset, in elements, for every element of a block."""

    memory: Any  # 1-D; bf16 as uint16, e4m3 as uint8
    kind: Any  # "bf16", "f16", "e4m3" or a NumPy type
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        """The pointer's type, of which kernels ask what it points at."""
        return types.SimpleNamespace(element_ty=self.kind)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.kind, self.offset + more)

    def to(self, kind: Any, bitcast: bool = False) -> Pointer:
        """Read the whole memory as another type; as an address (int64) it stays what it is."""
        if kind is np.int64:
            return self
        assert np.all(self.offset == 0)
        return Pointer(self.memory.view(kind), kind)

    @staticmethod
    def of(tensor: torch.Tensor) -> Pointer:
        """Point at a CPU tensor, whose memory, to its end, the kernel then changes."""
        kinds = {torch.bfloat16: "bf16", torch.float16: "f16"}
        kind: Any = kinds.get(tensor.dtype)
        if tensor.is_contiguous():
            flat = tensor.view(-1)
        else:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            flat = tensor.as_strided((size - tensor.storage_offset(),), (1,))
        if tensor.dtype is torch.float8_e4m3fn:
            return Pointer(flat.view(torch.uint8).numpy(), "e4m3")
        if kind is None:
            memory = flat.numpy()
            return Pointer(memory, memory.dtype.type)
        return Pointer(flat.view(torch.int16).numpy().view(np.uint16), kind)


def floats(bits: Any, kind: str) -> Any:
    """Read patterns of 16 bits, or of 8, as fp32."""
    if kind == "e4m3":
        return _E4M3[np.asarray(bits)]
    if kind == "bf16":
        return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(bits).astype(np.uint16).view(np.float16).astype(np.float32)


def rounded(values: Any, kind: str) -> Any:
    """Round fp32 to 16-bit patterns, to nearest even."""
    if kind == "bf16":
        tensor = torch.from_numpy(np.array(values, dtype=np.float32))
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return np.asarray(values, dtype=np.float32).astype(np.float16).view(np.uint16)


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Any:
    """Stand in for `gl.load`; refuses addresses out of bounds."""
    index = np.asarray(pointer.offset)
    allowed = np.ones_like(index, bool) if mask is None else np.broadcast_to(mask, index.shape)
    assert ((index >= 0) & (index < pointer.memory.size))[allowed].all(), "load out of bounds"
    found = pointer.memory[np.where(allowed, index, 0)]
    if isinstance(pointer.kind, str):
        found = floats(found, pointer.kind)
    return block(np.where(allowed, found, other).astype(found.dtype))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    """Stand in for `gl.store`; refuses addresses out of bounds."""
    index = np.asarray(pointer.offset)
    value = np.broadcast_to(np.asarray(value), index.shape)
    allowed = np.ones_like(index, bool) if mask is None else np.broadcast_to(mask, index.shape)
    assert ((index >= 0) & (index < pointer.memory.size))[allowed].all(), "store out of bounds"
    if isinstance(pointer.kind, str):
        value = rounded(value, pointer.kind)
    pointer.memory[index[allowed]] = value[allowed]


def atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> int:
    """Stand in for `gl.atomic_add` of one number."""
    assert (sem, scope) == ("acq_rel", "gpu")
    before = int(pointer.memory[pointer.offset])
    pointer.memory[pointer.offset] += value
    return before


class Shared:
    """A shared memory descriptor."""

    def __init__(self, memory: Any, dtype: Any = None) -> None:
        self.memory = memory
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' lengths."""
        found: tuple[int, ...] = self.memory.shape
        return found

    def index(self, place: int) -> Shared:
        """Return one place along the first axis, which goes."""
        assert 0 <= place < len(self.memory)
        return Shared(self.memory[int(place)], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Return some places along an axis."""
        assert start + length <= self.memory.shape[dim]
        before = (slice(None),) * dim
        return Shared(self.memory[*before, start : start + length], self.dtype)

    def reshape(self, shape: Any) -> Shared:
        """Return the same memory in another shape."""
        return Shared(self.memory.reshape(shape), self.dtype)

    def permute(self, order: Any) -> Shared:
        """Return the same memory with its axes in another order."""
        return Shared(self.memory.transpose(order), self.dtype)

    def load(self, _layout: Any) -> Any:
        """Return what is there."""
        return block(self.memory.copy())

    def store(self, value: Any) -> None:
        """Put a block there."""
        assert self.memory.shape == value.shape
        self.memory[...] = value


def copy(target: Shared, pointer: Pointer, mask: Any = None, cache_modifier: str = "") -> None:
    """Stand in for `cp.async`, which fills with zeros where its mask is false."""
    assert target.memory.shape == pointer.offset.shape
    target.store(load(pointer, mask))
