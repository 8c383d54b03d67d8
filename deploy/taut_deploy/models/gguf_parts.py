"""A GGUF that is split over several files, joined into one.

Layout: ``llama-gguf-split`` of llama.cpp names parts ``NAME-00001-of-00003.gguf``. Each is a GGUF
of its own with some of the tensors, and ``split.no`` (from 0), ``split.count`` and
``split.tensors.count`` among its metadata; the first has the model's metadata.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taut_deploy.errors import ModelError
from taut_deploy.files import digest_of_hashes, require_free_space, sha256_files
from taut_deploy.models.gguf_header import GgufHeader, read_header

_NAMED = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
_OF_SPLIT = "split."
# Of the reader's own making, and what a writer writes by itself.
_NOT_COPIED = ("GGUF.", _OF_SPLIT, "general.architecture")


def stem_of(path: Path) -> str:
    """What a file is called without the number of its part."""
    match = _NAMED.fullmatch(path.stem)
    return path.stem if match is None else match["name"]


def parts_of(path: Path) -> list[Path]:
    """All parts of the model that a file belongs to, in order; the file alone if it is whole.

    Args:
        path: any of the parts.

    Raises:
        ModelError: it is no GGUF, or a part of another name or number than its metadata says, or
            a part is missing.
    """
    header = read_header(path)
    count = _split(header, "count", 1)
    if count in (0, 1):
        return [path]
    match = _NAMED.fullmatch(path.stem)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{path}: is part of a model split into {count} files (split.count), which are called "
            f"NAME-00001-of-{count:05}.gguf and so on; give the parts their names back"
        )
    parts = [
        path.with_name(f"{match['name']}-{number + 1:05}-of-{match['count']}{path.suffix}")
        for number in range(count)
    ]
    for number, part in enumerate(parts):
        if not part.is_file():
            raise ModelError(f"{part}: is missing; fetch all {count} parts into one directory")
        found = read_header(part)
        numbers = (_split(found, "no", -1), _split(found, "count", 1))
        if numbers != (number, count):
            raise ModelError(
                f"{part}: says it is part {numbers[0] + 1} of {numbers[1]} (split.no, split.count)"
            )
    return parts


def digest_of_parts(path: Path) -> str:
    """``sha256:`` of a file, or of all parts of the model that it belongs to.

    Raises:
        ModelError: see :func:`parts_of`.
    """
    hashes = {part.name: found for part, found in sha256_files(parts_of(path)).items()}
    return f"sha256:{hashes[path.name]}" if len(hashes) == 1 else digest_of_hashes(hashes)


def join_parts(parts: Sequence[Path], target: Path) -> None:
    """Write one GGUF of all parts.

    Args:
        parts: of :func:`parts_of`, more than one.
        target: file to make.

    Raises:
        ModelError: a tensor is there twice, or tensors are missing.
        OutputError: the disk has too little room.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    headers = [read_header(part) for part in parts]
    _require_whole(parts, headers)
    require_free_space(
        target.parent, sum(part.stat().st_size for part in parts), "set TAUT_HOME to another disk"
    )
    readers = [GGUFReader(part) for part in parts]
    writer = GGUFWriter(target, headers[0].architecture)
    writer.data_alignment = readers[0].alignment
    for field in readers[0].fields.values():
        if not field.name.startswith(_NOT_COPIED):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    tensors: list[Any] = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def _require_whole(parts: Sequence[Path], headers: Sequence[GgufHeader]) -> None:
    place: dict[str, Path] = {}
    for part, header in zip(parts, headers, strict=True):
        for name in header.tensors:
            if name in place:
                raise ModelError(f"{part}: holds the tensor {name}, which {place[name]} holds too")
            place[name] = part
    declared = _split(headers[0], "tensors.count", len(place))
    if declared != len(place):
        raise ModelError(
            f"{parts[0]}: split.tensors.count is {declared}, its parts hold {len(place)}; fetch "
            "them again"
        )


def _split(header: GgufHeader, key: str, otherwise: int) -> int:
    value = header.metadata.get(_OF_SPLIT + key, otherwise)
    return value if type(value) is int else otherwise
