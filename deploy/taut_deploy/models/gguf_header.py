"""The header of a GGUF file, read with bounds: nothing in it is believed before it is checked.

Layout (GGUF versions 2 and 3, little endian): magic, version, number of tensors, number of
metadata entries; the entries (key, type, value); per tensor its name, dimensions, type and offset;
padding; the tensors' data. Counts and lengths are compared with what is left of the file before
anything of that size is read or kept, so a header costs time and memory by the bytes it has.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from taut_deploy.errors import ModelError

_T = TypeVar("_T")

MAX_ENTRIES = 65_536
"""Of metadata entries and of tensors, each; the largest files known have some thousands."""
MAX_ARRAY = 1 << 20
"""Elements of all arrays together are at most four times this, of one array this; the largest
vocabularies have about 2**18 tokens and twice as many merges."""

_MAX_KEY = 65_535
_MAX_TENSOR_NAME = 64
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as the header declares it.

    Attributes:
        name: in GGUF's naming.
        shape: dimensions in GGUF's order, the innermost first.
        kind: number of the ggml type.
        offset: from the start of the data, bytes.
        size: bytes of its data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A checked header.

    Attributes:
        metadata: scalars and strings by key; of an array its length.
        tensors: by name, in the file's order.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """``general.architecture``; empty where it is missing or no text."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    @property
    def elements(self) -> int:
        """Values of all tensors together."""
        return sum(tensor.elements for tensor in self.tensors.values())


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of ``path``.

    Raises:
        ModelError: no such file, not a GGUF, cut short, or a count, length, type, offset or
            alignment in it cannot be.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    with path.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (its first bytes are not 'GGUF')")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).header()


class _Reader:
    """A position in the file; every read is checked against what is left."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._size = len(content)
        self._at = 4
        self._array_elements = 0

    def header(self) -> GgufHeader:
        version = self._number("I", "version")
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            reason = "big endian" if big_endian else f"version {version}"
            raise self._error(f"{reason}; only little-endian versions 2 and 3 are read")
        tensor_count = self._count("tensors", "Q", MAX_ENTRIES, _MIN_TENSOR_BYTES)
        entry_count = self._count("metadata entries", "Q", MAX_ENTRIES, _MIN_ENTRY_BYTES)
        metadata = self._named(entry_count, self._entry, "metadata key")
        tensors = self._named(tensor_count, self._tensor, "tensor")
        self._check_places(tensors, _alignment(metadata, self._error))
        return GgufHeader(metadata, tensors)

    def _named(self, count: int, read: Callable[[], tuple[str, _T]], what: str) -> dict[str, _T]:
        found: dict[str, _T] = {}
        for _ in range(count):
            name, value = read()
            if name in found:
                raise self._error(f"the {what} {name!r} is there twice")
            found[name] = value
        return found

    def _entry(self) -> tuple[str, Any]:
        key = self._text("a metadata key", _MAX_KEY)
        kind = self._number("I", f"the type of {key!r}")
        return key, self._value(kind, key)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind == _STRING:
            return self._text(key, self._size)
        if kind == _ARRAY:
            return self._array(key)
        raise self._error(f"{key!r} has the unknown type {kind}")

    def _array(self, key: str) -> int:
        """Walk over an array; arrays in arrays are refused, no architecture has them."""
        kind = self._number("I", f"the element type of {key!r}")
        if kind not in _SCALARS and kind != _STRING:
            raise self._error(f"{key!r} is an array of the type {kind}, which is not read")
        each = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
        count = self._count(f"elements of {key!r}", "Q", MAX_ARRAY, each)
        self._array_elements += count
        if self._array_elements > 4 * MAX_ARRAY:
            raise self._error(f"more than {4 * MAX_ARRAY} elements in its arrays")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q", key), key)
        else:
            self._skip(count * each, key)
        return count

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._text("a tensor's name", _MAX_TENSOR_NAME)
        dimensions = self._number("I", f"the dimensions of {name!r}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"the tensor {name!r} has {dimensions} dimensions, not 1 to 4")
        shape = tuple(self._number("Q", f"the shape of {name!r}") for _ in range(dimensions))
        kind = self._number("I", f"the type of {name!r}")
        offset = self._number("Q", f"the offset of {name!r}")
        return name, GgufTensor(name, shape, kind, offset, self._bytes_of(name, shape, kind))

    def _bytes_of(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise self._error(f"the tensor {name!r} has the unknown type {kind}") from error
        if min(shape) < 1 or shape[0] % block:
            raise self._error(f"the tensor {name!r} has the shape {shape} in blocks of {block}")
        return int(math.prod(shape) // block * block_bytes)

    def _check_places(self, tensors: dict[str, GgufTensor], alignment: int) -> None:
        start = -(-self._at // alignment) * alignment
        free = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset % alignment or tensor.offset < free:
                raise self._error(
                    f"the tensor {tensor.name!r} starts at {tensor.offset}, inside another or "
                    f"off the alignment of {alignment}"
                )
            free = tensor.offset + tensor.size
            if start + free > self._size:
                raise self._error(
                    f"it is cut short: the tensor {tensor.name!r} ends at byte {start + free} of "
                    f"{self._size}; fetch the file again"
                )

    def _count(self, what: str, code: str, most: int, each: int) -> int:
        """A number of things of at least ``each`` bytes, which must fit into the rest."""
        count = int(self._number(code, what))
        if count > most or count * each > self._size - self._at:
            raise self._error(f"{count} {what} cannot be in a file of {self._size} bytes")
        return count

    def _text(self, what: str, most: int) -> str:
        length = self._number("Q", what)
        start = self._at
        if length > most:
            raise self._error(f"{what} of {length} bytes")
        self._skip(length, what)
        try:
            return self._content[start : self._at].decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8") from error

    def _number(self, code: str, what: str) -> Any:
        start = self._at
        self._skip(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self._content, start)[0]

    def _skip(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            raise self._error(f"it is cut short inside {what}")
        self._at += count

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self._path}: not a GGUF that can be read: {reason}")


def _alignment(metadata: dict[str, Any], error: Callable[[str], ModelError]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    powers = type(value) is int and 8 <= value <= _MAX_ALIGNMENT and value & (value - 1) == 0
    if not powers:
        raise error(
            f"general.alignment is {value!r}, not a power of two from 8 to {_MAX_ALIGNMENT}"
        )
    return int(value)
