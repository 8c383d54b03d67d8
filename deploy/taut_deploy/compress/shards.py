"""How a checkpoint's shards are called, and the index that says what is in which."""

from pathlib import Path
from typing import Any

from safetensors import safe_open


def shard_name(index: int, blocks: int) -> str:
    """The file of a block, or of what is outside them at ``index`` = ``blocks``.

    Args:
        index: position of the block.
        blocks: number of blocks.
    """
    return f"model-{index + 1:05d}-of-{blocks + 1:05d}.safetensors"


def shard_index(directory: Path) -> dict[str, Any]:
    """``model.safetensors.index.json`` of the shards that are in a directory."""
    weight_map: dict[str, str] = {}
    total = 0
    for shard in sorted(directory.glob("model-*.safetensors")):
        with safe_open(shard, framework="pt") as handle:
            weight_map.update(dict.fromkeys(handle.keys(), shard.name))
        total += _tensor_bytes(shard)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _tensor_bytes(shard: Path) -> int:
    """What follows the header, whose length is the file's first eight bytes: all tensors."""
    with shard.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return shard.stat().st_size - 8 - header
