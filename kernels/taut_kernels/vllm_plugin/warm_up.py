"""Compile the kernels a loaded model can reach, so that no request waits for the compiler.

Each width's every tile runs once on a few rows; what is compiled depends on the tile and not on the
number of tokens. Holds no arithmetic and imports no vLLM: models are recognised by their parts.
Attention has a warm-up of its own: :mod:`.warm_up_decode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_kernels.activation import silu_mul_launch
from taut_kernels.launch import launcher
from taut_kernels.norm import rms_norm_launch
from taut_kernels.rope import rope_launch
from taut_kernels.rowwise import quantize, row_quant
from taut_kernels.rowwise import tiles as tiles_fused

EPSILON = 1e-6
PLAIN: tuple[float, float, float | None, bool] = (1.0, 0.0, None, False)
CLAMPED: tuple[float, float, float | None, bool] = (1.702, 1.0, 7.0, True)
"""Alpha, beta, limit and interleaving of SiLU·mul and of gpt-oss; what is compiled depends on none
of the numbers."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a rotary embedding of ours turns: heads, columns of one, how many of them turn.

    Attributes:
        kv_heads: 0 where queries are turned alone.
        dtype: of queries, keys and, in the end, angles: vLLM converts a table in place.
        apart: into new tensors, as in compiled graphs.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    neox: bool
    dtype: torch.dtype
    apart: bool


@dataclass(frozen=True, slots=True)
class Widths:
    """What a model's fused ops work on.

    Attributes:
        norms: (columns, dtype) of its RMSNorms whose weight has the activations' dtype.
        activations: (columns, dtype) of its gated activations' outputs.
        quantised: 8-bit types its activations may be quantised to.
        other_norms: (columns, dtype, weight's dtype or None) of its other RMSNorms.
        clamped: as ``activations``, of gpt-oss's form.
        static_scale: whether some layer's activations are quantised to fp8 by a given scale.
        rotations: of its rotary embeddings that run on ours.
        inputs: (columns, dtype, 8-bit type) of inputs that its linear layers quantise row by row,
            whatever writes them: attention, or what is not fused with them.
    """

    norms: frozenset[tuple[int, torch.dtype]]
    activations: frozenset[tuple[int, torch.dtype]]
    quantised: frozenset[torch.dtype]
    other_norms: frozenset[tuple[int, torch.dtype, torch.dtype | None]] = frozenset()
    clamped: frozenset[tuple[int, torch.dtype]] = frozenset()
    static_scale: bool = False
    rotations: frozenset[Rotation] = frozenset()
    inputs: frozenset[tuple[int, torch.dtype, torch.dtype]] = frozenset()

    def every_norm(self) -> list[tuple[int, torch.dtype, torch.dtype | None]]:
        """Return (columns, dtype, weight's dtype or None) of every RMSNorm, in a fixed order."""
        alike = {(N, dtype, dtype) for N, dtype in self.norms}
        return sorted(alike | self.other_norms, key=str)

    def quantised_on(self, device: torch.device) -> list[torch.dtype]:
        """Return the 8-bit types that a device quantises to: weights in fp8 only, before sm_89."""
        return [
            dtype
            for dtype in sorted(self.quantised, key=str)
            if row_quant.why_not_supported(dtype, device) is None
        ]


def widths_of(model: torch.nn.Module) -> Widths:
    """Read the widths off a loaded model.

    Args:
        model: as vLLM loaded it: norms are `RMSNorm` or `GemmaRMSNorm` modules; an MLP has a merged
            ``gate_up_proj`` beside ``act_fn``, or two equal ``output_sizes`` beside a `SiluAndMul`
            or `SwigluOAIAndMul`; an attention has its ``rotary_emb``, and the numbers of heads
            are there or in vLLM's `Attention` inside; a linear layer has its weight in 8 bits, and
            no ``input_scale`` where rows get their own.
    """
    norms, other_norms = set(), set()
    activations: dict[bool, set[tuple[int, torch.dtype]]] = {False: set(), True: set()}
    rotations, inputs, static_scale = set(), set(), False
    dtypes = {parameter.dtype for parameter in model.parameters()}
    params_dtype = next((found for m in model.modules() if (found := _params_dtype(m))), None)
    for module in model.modules():
        norm = _norm(module, params_dtype)
        if norm is not None and norm[1] is norm[2]:
            norms.add(norm[:2])
        elif norm is not None:
            other_norms.add(norm)
        merged = _merged(module)
        if merged is not None:
            columns = merged.output_size_per_partition // 2
            dtype = _params_dtype(merged) or torch.get_default_dtype()
            activations[_has(module, "SwigluOAIAndMul")].add((columns, dtype))
        static_scale |= isinstance(getattr(module, "input_scale", None), Tensor)
        rotations |= set(_rotations(module))
        inputs |= set(_inputs(module))
    return Widths(
        frozenset(norms),
        frozenset(activations[False]),
        frozenset(dtypes & set(row_quant.OUT)),
        frozenset(other_norms),
        frozenset(activations[True]),
        static_scale,
        frozenset(rotations),
        frozenset(inputs),
    )


