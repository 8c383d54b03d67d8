"""A checkpoint of a model's shape with random weights: there for its bytes, not its words.

The names and shapes are those of transformers' class for the configuration; linear layers of the
decoder blocks are quantised.

Standard compressed-tensors files: W4A16 (``pack-quantized``) in symmetric groups of 128 and, as
taut's own recipe has it, in groups of 32 with zero points; W8A8 in int8 (``int-quantized``) and in
e4m3 (``float-quantized``), scales a channel, activations a token. Also e4m3 as DeepSeek-V3 and
Qwen-3 have it (``fp8-block``: ``weight_scale_inv`` [N/128, K/128], fp32), and what GPTQModel
(AutoGPTQ) and AutoAWQ write, 4 bits in groups of 128; a nibble at bits 4i..4i+3 of a word is its
i-th:

``gptq`` (version 1: stored zeros are one less; symmetric, no act-order)
    ``qweight``  [K/8, N] int32 along K    ``qzeros``  [K/G, N/8] int32 along N
    ``scales``   [K/G, N] float16          ``g_idx``   [K] int32: a column's group
``awq`` (``gemm``, zero points)
    ``qweight``  [K, N/8] int32 along N    ``qzeros``  [K/G, N/8] int32 along N
    ``scales``   [K/G, N] float16          place i of a word is column ``_AWQ_ORDER[i]`` of its 8
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from taut_kernels.gemm.w4a16 import disk as formats

_FOUR_BITS = {
    "w4a16": (128, False),
    "w4a16-g32-zp": (32, True),
    "gptq": (128, False),
    "awq": (128, True),
}
"""Scheme → group size, and whether there are zero points."""
_FORMATS = {
    "w4a16": "pack-quantized",
    "w4a16-g32-zp": "pack-quantized",
    "int8": "int-quantized",
    "fp8": "float-quantized",
}
_OTHER_FILES: dict[str, dict[str, Any]] = {
    "gptq": {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": 128,
        "lm_head": False,
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    },
    "awq": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "fp8-block": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
"""Schemes that are not compressed-tensors → their ``quantization_config``."""
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
SCHEMES = (*_FORMATS, *_OTHER_FILES)


def _dtype(scheme: str) -> torch.dtype:
    # AutoGPTQ and AutoAWQ quantise in fp16 and keep scales so; their checkpoints say float16.
    return torch.float16 if scheme in ("gptq", "awq") else torch.bfloat16


def _quantization(scheme: str) -> dict[str, Any]:
    if scheme in _OTHER_FILES:
        return _OTHER_FILES[scheme]
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False}
    activations: dict[str, Any] | None = None
    if scheme in _FOUR_BITS:
        size, zero_points = _FOUR_BITS[scheme]
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
        weights["symmetric"] = not zero_points
    else:
        kind = {"num_bits": 8, "type": "float" if scheme == "fp8" else "int"}
        weights |= kind | {"strategy": "channel"}
        activations = kind | {"symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme],
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def write(directory: Path, scheme: str, config: dict[str, Any]) -> None:
    """Write a checkpoint vLLM loads.

    Args:
        directory: made; about 5.6 GB for Llama-3-8B in 4 bits, 9.1 GB in 8.
        scheme: one of :data:`SCHEMES`.
        config: one of :mod:`.engine_models`, or of other sizes.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    dtype = _dtype(scheme)
    said = {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "quantization_config": _quantization(scheme),
    }
    (directory / "config.json").write_text(json.dumps(config | said), encoding="utf-8")
    generator = torch.Generator(_device()).manual_seed(0)
    files: dict[str, str] = {}
    for name, modules in _parts(_skeleton(config)):
        tensors = _tensors(modules, scheme, generator)
        save_file(tensors, directory / name)
        files |= dict.fromkeys(tensors, name)
    index = json.dumps({"metadata": {}, "weight_map": files})
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")


_Modules = list[tuple[str, nn.Module]]
_BLOCKS = "model.layers"
_HEAD = "lm_head"


def _skeleton(config: dict[str, Any]) -> nn.Module:
    """Return transformers' model without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(known)
    return model


def _parts(model: nn.Module) -> Iterator[tuple[str, _Modules]]:
    """Yield file → the modules with parameters of their own in it: a block each, then the rest."""
    owners = [
        (n, m)
        for n, m in model.named_modules()
        if next(m.parameters(recurse=False), None) is not None
    ]
    blocks = model.get_submodule(_BLOCKS)
    assert isinstance(blocks, nn.ModuleList)
    for layer in range(len(blocks)):
        prefix = f"{_BLOCKS}.{layer}."
        yield f"model-{layer:02}.safetensors", [o for o in owners if o[0].startswith(prefix)]
    rest = [o for o in owners if not o[0].startswith(f"{_BLOCKS}.")]
    config: Any = model.config
    tied = {_HEAD} if config.tie_word_embeddings else set()
    yield "model-outer.safetensors", [o for o in rest if o[0] not in tied]


def _tensors(modules: _Modules, scheme: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw what a file holds."""
    found: dict[str, Tensor] = {}
    for name, module in modules:
        for part, tensor in _module(name, module, scheme, generator).items():
            found[f"{name}.{part}"] = tensor.cpu()
    return found


