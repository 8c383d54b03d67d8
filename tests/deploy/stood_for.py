"""The model a checkpoint stands for, by the formats' own arithmetic: readers must agree with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file
from tiny_models import edit_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from taut_deploy.checkpoint import Golden, read_manifest
from taut_deploy.compress.driver import CompressionJob
from taut_deploy.compress.formats.activations import Int8PerToken
from taut_deploy.compress.job import open_stream, stored_dtype
from taut_deploy.compress.plan import formats_of, treatments_of
from taut_deploy.diagnose.layers import manifest_layers


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as its index says."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name, shard in index["weight_map"].items():
        tensors[name] = load_file(checkpoint / shard)[name]
    return tensors


def scales_of(checkpoint: Path, leaf: str) -> dict[str, float]:
    """The scale of each layer, which has one, by full name."""
    return {
        name.removesuffix(f".{leaf}"): float(value)
        for name, value in stored(checkpoint).items()
        if name.endswith(f".{leaf}")
    }


def assert_joined_layers_share(scales: dict[str, float]) -> None:
    """Of a Llama of two blocks: what vLLM joins into one layer has one scale."""
    assert len(scales) == 14
    for index in range(2):
        block = f"model.layers.{index}"
        assert len({scales[f"{block}.self_attn.{part}_proj"] for part in "qkv"}) == 1
        assert len({scales[f"{block}.mlp.{part}_proj"] for part in ("gate", "up")}) == 1


def layers_seen(checkpoint: Path):
    """What the doctor sees of a checkpoint of ours: N, K and scheme by full name."""
    config = json.loads((checkpoint / "config.json").read_text())
    return manifest_layers(checkpoint, read_manifest(checkpoint), config)


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


def plain_copy(checkpoint: Path, path: Path, bits: int, *, turned: bool) -> Path:
    """The checkpoint with its packed weights multiplied out, as a model without quantisation."""
    tensors = stored(checkpoint)
    for packed in [name for name in tensors if name.endswith("_packed")]:
        layer = packed.removesuffix(".weight_packed")
        codes, scale, shape = (
            tensors.pop(f"{layer}.weight_{part}") for part in ("packed", "scale", "shape")
        )
        weight = unpack_from_int32(codes, bits, torch.Size(shape.tolist())).float()
        zero = tensors.pop(f"{layer}.weight_zero_point", None)
        if zero is not None:
            zero = unpack_from_int32(zero, bits, torch.Size(scale.shape), packed_dim=0)
            weight -= zero.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
        weight *= scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
        tensors[f"{layer}.weight"] = weight.T.contiguous() if turned else weight
    path.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            shutil.copy(file, path)
    edit_json(path / "config.json", quantization_config=None)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load_whole(path: Path, kind: type = AutoModelForCausalLM):
    """A model by transformers, in fp32, no tensor missing and none too many."""
    model, info = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    left = {kind: names for kind, names in info.items() if names}
    assert not left, left
    return model.eval()


def says_golden(model, directory: Path, golden: Golden) -> None:
    """Fail unless a whole model answers the golden prompt as the blocks did while compressed."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        last = model(torch.tensor([tokenizer(golden.prompt)["input_ids"]])).logits[0, -1]
    assert int(last.argmax()) == golden.expected_token
    first, second = last.topk(2).values.tolist()
    assert golden.margin == pytest.approx(first - second, abs=1e-3)