def _params_dtype(layer: object) -> torch.dtype | None:
    found = getattr(layer, "params_dtype", None)
    return found if isinstance(found, torch.dtype) else None


def _class_names(module: object) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _has(module: torch.nn.Module, *names: str) -> bool:
    return any(_class_names(child) & set(names) for child in module.children())


def _norm(
    module: torch.nn.Module, params_dtype: torch.dtype | None
) -> tuple[int, torch.dtype, torch.dtype | None] | None:
    """Return columns, activations' dtype and weight's dtype of the IR op a norm calls, or None."""
    weight, names = getattr(module, "weight", None), _class_names(module)
    if not isinstance(weight, Tensor):
        return None
    columns = weight.shape[-1]
    # A norm may keep its weight in fp32 beside activations that are not.
    dtype = (params_dtype or weight.dtype) if weight.dtype is torch.float32 else weight.dtype
    if "GemmaRMSNorm" in names:
        return columns, dtype, torch.float32  # it adds 1 in fp32
    if "RMSNorm" not in names:
        return None
    return columns, dtype, weight.dtype if getattr(module, "has_weight", True) else None


def _merged(module: torch.nn.Module) -> Any:
    """Return the layer in front of a gated activation, None in a module that is no such MLP."""
    merged = getattr(module, "gate_up_proj", None)
    ours = _has(module, "SiluAndMul", "SwigluOAIAndMul")
    if merged is None and ours:
        for child in module.children():
            sizes: Sequence[int] = getattr(child, "output_sizes", ())
            if len(sizes) == 2 and sizes[0] == sizes[1]:
                merged = child
    if not hasattr(merged, "output_size_per_partition"):
        return None
    return merged if ours or hasattr(module, "act_fn") else None


def _rotations(module: torch.nn.Module) -> Iterator[Rotation]:
    rotary: Any = getattr(module, "rotary_emb", None)
    if not type(rotary).__name__.startswith("Taut") or not type(rotary).enabled():
        return
    if rotary.why_native() is not None:
        return
    rotated, neox = rotary.cos_sin_cache.shape[1], rotary.is_neox_style
    for heads, kv_heads in _heads(module):
        shape = (heads, kv_heads, rotary.head_size, rotated)
        yield Rotation(*shape, neox, rotary.query_dtype, rotary.apart)


