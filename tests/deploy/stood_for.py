"""The model a checkpoint stands for, by the formats' own arithmetic: readers must agree with it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from taut_deploy.compress.driver import CompressionJob
from taut_deploy.compress.formats.activations import Int8PerToken
from taut_deploy.compress.job import open_stream, stored_dtype
from taut_deploy.compress.plan import formats_of, treatments_of


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as its index says."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name, shard in index["weight_map"].items():
        tensors[name] = load_file(checkpoint / shard)[name]
    return tensors


def round_as_compressed_tensors(x: torch.Tensor) -> torch.Tensor:
    """Its scale spans -128..127 evenly (absmax / 127.5), where vLLM and we use absmax / 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def formats_for(request: CompressionJob):
    """The format of each layer a job quantises, by full name."""
    dtype = stored_dtype(Path(request.model.path))
    recipe = request.recipe.of_blocks() or request.recipe
    return formats_of(treatments_of(open_stream(request), recipe, dtype))


def dequantised_model(request: CompressionJob, rounding=None):
    """The base model with every weight replaced by what the finished checkpoint stands for.

    Inputs rounded to int8 go through ``rounding`` where it is given, those of others, and without
    it all, through their format's own.
    """
    tensors, formats = stored(request.output), formats_for(request)
    model = AutoModelForCausalLM.from_pretrained(request.model.path).eval()
    for name, module in model.named_modules():
        parts = {
            key.removeprefix(f"{name}."): value
            for key, value in tensors.items()
            if key.rpartition(".")[0] == name
        }
        if name in formats:
            module.weight.data = formats[name].unpack(parts).dequantize()
            scale, mine = parts.get("input_scale"), formats[name].activations.round
            given = rounding if isinstance(formats[name].activations, Int8PerToken) else None
            module.register_forward_pre_hook(
                lambda _module, args, scale=scale, mine=mine, given=given: (
                    mine(args[0], scale) if given is None else given(args[0]),
                )
            )
        elif "weight" in parts:
            module.weight.data = parts["weight"]
    return model


def logits_of(model) -> torch.Tensor:
    ids = torch.randint(2, 60, (3, 20), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        return model(ids).logits
