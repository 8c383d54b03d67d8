"""What a checkpoint holds outside the blocks, and what its ``config.json`` says of all layers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.formats.config import quantization_config
from taut_deploy.compress.formats.integer import PackedIntegerFormat
from taut_deploy.compress.kv_cache import cache_arguments
from taut_deploy.compress.plan import formats_of
from taut_deploy.compress.resolve import Treatment
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.tables import RoundedTable, TokenTable
from taut_deploy.recipe import Recipe


def outer_tensors(
    stream: StreamedModel, rounded: Iterable[RoundedTable]
) -> dict[str, torch.Tensor]:
    """What a checkpoint holds outside the blocks, by name in a file.

    Args:
        stream: the model.
        rounded: its tables that are not stored as they are.
    """
    stored: dict[str, torch.Tensor] = {}
    replaced: set[str] = set()
    for one in rounded:
        names = one.table.names
        replaced |= {f"{stream.stored_layer(name)}.weight" for name in names}
        stored |= {f"{names[0]}.{part}": tensor for part, tensor in one.tensors.items()}
    dense = {name: stream.read(name) for name in stream.outer_names if name not in replaced}
    return dense | stream.to_stored(stored)


def quantization_entry(
    stream: StreamedModel,
    recipe: Recipe,
    treatments: Mapping[str, Treatment],
    tables: Sequence[TokenTable],
) -> dict[str, Any] | None:
    """``quantization_config`` of the checkpoint; None where nothing is quantised.

    Args:
        stream: the model.
        recipe: of the block stages.
        treatments: of every linear layer of the blocks, by full name.
        tables: embeddings and head where they are not dense.
    """
    formats = formats_of(treatments)
    heads = [table.names[-1] for table in tables if "head" in table.keys]
    # A head that is tied is no layer of the skeleton's files; readers look it up by this name.
    default = [] if heads else ["lm_head"]
    dense = stream.dense_layers([*formats, *heads])
    return quantization_config(
        formats,
        {name: one.shape for name, one in treatments.items()},
        list(dict.fromkeys([*default, *dense, *_other_embeddings(stream, tables)])),
        cache_arguments(recipe.kv_cache),
        stream.stored_layer,
        _table_targets(stream, tables),
    )


def _table_targets(
    stream: StreamedModel, tables: Iterable[TokenTable]
) -> list[tuple[PackedIntegerFormat, list[str]]]:
    """The config groups of tables: their format, and what readers find them by.

    vLLM calls embeddings by their class alone, and the head by its name.
    """
    groups = []
    for table in tables:
        for key, name in zip(table.keys, table.names, strict=True):
            names = list(dict.fromkeys((name, stream.stored_layer(name))))
            groups.append((table.format, ["Embedding"] if key == "embeddings" else names))
    return groups


def _other_embeddings(stream: StreamedModel, tables: Iterable[TokenTable]) -> list[str]:
    """Modules of the class of embeddings that stay dense although the tokens' ones do not."""
    tokens = {table.names[0] for table in tables if "embeddings" in table.keys}
    if not tokens:
        return []
    return [
        name
        for name, module in stream.model.named_modules()
        if isinstance(module, nn.Embedding) and name not in tokens
    ]
