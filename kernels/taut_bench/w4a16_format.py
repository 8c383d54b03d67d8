"""The 4-bit formats `bench.w4a16` draws layers in, how a command picks some, and their files.

The format most figures are of (:data:`DEFAULT`) is written to ``w4a16.csv`` as it always was. Every
other has files of its own, whose rows end in the columns :data:`COLUMNS` and whose kernels bear the
format behind their names: the table that layers are given to kernels by takes ``taut`` alone for
ours (:mod:`.measured_table`), and no figure of another format must come into it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from taut_bench import report, shapes
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.gemm.w4a16 import weight_format

NAME = "w4a16"
GROUP_SIZE = 128
"""Where no command line names one."""
COLUMNS = ("group_size", "zero_points", "dtype")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CHANNEL = -1
_GROUPS = {**{str(size): size for size in w4a16.GROUP_SIZES}, "channel": CHANNEL}


@dataclass(frozen=True, slots=True)
class Format:
    """How a layer's weights are stored, and in what type its activations are.

    Attributes:
        group_size: weights a scale covers along K, -1 for one group a channel.
        zero_points: with one a group, else symmetric.
        dtype: a key of :data:`DTYPES`: of activations and scales.
    """

    group_size: int = GROUP_SIZE
    zero_points: bool = False
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """Short, for a table: ``g32 zp bf16``."""
        group = "channel" if self.group_size == CHANNEL else f"g{self.group_size}"
        return " ".join([group, *(["zp"] if self.zero_points else []), self.dtype])

    @property
    def file_name(self) -> str:
        """Of its results, without an ending."""
        return NAME if self == DEFAULT else f"{NAME}-{self.name.replace(' ', '-')}"

    @property
    def weights(self) -> weight_format.WeightFormat:
        """The class of it that tiles are looked up by."""
        return weight_format.of_layer(self.group_size, 0, has_zeros=self.zero_points)

    def cells(self) -> tuple[str, str, str]:
        """Return what a row has under :data:`COLUMNS`."""
        group = "channel" if self.group_size == CHANNEL else str(self.group_size)
        return group, "yes" if self.zero_points else "no", self.dtype

    def kernel(self, name: str) -> str:
        """Return the name of a kernel in this format's rows."""
        return name if self == DEFAULT else f"{name} {self.name}"


DEFAULT = Format()


def _group_sizes(text: str) -> list[int]:
    return [_GROUPS[name] for name in shapes.some_of(text, _GROUPS)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--group-size``, ``--zero-points`` and ``--dtype`` to a benchmark's command line."""
    parser.add_argument(
        "--group-size",
        action="extend",
        type=_group_sizes,
        metavar="G,…",
        help=f"weights a scale covers: {', '.join(_GROUPS)}; {GROUP_SIZE} where none is named",
    )
    parser.add_argument("--zero-points", action="store_true", help="zero points, else symmetric")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default=DEFAULT.dtype, help="of the activations"
    )


def add_tuned_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--group-size`` and ``--zero-points`` to a tuner's command line: one format a run."""
    parser.add_argument(
        "--group-size",
        type=int,
        choices=w4a16.GROUP_SIZES,
        default=GROUP_SIZE,
        help="weights a scale covers",
    )
    parser.add_argument("--zero-points", action="store_true", help="zero points, else symmetric")


def tuned(arguments: argparse.Namespace) -> Format:
    """Return the format a tuner's command line asks for.

    Args:
        arguments: parsed, with what :func:`add_tuned_arguments` added.
    """
    return Format(arguments.group_size, arguments.zero_points)


def tuner(module: str, given: Format) -> str:
    """Return how a table's source names the command that tuned a format."""
    words = "" if given.group_size == GROUP_SIZE else f" --group-size {given.group_size}"
    return f"python -m {module}{words}{' --zero-points' if given.zero_points else ''}"


def chosen(arguments: argparse.Namespace, products: Mapping[str, tuple[int, int]]) -> list[Format]:
    """Return the formats a command line asks for.

    Args:
        arguments: parsed, with what :func:`add_arguments` added.
        products: name → (N, K) of those to be measured.

    Raises:
        ValueError: our kernels do not take one of them on one of the products; says why.
    """
    groups = dict.fromkeys(arguments.group_size or [DEFAULT.group_size])
    found = [Format(group, arguments.zero_points, arguments.dtype) for group in groups]
    for one in found:
        for name, (N, K) in products.items():
            reason = w4a16.why_not_supported(N, K, one.group_size, DTYPES[one.dtype])
            if reason:
                raise ValueError(f"{one.name} on {name}: {reason}")
    return found


def write(
    rows: Sequence[report.Row], notes: Sequence[str], ceiling: float, directory: Path, given: Format
) -> None:
    """Write a format's CSV and Markdown.

    Args:
        rows: every measured cell, kernels by their plain names.
        notes: what was not measured, and why.
        ceiling: copy rate of the card, bytes a second.
        directory: made if missing.
        given: the rows' format.

    Raises:
        OSError: they cannot be written.
    """
    if given == DEFAULT:
        report.write(rows, notes, ceiling, directory, NAME)
        return
    named = [replace(row, kernel=given.kernel(row.kernel)) for row in rows]
    notes = [f"every row: {_in_words(given)}", *notes]
    more = dict(zip(COLUMNS, given.cells(), strict=True))
    report.write(named, notes, ceiling, directory, given.file_name, more)


def _in_words(given: Format) -> str:
    group, zero_points, dtype = given.cells()
    groups = "one group a channel" if group == "channel" else f"groups of {group}"
    return f"{groups}, {'zero points' if zero_points == 'yes' else 'symmetric'}, {dtype}"
