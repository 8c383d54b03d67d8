"""The ``factorize`` stage: a weight becomes two thin ones, or codes and two thin ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from taut_deploy.compress.formats.low_rank import LowRankFormat, StoredFactors
from taut_deploy.compress.layers_at_once import solve_layers
from taut_deploy.compress.lowrank.interpolative import interpolate
from taut_deploy.compress.lowrank.residual import quantize_with_residual
from taut_deploy.compress.lowrank.whitened_svd import Factors, whiten
from taut_deploy.compress.quantize import gptq
from taut_deploy.compress.quantize.grid import QuantizedWeight
from taut_deploy.compress.reconstruct import Product, reconstruct
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.compress.threads import single_thread
from taut_deploy.recipe.stages import Factorize


def factorize(state: BlockState, index: int, stage: Factorize) -> None:
    """Factorise every layer of the stage.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    method: str = stage.method if stage.residual is None else "gptq+factorize"
    layers = state.named_of_stage(index)
    found = solve_layers(partial(_all_factorised, stage=stage), layers.values(), state.devices)
    stored = dict(zip(layers, found, strict=True))
    if stage.steps is not None:
        method += "+reconstruct"
        fitted = {
            name: Product(
                one.factors.up.float(),
                one.factors.down.float(),
                one.factors.order,
                None if one.codes is None else one.codes.dequantize(),
            )
            for name, one in stored.items()
        }
        reconstruct(state, fitted, stage.steps)
        for name, product in fitted.items():
            factors = Factors(product.up.detach(), product.down.detach(), product.order)
            kept = stored[name].format
            stored[name] = replace(stored[name], factors=_stored(factors, kept.dtype))
    for name, one in stored.items():
        state.layers[name].rank = one.factors.rank
        state.layers[name].store(one, method)


def _all_factorised(layers: Sequence[LayerState], *, stage: Factorize) -> list[StoredFactors]:
    return [_factorised(layer, stage) for layer in layers]


def _factorised(layer: LayerState, stage: Factorize) -> StoredFactors:
    kept, hessian = layer.format, layer.group.hessian
    if not isinstance(kept, LowRankFormat) or hessian is None:
        raise TypeError(f"{layer.name}: a factorised layer has a low-rank format and a Hessian")
    weight = layer.sound_weight()
    rank = kept.rank_of(*layer.module.weight.shape)
    if kept.base is None or stage.residual is None:
        factors = whiten(weight, hessian, dampening_frac=stage.dampening_frac).truncate(rank)
        return StoredFactors(kept, _stored(interpolate(factors), kept.dtype), None)
    spec = kept.base.spec
    with single_thread():
        feedback = gptq.feedback_of(hessian)

    def rounded(left: torch.Tensor) -> QuantizedWeight:
        with single_thread():
            codes: QuantizedWeight = gptq.quantize_weight(left, feedback, spec)
        return codes

    codes, factors = quantize_with_residual(
        weight, hessian, rank, rounded, passes=stage.residual.passes, stored_dtype=kept.dtype
    )
    return StoredFactors(kept, _stored(factors, kept.dtype), codes)


def _stored(factors: Factors, dtype: torch.dtype) -> Factors:
    return Factors(factors.up.to(dtype), factors.down.to(dtype), factors.order)
