"""Compile the fused kernels a loaded model can reach, so that no request waits for the compiler.

Each width's every tile runs once on a few rows; what is compiled depends on the tile and not on the
number of tokens. Holds no arithmetic and imports no vLLM: models are recognised by their parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from taut_kernels import tiles_fused
from taut_kernels.fused import rms_norm, row_quant, silu_mul

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Widths:
    """What a model's fused ops work on.

    Attributes:
        norms: (columns, dtype) of its RMSNorms.
        activations: (columns, dtype) of its gated activations' outputs.
        quantised: 8-bit types its activations may be quantised to.
    """

    norms: frozenset[tuple[int, torch.dtype]]
    activations: frozenset[tuple[int, torch.dtype]]
    quantised: frozenset[torch.dtype]


def widths_of(model: torch.nn.Module) -> Widths:
    """Read the widths off a loaded model.

    Args:
        model: as vLLM loaded it: norms are `RMSNorm` modules, an MLP has ``act_fn`` beside a merged
            ``gate_up_proj``.
    """
    norms, activations = set(), set()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module).__name__ == "RMSNorm" and isinstance(weight, torch.Tensor):
            norms.add((weight.shape[-1], weight.dtype))
        merged = getattr(module, "gate_up_proj", None)
        columns = getattr(merged, "output_size_per_partition", None)
        if columns is not None and hasattr(module, "act_fn"):
            activations.add((columns // 2, _activation_dtype(merged)))
    return Widths(frozenset(norms), frozenset(activations), frozenset(dtypes & set(row_quant.OUT)))


def _activation_dtype(layer: object) -> torch.dtype:
    found = getattr(layer, "params_dtype", None)
    return found if isinstance(found, torch.dtype) else torch.get_default_dtype()


def compile_all(widths: Widths, device: torch.device, gpu: str | None) -> int:
    """Run every kernel form × tile of a model once.

    Args:
        widths: of the model.
        device: where it runs.
        gpu: name of the card.

    Returns:
        The number of launches.
    """
    launches = 0
    outs: list[tuple[str, torch.dtype | None]] = [("same", None)]
    outs += [(row_quant.OUT[dtype], dtype) for dtype in sorted(widths.quantised, key=str)]
    for out, stored in outs:
        suffix = "" if stored is None else "_quant"
        for N, dtype in sorted(widths.norms, key=str):
            for op in (f"rms_norm{suffix}", f"add_rms_norm{suffix}"):
                for tile in tiles_fused.every_tile(gpu, op, N):
                    _run_norm(tile, out, stored, N, dtype, device, with_residual=op[0] == "a")
                    launches += 1
        for N, dtype in sorted(widths.activations, key=str):
            for tile in tiles_fused.every_tile(gpu, f"silu_mul{suffix}", N):
                x = torch.zeros(tile.rows, 2 * N, dtype=dtype, device=device)
                y, scales = _results(tile.rows, N, dtype, stored, device)
                silu_mul.launch(tile, out, x, 1.0, 0.0, None, False, y, scales)
                launches += 1
    return launches


def _results(
    rows: int, N: int, dtype: torch.dtype, stored: torch.dtype | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    y = torch.empty(rows, N, dtype=stored or dtype, device=device)
    return y, None if stored is None else torch.empty(rows, 1, device=device, dtype=torch.float32)


def _run_norm(
    tile: tiles_fused.FusedTile,
    out: str,
    stored: torch.dtype | None,
    N: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_residual: bool,
) -> None:
    x = torch.zeros(tile.rows, N, dtype=dtype, device=device)
    weight = torch.zeros(N, dtype=dtype, device=device)
    residual = torch.zeros_like(x) if with_residual else None
    y, scales = _results(tile.rows, N, dtype, stored, device)
    rms_norm.launch(tile, out, x, weight, residual, _EPSILON, y, scales)