def _heads(module: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """Yield a rank's heads of queries and keys, by the names of a model's module or of vLLM's own.

    Models call them as they like (gpt-oss ``num_local_attention_heads``, StableLM
    ``num_key_value_heads``); vLLM's `Attention` in them has one pair of names.
    """
    for part in (module, *module.children()):
        heads, kv_heads = getattr(part, "num_heads", None), getattr(part, "num_kv_heads", None)
        if isinstance(heads, int) and isinstance(kv_heads, int):
            yield heads, kv_heads
            if getattr(part, "kv_sharing_target_layer_name", None) is not None:
                yield heads, 0  # another layer's keys, turned there (Gemma 3n and 4)


def _inputs(layer: torch.nn.Module) -> Iterator[tuple[int, torch.dtype, torch.dtype]]:
    weight, dtype = getattr(layer, "weight", None), _params_dtype(layer)
    if not isinstance(weight, Tensor) or weight.dtype not in row_quant.OUT or dtype is None:
        return
    if isinstance(getattr(layer, "input_scale", None), Tensor):
        return
    # A replicated layer has no partition.
    columns = getattr(layer, "input_size_per_partition", getattr(layer, "input_size", None))
    if isinstance(columns, int):
        yield columns, dtype, weight.dtype


def compile_all(widths: Widths, device: torch.device, gpu: str | None) -> int:
    """Run every kernel form × tile of a model once.

    Args:
        widths: of the model.
        device: where it runs.
        gpu: name of the card.

    Returns:
        The number of launches.
    """
    launches, hopper = 0, launcher.is_hopper(device)
    norms = widths.every_norm()
    activations = [(width, PLAIN) for width in sorted(widths.activations, key=str)]
    activations += [(width, CLAMPED) for width in sorted(widths.clamped, key=str)]
    for out, stored in _outs(widths, device):
        for N, dtype, weight_dtype in norms:
            weight = None
            if weight_dtype is not None:
                weight = torch.zeros(N, dtype=weight_dtype, device=device)
            suffix = "" if stored is None else "_quant"
            for prefix in ("", "add_"):
                for tile in tiles_fused.every_tile(gpu, f"{prefix}rms_norm{suffix}", N, hopper):
                    x = torch.zeros(tile.rows, N, dtype=dtype, device=device)
                    residual = torch.zeros_like(x) if prefix else None
                    results = _results(tile.rows, N, dtype, out, stored, device)
                    rms_norm_launch.launch(tile, out, x, weight, residual, EPSILON, *results)
                    launches += 1
        # A given scale needs no look at the whole row: its tiles are those of the plain form.
        op = "silu_mul" if out in ("same", "static_fp8") else "silu_mul_quant"
        for (N, dtype), form in activations:
            for tile in tiles_fused.every_tile(gpu, op, N, hopper):
                x = torch.zeros(tile.rows, 2 * N, dtype=dtype, device=device)
                results = _results(tile.rows, N, dtype, out, stored, device)
                silu_mul_launch.launch(tile, out, x, *form, *results)
                launches += 1
    launches += sum(_quantise(*width, device, gpu) for width in sorted(widths.inputs, key=str))
    return launches + sum(_rotate(rotation, device, gpu) for rotation in widths.rotations)


def _outs(widths: Widths, device: torch.device) -> list[tuple[str, torch.dtype | None]]:
    """Return the kernels' forms of output with the 8-bit type they store."""
    quantised = widths.quantised_on(device)
    outs: list[tuple[str, torch.dtype | None]] = [("same", None)]
    outs += [(row_quant.OUT[dtype], dtype) for dtype in quantised]
    if widths.static_scale and row_quant.FP8 in quantised:
        outs.append(("static_fp8", row_quant.FP8))
    return outs


def _results(
    rows: int,
    N: int,
    dtype: torch.dtype,
    out: str,
    stored: torch.dtype | None,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    y = torch.empty(rows, N, dtype=stored or dtype, device=device)
    if stored is None:
        return y, None
    shape = (1,) if out == "static_fp8" else (rows, 1)
    return y, torch.ones(shape, device=device, dtype=torch.float32)


def _quantise(
    N: int, dtype: torch.dtype, stored: torch.dtype, device: torch.device, gpu: str | None
) -> int:
    """Run every tile of quantisation alone once; return how many there are."""
    if row_quant.why_not_supported(stored, device) is not None:
        return 0
    tiles = tiles_fused.every_tile(gpu, "row_quant", N, launcher.is_hopper(device))
    for tile in tiles:
        x = torch.zeros(tile.rows, N, dtype=dtype, device=device)
        q = torch.empty(tile.rows, N, dtype=stored, device=device)
        scales = torch.empty(tile.rows, 1, dtype=torch.float32, device=device)
        quantize.launch(tile, row_quant.OUT[stored], x, q, scales)
    return len(tiles)


def _rotate(rotation: Rotation, device: torch.device, gpu: str | None) -> int:
    """Run every tile of a rotary embedding once; return how many there are."""
    heads, kv_heads, head_dim = rotation.heads, rotation.kv_heads, rotation.head_dim
    cache = torch.zeros(1, rotation.rotated, dtype=rotation.dtype, device=device)
    tiles = tiles_fused.every_tile(gpu, "rope", heads + kv_heads, launcher.is_hopper(device))
    for tile in tiles:
        positions = torch.zeros(tile.rows, dtype=torch.int64, device=device)
        of_heads: Any = {"dtype": rotation.dtype, "device": device}
        # As an attention cuts them from its projection: the stride is compiled in.
        qkv = torch.zeros(tile.rows, heads + 2 * kv_heads, head_dim, **of_heads)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        apart = None
        if rotation.apart:
            apart = (torch.empty(q.shape, **of_heads), torch.empty(k.shape, **of_heads))
        rope_launch.launch(tile, positions, q, k if kv_heads else None, cache, rotation.neox, apart)
    return len(tiles)