def _module(
    name: str, module: nn.Module, scheme: str, generator: torch.Generator
) -> dict[str, Tensor]:
    dtype = _dtype(scheme)
    if isinstance(module, nn.Embedding):
        shape = (module.num_embeddings, module.embedding_dim)
        return {"weight": _normal(shape, 0.08, generator).to(dtype)}
    if not isinstance(module, nn.Linear):
        # Gemma's norms multiply by one more than their weight.
        one = 0.0 if type(module).__name__.startswith("Gemma") else 1.0
        own = module.named_parameters(recurse=False)
        return {part: torch.full(tuple(p.shape), one, dtype=dtype) for part, p in own}
    N, K = module.out_features, module.in_features
    if name == _HEAD:
        return {"weight": _normal((N, K), 0.05, generator).to(dtype)}
    bias = {} if module.bias is None else {"bias": _normal((N,), 0.1, generator).to(dtype)}
    return _linear(N, K, scheme, generator) | bias


def _device() -> str:
    # Eight thousand million random numbers take a CPU minutes.
    return "cuda" if torch.cuda.is_available() else "cpu"


def _normal(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator, device=generator.device)
    return (values * deviation).to(torch.bfloat16).cpu()


def _linear(N: int, K: int, scheme: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a layer whose outputs are of order 1."""
    if scheme in _FOUR_BITS:
        write_out = {"gptq": _gptq, "awq": _awq}.get(scheme, _pack_quantized)
        return write_out(*_four_bits(N, K, *_FOUR_BITS[scheme], generator))
    device = generator.device
    values = torch.randn(N, K, generator=generator, device=device)
    if scheme == "fp8-block":
        scale = torch.rand(-(-N // 128), -(-K // 128), generator=generator, device=device) + 0.5
        return {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scale / K**0.5}
    scale = torch.rand(N, 1, generator=generator, device=device) + 0.5
    if scheme == "fp8":
        weight, unit = values.to(torch.float8_e4m3fn), 1.0
    else:
        weight, unit = (values * 32).round().clamp(-127, 127).to(torch.int8), 1 / 32
    return {"weight": weight, "weight_scale": (scale * (unit / K**0.5)).bfloat16()}


def _four_bits(
    N: int, K: int, group_size: int, zero_points: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw int8 weights [N, K] in -8..7, scales [N, K/G], and zero points [N, K/G] if asked for."""
    device = generator.device
    scale = torch.rand(N, K // group_size, generator=generator, device=device) + 0.5
    # 1 to 15 stand for -7 to 7, of deviation 4.3. With -8, too, their mean would not be 0, and 32
    # layers of that answer every prompt with the same token (H200, 2026-11-23).
    stored = torch.randint(1, 16, (N, K), generator=generator, device=device)
    values = (stored - formats.SYMMETRIC_ZERO).to(torch.int8)
    scale *= 0.2 / K**0.5
    if not zero_points:
        return values, scale, None
    # -1 or 0: with either -7 to 7 above it are in 4 bits.
    zeros = torch.randint(0, 2, scale.shape, generator=generator, device=device)
    zeros = (zeros - 1).to(torch.int8)
    return values + zeros.repeat_interleave(group_size, dim=1), scale, zeros


def _pack_quantized(values: Tensor, scale: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": formats.pack_weight(values),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(values.shape),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = formats.pack_zero_point(zeros)
    return tensors


def _gptq(values: Tensor, scale: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    K = values.shape[1]
    columns = torch.arange(K, dtype=torch.int32, device=values.device)
    one_less = (torch.zeros_like(scale, dtype=torch.int8) if zeros is None else zeros) - 1
    return {
        "qweight": formats.pack_weight(values).t().contiguous(),
        "qzeros": formats.pack_weight(one_less.t()),
        "scales": scale.t().half().contiguous(),
        "g_idx": columns // (K // scale.shape[1]),
    }


def _awq(values: Tensor, scale: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    assert zeros is not None, "AutoAWQ's files have zero points"
    return {
        "qweight": _awq_words(values.t()),
        "qzeros": _awq_words(zeros.t()),
        "scales": scale.t().half().contiguous(),
    }


def _awq_words(rows: Tensor) -> Tensor:
    """Pack int8 [rows, columns] along columns, eight to a word in AWQ's order."""
    eights = rows.reshape(len(rows), -1, formats.NIBBLES_PER_WORD)
    return formats.pack_weight(eights[:, :, _AWQ_ORDER].flatten(1))
