"""Find the code of kernels that nothing chooses: ``python -m tuning.unchosen``.

Every selection is asked, on cards that have tables and on cards that have none: of the products of
4- and 8-bit weights all shapes of the tables, and a sweep over N, K, formats and numbers of tokens
(``--wide``: known models' products, too); of the other ops the lists of what is compiled ahead of
time, whose tiles are the tables' and the rules'. Each call runs its launcher on tensors without
memory, and the constants of its launch are followed through the kernel's branches
(:mod:`.jit_paths`). Printed are

- statements of jit functions that no such launch compiles, and functions that none calls;
- flags of tiles that have one value in all that is chosen: no choice at all.

What `taut tune` may try counts as chosen where that tile won on some shape and stands in a table.
Exit 1 where something is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

import taut_kernels
from taut_bench import model_sizes
from taut_bench.instruments import aot
from taut_bench.instruments.forms import scaled_mm as scaled_mm_forms
from taut_bench.instruments.forms import w4a16 as w4a16_forms
from taut_bench.instruments.recorder import pretended
from taut_kernels.gemm.scaled_mm import lookup as scaled_mm
from taut_kernels.gemm.scaled_mm.tile import OPS, ScaledMmTile
from taut_kernels.gemm.w4a16 import decode_tile, dispatch, lookup
from taut_kernels.gemm.w4a16.plan import Call
from taut_kernels.gemm.w4a16.weight_format import DEFAULT
from taut_kernels.launch.tile_tables import Table
from taut_kernels.tuner.w4a16_candidates import Product, candidates
from tuning.jit_paths import Paths, statements

CARDS: tuple[tuple[str | None, str], ...] = (
    ("NVIDIA H200", "sm_90"),
    ("NVIDIA H100 80GB HBM3", "sm_90"),
    (None, "sm_90"),
    (None, "sm_80"),
)
"""Name, None of one that nobody measured, and architecture."""
_SWEPT = (48, 64, 192, 576, 4160, 28672)
"""N and K of shapes in no table: narrow, short, odd and large ones."""
_GROUPS = (0, 32, 64, 128)
_ELEMENTS = (torch.bfloat16, torch.float16)
"""Without and with zero points."""
_MOST_TRIED = 6
"""Tiles of the model that `taut tune` is asked for."""
_META = torch.device("meta")
_SOURCE = str(Path(taut_kernels.__file__).parent)
_MEASURING = "taut_kernels.tuner.timing"
"""Measures copies; its kernel belongs to no op."""
Launch = tuple[Any, dict[str, Any], Any]
"""A kernel, the constants it is compiled with, and the tile it is launched for."""
Shape = tuple[int, int]
"""N and K."""


def _shapes(measured: Iterable[Shape], odd: Sequence[int], *, wide: bool) -> list[Shape]:
    """Return measured shapes, swept ones (K of these in ``odd``, too) and, wide, models'."""
    found = dict.fromkeys((*measured, *itertools.product(_SWEPT, (*_SWEPT, *odd))))
    return list(found | dict.fromkeys(model_sizes.every_product(64) if wide else ()))


def _whole(tile: Any) -> Any:
    return dataclasses.replace(tile, split_k=1) if hasattr(tile, "split_k") else tile


def w4a16_choices(
    gpu: str | None, target: str, *, wide: bool = False
) -> dict[tuple[Any, ...], Call]:
    """Ask the selection of `taut::w4a16_gemm` on one card.

    Args:
        gpu: its name, None of one that has no tables.
        target: its architecture.
        wide: of known models' shapes, too.

    Returns:
        Tile (or ``"dense"``), group size, zero points, and whether K is a whole number of long
        steps → a call that takes it.
    """
    found: dict[tuple[Any, ...], Call] = {}
    tables: list[Table[Any, Any]] = [*lookup.tables().values(), *decode_tile.tables().values()]
    won = {_whole(tile) for table in tables for tile in table.choices.values()}
    shapes = _shapes((key[:2] for table in tables for key in table.choices), (), wide=wide)
    formats = tuple(itertools.product(_GROUPS, (False, True)))
    with pretended(target, gpu):
        for (N, K), M in itertools.product(shapes, (1, *lookup.ONE_OF_EACH)):
            if K % 64:
                continue
            tried = candidates(Product(N, K, DEFAULT), M, _MOST_TRIED, _META)
            of_tuner = [choice for choice in tried if _whole(choice) in won]
            for group, zeros in formats:
                if group and K % group:
                    continue
                call = Call(M, N, K, group or K, _ELEMENTS[zeros], _META, zeros, bool(group))
                for tile in (dispatch.chosen(call), *of_tuner):
                    found.setdefault((tile, group, zeros, K % 2048 == 0), call)
    return found


def _run_w4a16(tile: Any, call: Call) -> None:
    form = w4a16_forms.Format(call.dtype, call.has_zeros, call.group)
    x = torch.empty(call.M, call.K, dtype=call.dtype, device=_META)
    weight = w4a16_forms.operands(call.N, call.K, form)
    if not call.has_bias:
        weight = weight._replace(bias=None)
    dispatch.launch(tile, x, *weight, call.group_size)


