"""Durable safetensors files, written from the tensors' own memory."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from taut_deploy.files import replaced_atomically, safetensors_disk_errors

ROWS = "rows"
"""The one tensor of a file of :func:`write_rows`."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors.

    Raises:
        OutputError: the disk is full or refuses.
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replaced_atomically(path) as temporary, safetensors_disk_errors():
        save_file(contiguous, temporary, metadata={"format": "pt"})


def write_rows(path: Path, rows: int, batches: Iterable[torch.Tensor]) -> None:
    """Write one tensor, :data:`ROWS`, of which no more than a batch is in memory.

    Args:
        path: the file.
        rows: of the whole tensor.
        batches: its rows in order, [b, ...] of one float dtype.

    Raises:
        OutputError: the disk is full or refuses.
        ValueError: the batches are not of one dtype and shape, or not ``rows`` together.
    """
    expected: tuple[torch.dtype, torch.Size] | None = None
    written = 0
    with replaced_atomically(path) as temporary, temporary.open("wb") as file:
        for batch in batches:
            row = batch.dtype, batch.shape[1:]
            if expected is None:
                expected = row
                file.write(_header(rows, *row))
            if row != expected:
                raise ValueError(f"{path}: rows of {row} after some of {expected}")
            file.write(batch.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            written += len(batch)
        if written != rows:
            raise ValueError(f"{path}: {written} rows instead of {rows}")


def _header(rows: int, dtype: torch.dtype, row: torch.Size) -> bytes:
    """What precedes the numbers: the length of a JSON text, and that text."""
    size = rows * row.numel() * dtype.itemsize
    entry = {"dtype": _DTYPES[dtype], "shape": [rows, *row], "data_offsets": [0, size]}
    text = json.dumps({ROWS: entry}, allow_nan=False).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text
