"""Embeddings and head in 8 or 4 bits: tables with one row for every token of the vocabulary.

They are stored as compressed-tensors' ``pack-quantized`` stores a linear layer. Tied ones are one
table, stored once under the name of the embeddings. Rows are rounded to the nearest; the blocks
after them are calibrated on what the rounded embeddings give.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.formats.integer import PackedIntegerFormat
from taut_deploy.compress.formats.protocol import LayerFormat, TautFormat
from taut_deploy.compress.formats.registry import largest_dividing, weights_alone
from taut_deploy.compress.quantize import rtn
from taut_deploy.compress.threads import single_thread
from taut_deploy.errors import CheckpointError, RecipeError
from taut_deploy.recipe import Recipe, Table

# Of a table that is rounded at a time: fp32 copies of it are a multiple of the table otherwise.
_NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class TokenTable:
    """One stored table.

    Args:
        keys: of the recipe that ask for it: ``embeddings``, ``head``, or both where they are tied.
        names: of the modules that use it, in the order of ``keys``; it is stored under the first.
        shape: [V, H], a row for each token.
        format: what it is stored in.
        dtype: of the model's weights, which readers dequantise it to.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, int]
    format: PackedIntegerFormat
    dtype: torch.dtype

    @property
    def bytes_before(self) -> int:
        """Of the table in the model."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Of the table on disk."""
        return self.format.stored_bytes(*self.shape)

    def planned(self) -> "TablePlan":
        """What a plan says of it."""
        stored = self.format
        what = " and ".join(self.keys)
        return TablePlan(
            what, self.shape, stored.bits, stored.group_size, self.bytes_before, self.bytes
        )


@dataclass(frozen=True)
class TablePlan:
    """What happens to one table.

    Args:
        name: what uses it: ``embeddings``, ``head``, or ``embeddings and head``.
        shape: [V, H].
        bits: of a number.
        group_size: numbers a scale covers, None for a row.
        bytes_before: in the model.
        bytes: on disk.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    group_size: int | None
    bytes_before: int
    bytes: int


@dataclass(frozen=True)
class RoundedTable:
    """A table as it will be written.

    Args:
        table: which.
        tensors: by name inside its module.
        relative_error: square of what changed over the square of the table.
    """

    table: TokenTable
    tensors: dict[str, torch.Tensor]
    relative_error: float

    def as_json(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {**asdict(self.table.planned()), "relative_error": self.relative_error}


def tables_of(
    model: Any, recipe: Recipe, dtype: torch.dtype, formats: Iterable[LayerFormat] = ()
) -> tuple[TokenTable, ...]:
    """The tables that a recipe has stored in few bits.

    Args:
        model: of transformers, its ties made, its weights not needed.
        recipe: what to do.
        dtype: of the model's weights.
        formats: of the layers in the blocks.

    Raises:
        RecipeError: the model has no such table, or none that can be stored so; names the key.
    """
    asked = recipe.tables
    if not asked:
        return ()
    if (own := next((one for one in formats if isinstance(one, TautFormat)), None)) is not None:
        raise RecipeError(
            f"{next(iter(asked))}: is stored by compressed-tensors, {own.name} layers by taut's "
            "own method, but a checkpoint has one; leave it out"
        )
    modules = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    wanted: dict[str, type] = {"embeddings": nn.Embedding, "head": nn.Linear}
    for key in asked:
        if not isinstance(modules[key], wanted[key]):
            raise RecipeError(
                f"{key}: {model.config.model_type!r} models have no plain one; leave it out"
            )
    if getattr(modules["head"], "weight", None) is modules["embeddings"].weight:
        _require_alike(asked)
        return (_table(model, modules, ("embeddings", "head"), asked["head"], dtype),)
    return tuple(_table(model, modules, (key,), table, dtype) for key, table in asked.items())


def _require_alike(asked: Mapping[str, Table]) -> None:
    """Refuse tied embeddings of which the head, or only the head, is another table."""
    if len(asked) == 2 and asked["embeddings"] == asked["head"]:
        return
    other = "embeddings" if "embeddings" not in asked else "head"
    raise RecipeError(
        f"{other}: this model's embeddings and head are one table (tie_word_embeddings), stored "
        "once, so give 'embeddings' and 'head' alike, or neither"
    )


def _table(
    model: Any,
    modules: Mapping[str, Any],
    keys: tuple[str, ...],
    asked: Table,
    dtype: torch.dtype,
) -> TokenTable:
    rows, width = modules[keys[0]].weight.shape
    group = asked.largest_group
    if group is not None and (group := largest_dividing(group, [width])) is None:
        raise RecipeError(
            f"{keys[0]}.group_size: none of 128, 64, 32 up to {asked.largest_group} divides its "
            f"width of {width}; 'channel' has one scale a row"
        )
    if width % (in_word := 32 // asked.bits):
        raise RecipeError(
            f"{keys[0]}: a row of {width} numbers is no whole words of {in_word}; leave it out"
        )
    stored = weights_alone(asked.bits, group, dtype)
    named = {id(module): name for name, module in model.named_modules()}
    names = tuple(named[id(modules[key])] for key in keys)
    return TokenTable(keys, names, (rows, width), stored, dtype)


def round_tables(model: Any, tables: Iterable[TokenTable]) -> list[RoundedTable]:
    """Round tables, and let the model compute with what is left of them.

    Args:
        model: its embeddings and head loaded.
        tables: of :func:`tables_of`.

    Raises:
        CheckpointError: what was packed does not read back.
    """
    return [_rounded(model, table) for table in tables]


def _rounded(model: Any, table: TokenTable) -> RoundedTable:
    weight = model.get_submodule(table.names[0]).weight.data
    left = torch.empty_like(weight)
    step = max(1, _NUMBERS_AT_ONCE // table.shape[1])
    parts: list[dict[str, torch.Tensor]] = []
    lost = whole = 0.0
    for start in range(0, table.shape[0], step):
        rows = slice(start, start + step)
        with single_thread():
            exact = weight[rows].float()
            codes = rtn.quantize_weight(exact, table.format.spec)
            packed = table.format.pack(codes)
            meant = codes.dequantize()
            if not torch.equal(table.format.unpack(packed).dequantize(), meant):
                raise CheckpointError(
                    f"{table.names[0]}: what was packed does not read back; nothing was written"
                )
            left[rows] = meant.to(table.dtype).to(weight.dtype)
            lost += float((meant - exact).double().square().sum())
            whole += float(exact.double().square().sum())
        parts.append({name: tensor.cpu() for name, tensor in packed.items()})
    shared = nn.Parameter(left, requires_grad=False)
    for name in table.names:
        model.get_submodule(name).weight = shared
    tensors = {
        name: torch.cat([part[name] for part in parts])
        for name in ("weight_packed", "weight_scale")
    }
    tensors["weight_shape"] = torch.tensor(table.shape, dtype=torch.int64)
    return RoundedTable(table, tensors, lost / max(whole, 1e-20))
