"""A small model, a good W4A16 checkpoint of it, and ways to spoil a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, job_for, recipe_data, write_calibration_text, write_llama
from validate_setup import write_text

from taut_deploy.compress import driver

GROUP = 32
TEMPLATE = (
    "{% for m in messages %}{{ 'w1' if m.role == 'user' else 'w2' }} {{ m.content }} {% endfor %}"
    "{% if tools %}{% for t in tools %}w3 {{ t.function.name }} {% endfor %}{% endif %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)
Tensors = dict[str, torch.Tensor]


def write_room(path: Path) -> Path:
    """``model/``, ``w4/`` and ``kv/`` (8-bit weights and an FP8 cache) of it, and ``judge.txt``."""
    write_llama(path / "model")
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    write_calibration_text(path / "text.txt")
    write_text(path / "judge.txt", 1200)
    w4 = recipe_data(path / "text.txt", algorithm="rtn")
    driver.compress(job_for(path / "model", w4, path / "w4"))
    kv = recipe_data(path / "text.txt", scheme="W8A16", algorithm="rtn")
    kv |= {"kv_cache": {"strategy": "tensor"}}
    driver.compress(job_for(path / "model", kv, path / "kv"))
    (path / "p.yaml").write_text(
        "name: p\nrequire: {mean_kl: {max: 0.1}, top1_agreement: {min: 0.5}}\n"
    )
    return path


def write_other(path: Path) -> Path:
    """A model of the same shape, tokenizer and template, with weights of its own."""
    write_llama(path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name, value in tensors.items():
        drawn = torch.randn(value.shape, generator=generator) * 0.1
        tensors[name] = value if name.endswith("norm.weight") else drawn
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def spoiled(
    source: Path, target: Path, change: Callable[[Tensors], None], **config: object
) -> Path:
    """Copy a checkpoint with changed tensors, as a writer with that fault would have left it.

    The manifest goes: it would refuse every one of these, for the bytes are not those it lists.
    """
    shutil.copytree(source, target)
    (target / "taut.json").unlink(missing_ok=True)
    shards = {file: load_file(file) for file in target.glob("*.safetensors")}
    tensors = {name: value for shard in shards.values() for name, value in shard.items()}
    change(tensors)
    for file, shard in shards.items():
        kept = {name: tensors[name].contiguous() for name in shard if name in tensors}
        save_file(kept, file, metadata={"format": "pt"})
    if config:
        edit_json(target / "config.json", **config)
    return target


def scale_of_one_layer(tensors: Tensors) -> None:
    """One layer's scales, a tenth too large."""
    tensors["model.layers.0.mlp.down_proj.weight_scale"] *= 1.1


def swapped(tensors: Tensors) -> None:
    """Two matrices of one shape in each other's place."""
    first, second = (f"model.layers.0.mlp.{name}_proj." for name in ("gate", "up"))
    for part in ("weight_packed", "weight_scale"):
        held = tensors[first + part].clone()
        tensors[first + part] = tensors[second + part].clone()
        tensors[second + part] = held


EDGED = "model.layers.0.self_attn.q_proj."


def above_zero(original: torch.Tensor) -> Callable[[Tensors], None]:
    """The scales of one layer above zero, as writers have them that give none a sign; no harm."""

    def change(tensors: Tensors) -> None:
        scale = tensors[EDGED + "weight_scale"]
        # A grid from -8 to 7 that holds the far end at either side.
        tensors[EDGED + "weight_scale"] = scale.abs() * (8 / 7)
        wide = tensors[EDGED + "weight_scale"].float().repeat_interleave(GROUP, 1)
        codes = (original / wide).round().clamp(-8, 7).to(torch.int8)
        tensors[EDGED + "weight_packed"] = pack_to_int32(codes, 4)

    return change


def off_by_one(original: torch.Tensor) -> Callable[[Tensors], None]:
    """The last column of each group of one layer written with the next group's scale."""

    def change(tensors: Tensors) -> None:
        scale = tensors[EDGED + "weight_scale"].float()
        codes = unpack_from_int32(tensors[EDGED + "weight_packed"], 4, original.shape)
        for group in range(scale.shape[1] - 1):
            column = (group + 1) * GROUP - 1
            wrong = original[:, column] / scale[:, group + 1]
            codes[:, column] = wrong.round().clamp(-8, 7).to(codes.dtype)
        tensors[EDGED + "weight_packed"] = pack_to_int32(codes, 4)

    return change


def no_cache_scale(tensors: Tensors) -> None:
    """The last layer's cache has no scale of keys."""
    del tensors["model.layers.1.self_attn.k_scale"]


def whole_cache_scale(tensors: Tensors) -> None:
    """Scales of the cache cut to whole numbers, which leaves none of them."""
    for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
        tensors[name] = tensors[name].floor()