def scaled_mm_choices(
    gpu: str | None, *, wide: bool = False
) -> dict[tuple[str, ScaledMmTile, bool], None]:
    """Ask the selection of the 8-bit products on one card.

    Args:
        gpu: its name, None of one that has no tables.
        wide: as of :func:`w4a16_choices`.

    Returns:
        Op, tile, and whether the tile's steps divide K.
    """
    found: dict[tuple[str, ScaledMmTile, bool], None] = {}
    measured = [(N, K) for table in scaled_mm.tables().values() for _, N, K in table.choices]
    shapes = _shapes((*measured, (4100, 4096)), (4112,), wide=wide)
    for op, (N, K), in_layer in itertools.product(OPS, shapes, (False, True)):
        for bucket in scaled_mm.buckets(op, gpu, N, K, in_layer=in_layer):
            tile = bucket.tile
            found[op, tile, K % (tile.block_k * tile.split_k) == 0] = None
    return found


def _runs_of_8_bits(op: str, tile: ScaledMmTile, even_k: bool) -> Iterator[Callable[[], object]]:
    points = ((False, False), (True, False), (True, True)) if op == "w8a8_gemm" else ((False,) * 2,)
    for has_azp_adj, has_azp in points:
        named = {"even_k": even_k, "has_azp_adj": has_azp_adj, "has_azp": has_azp}
        yield scaled_mm_forms.call(op, tile, (), **named).run


def chosen_launches(*, wide: bool = False) -> Iterator[Launch]:
    """Run what the products' selections choose, and yield what is launched.

    Args:
        wide: as of :func:`w4a16_choices`.
    """
    for gpu, target in CARDS:
        chosen = w4a16_choices(gpu, target, wide=wide)
        with pretended(target, gpu) as launches:
            for (tile, *_), call in chosen.items():
                launches.clear()
                _run_w4a16(tile, call)
                yield from ((one.kernel, one.constants, tile) for one in launches)
            for op, eight, even_k in scaled_mm_choices(gpu, wide=wide):
                if target == "sm_80" and op != "w8a8_gemm":
                    continue  # e4m3 wants sm_89
                for run in _runs_of_8_bits(op, eight, even_k):
                    launches.clear()
                    run()
                    yield from ((one.kernel, one.constants, eight) for one in launches)


def listed_launches() -> Iterator[Launch]:
    """Yield what ops that are no products of quantised weights are compiled with ahead of time."""
    others = (family for family in aot.FAMILIES if family not in (w4a16_forms, scaled_mm_forms))
    for one in itertools.chain.from_iterable(family.kernel_variants() for family in others):
        yield one.kernel, one.constants, one.tile
        if "ASM" in one.constants:  # Triton's interpreter has no inline assembly
            yield one.kernel, one.constants | {"ASM": False}, one.tile


def _jit_functions() -> set[JITFunction[Any]]:
    """Return every jit function of the package that runs for an op."""
    found = set()
    for module in pkgutil.walk_packages(taut_kernels.__path__, "taut_kernels."):
        if module.name.startswith("taut_kernels.vllm_plugin") or module.name == _MEASURING:
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction) and value.file_name.startswith(_SOURCE):
                found.add(value)
    return found


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Unreached:
    """Statements of a jit function that no form compiles.

    Attributes:
        file: inside the package.
        function: its name.
        lines: first lines of the statements; all of them where none is reached.
        cost: how many lines they have.
    """

    file: str
    function: str
    lines: tuple[int, ...]
    cost: int

    def __str__(self) -> str:
        where = ", ".join(map(str, self.lines))
        return f"{self.file} {self.function}: {self.cost} lines ({where})"


def unreached(paths: Paths) -> list[Unreached]:
    """Return what of the package's jit functions nothing reaches."""
    found = []
    for function in _jit_functions():
        known = statements(function)
        left = {line: cost for line, cost in known.items() if line not in paths.reached[function]}
        if left:
            file = str(Path(function.file_name).relative_to(_SOURCE))
            name, lines = function.__name__, tuple(sorted(left))
            found.append(Unreached(file, name, lines, sum(left.values())))
    return sorted(found)


def idle_flags(tiles: Iterable[Any]) -> list[str]:
    """Return the flags of tiles that have one value in everything chosen.

    Args:
        tiles: of any classes; what is no dataclass has no fields.
    """
    values: dict[str, set[Any]] = defaultdict(set)
    for tile in tiles:
        for field in dataclasses.fields(tile) if dataclasses.is_dataclass(tile) else ():
            if isinstance(value := getattr(tile, field.name), bool):
                values[f"{type(tile).__name__}.{field.name}"].add(value)
    single = {name: some for name, some in sorted(values.items()) if len(some) == 1}
    return [f"{name} is always {one!r}" for name, (one,) in single.items()]


def ask(*, wide: bool = False) -> tuple[list[Unreached], list[str]]:
    """Ask every selection.

    Args:
        wide: as of :func:`w4a16_choices`.

    Returns:
        Statements that nothing reaches, and flags that choose nothing.
    """
    paths, tiles = Paths(), set[Any]()
    for kernel, constants, tile in itertools.chain(chosen_launches(wide=wide), listed_launches()):
        paths.walk(kernel, constants)
        tiles.add(tile)
    return unreached(paths), idle_flags(tiles)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    summary = __doc__.splitlines()[0] if __doc__ else ""
    parser = argparse.ArgumentParser(prog="python -m tuning.unchosen", description=summary)
    parser.add_argument("--wide", action="store_true", help="known models' products, too")
    statements_left, flags_left = ask(wide=parser.parse_args(argv).wide)
    for line in (*map(str, statements_left), *flags_left):
        sys.stdout.write(line + "\n")
    cost = sum(one.cost for one in statements_left)
    sys.stdout.write(f"{cost} lines that nothing compiles, {len(flags_left)} idle flags\n")
    return 1 if statements_left or flags_left else 0


if __name__ == "__main__":
    sys.exit(main())
