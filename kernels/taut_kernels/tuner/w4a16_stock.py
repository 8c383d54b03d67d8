"""The kernels vLLM has for W4A16 layers on CUDA, each fed a layer as it lies on disk.

Marlin and Machete are vLLM's operators, with weights prepared as its kernel classes prepare them
(the classes themselves want a tensor-parallel group); Humming is the package that vLLM 0.32 and
later put between the two on Hopper. What is not installed raises `UnavailableError` with the
reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.tuner.w4a16_layer import Layer

Operands = tuple[Tensor | None, ...]
HUMMING_LOCKS = 2048
"""int32 zeros through which its programs meet; as its own layer makes them."""


class UnavailableError(RuntimeError):
    """A kernel cannot run here; the message says why."""


class OtherFormatError(UnavailableError):
    """A kernel does not take the layer's format, whatever its shape; the message says why."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A layer's weights in a kernel's own layout, ready to be multiplied by.

    Attributes:
        operands: the tensors that a call reads.
        run: activations [M, K] and the operands → [M, N].
    """

    operands: Operands
    run: Callable[[Tensor, Operands], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply activations [M, K]; returns [M, N]."""
        return self.run(x, self.operands)

    def copy(self) -> Prepared:
        """Return the same in memory of its own."""
        return replace(self, operands=tuple(t if t is None else t.clone() for t in self.operands))


Prepare = Callable[[Layer], Prepared]


def operands(layer: Layer) -> tuple[Any, ...]:
    """Return the operands of `taut::w4a16_gemm` behind the activations."""
    qweight = formats_mma.repack_weight(layer.weight_packed, layer.K)
    scales = formats_mma.repack_scale(layer.weight_scale)
    zeros = None
    if layer.weight_zero_point is not None:
        zeros = formats_mma.repack_zero_point(layer.weight_zero_point, layer.N)
    arrivals = w4a16.make_arrivals(layer.N, layer.x.device)
    return qweight, scales, zeros, None, arrivals, layer.group_size


def taut(layer: Layer) -> Prepared:
    """Run `taut::w4a16_gemm`, whatever regime it chooses."""
    op = torch.ops.taut.w4a16_gemm.default
    *given, group_size = operands(layer)

    def run(x: Tensor, own: Operands) -> Tensor:
        y: Tensor = op(x, *own, group_size)
        return y

    return Prepared(tuple(given), run)


def vllm_modules(*names: str) -> list[Any]:
    """Import modules of vLLM.

    Args:
        names: behind ``vllm.``.

    Raises:
        UnavailableError: one cannot be imported.
    """
    try:
        return [importlib.import_module(f"vllm.{name}") for name in names]
    except ImportError as error:
        raise UnavailableError(f"vLLM: {error}") from error


def _weight_type(layer: Layer, scalar_types: Any) -> Any:
    """Return vLLM's name of the weights: uint4 wants zero points, uint4b8 has 8 for all of them."""
    return scalar_types.uint4b8 if layer.weight_zero_point is None else scalar_types.uint4


def _vllm_group(layer: Layer, taken: Sequence[int]) -> int:
    """Return the group size as vLLM says it, -1 for a channel, where its kernel takes it."""
    group = -1 if layer.group_size == layer.K else layer.group_size
    if group not in taken:
        raise OtherFormatError(f"group size {group} is none of vLLM's for it, {list(taken)}")
    return group


def _marlin_zeros(layer: Layer, marlin_utils: Any) -> Tensor:
    """Return zero points [K/G, N/8] int32 in Marlin's order, empty where the layer has none."""
    if layer.weight_zero_point is None:
        empty: Tensor = marlin_utils.marlin_make_empty_g_idx(layer.x.device)
        return empty
    stored = layer.stored_zeros().t().to(torch.int32).contiguous()
    zeros: Tensor = marlin_utils.marlin_zero_points(
        stored, size_k=layer.K // layer.group_size, size_n=layer.N, num_bits=4
    )
    return zeros


def marlin(layer: Layer) -> Prepared:
    """Run vLLM's Marlin, prepared as its `MarlinLinearKernel` does."""
    quantization = "model_executor.layers.quantization.utils.marlin_utils"
    ops, marlin_utils, scalar_type = vllm_modules("_custom_ops", quantization, "scalar_type")
    group = _vllm_group(layer, marlin_utils.MARLIN_SUPPORTED_GROUP_SIZES)
    device = layer.x.device
    empty = marlin_utils.marlin_make_empty_g_idx(device)
    weight = ops.gptq_marlin_repack(
        layer.weight_packed.t().contiguous(), perm=empty, size_k=layer.K, size_n=layer.N, num_bits=4
    )
    scale = marlin_utils.marlin_permute_scales(
        layer.weight_scale.t().contiguous(), layer.K, layer.N, group
    )
    zeros = _marlin_zeros(layer, marlin_utils)
    kind = _weight_type(layer, scalar_type.scalar_types)
    workspace = marlin_utils.marlin_make_workspace_new(device)

    def run(x: Tensor, own: Operands) -> Tensor:
        y: Tensor = marlin_utils.apply_gptq_marlin_linear(
            input=x,
            weight=own[0],
            weight_scale=own[1],
            weight_zp=own[2],
            g_idx=empty,
            g_idx_sort_indices=empty,
            workspace=workspace,
            wtype=kind,
            output_size_per_partition=layer.N,
            input_size_per_partition=layer.K,
            is_k_full=True,
        )
        return y

    return Prepared((weight, scale, zeros), run)


def machete(layer: Layer) -> Prepared:
    """Run vLLM's Machete, its first choice on Hopper, prepared as `MacheteLinearKernel` does."""
    quantization = "model_executor.layers.quantization.utils.machete_utils"
    ops, machete_utils, scalar_type = vllm_modules("_custom_ops", quantization, "scalar_type")
    kind, dtype = _weight_type(layer, scalar_type.scalar_types), layer.x.dtype
    group = _vllm_group(layer, machete_utils.query_machete_supported_group_sizes(dtype))
    # Machete wants [K/8, N] with the K words next to each other, as they lie on disk.
    weight = ops.machete_prepack_B(
        layer.weight_packed.clone().t(), a_type=dtype, b_type=kind, group_scales_type=dtype
    )
    scale, zeros = layer.weight_scale.t().contiguous(), None
    if layer.weight_zero_point is not None:
        # Times the scale and rounded, as vLLM does it.
        zeros = (-1.0 * scale * layer.stored_zeros().t().to(dtype)).contiguous()

    def run(x: Tensor, own: Operands) -> Tensor:
        y: Tensor = ops.machete_mm(
            a=x,
            b_q=own[0],
            b_type=kind,
            b_group_scales=own[1],
            b_group_zeros=own[2],
            b_group_size=group,
        )
        return y

    return Prepared((weight, scale, zeros), run)


def humming(layer: Layer) -> Prepared:
    """Run Humming's kernel of the configuration that its heuristics have for a number of tokens.

    It compiles where a number of tokens first wants another configuration, for seconds:
    :func:`compile_humming` does so ahead.
    """
    _, forward, _ = _humming_modules()
    made = _humming_layer(layer)
    config, given = made.humming_config, _humming_config_of(made)

    def run(x: Tensor, own: Operands) -> Tensor:
        weight, scale, zeros, locks = own
        y: Tensor = forward.humming_forward(
            config,
            inputs=x,
            weight=weight,
            weight_scale=scale,
            zero_point=zeros,
            locks=locks,
            tuning_config=given(x.shape[0]),
        )
        return y

    zeros = getattr(made, "zero_point", None)
    locks = torch.zeros(HUMMING_LOCKS, dtype=torch.int32, device=layer.x.device)
    return Prepared((made.weight.data, made.weight_scale.data, _data(zeros), locks), run)


def compile_humming(layer: Layer, tokens: Sequence[int]) -> None:
    """Compile what :func:`humming` runs for some numbers of tokens, beside each other.

    Args:
        layer: with weights, which are not read.
        tokens: numbers of them.

    Raises:
        UnavailableError: Humming cannot run here.
    """
    *_, kernel = _humming_modules()
    made = _humming_layer(layer)
    given, config = _humming_config_of(made), made.humming_config.to_str()
    wanted = list(dict.fromkeys(given(M) for M in tokens))

    def compile_one(chosen: str) -> None:
        kernel.HummingKernel.prepare_kernels(config, None, chosen, layer.x.device)

    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(compile_one, wanted))


def _humming_modules() -> list[Any]:
    names = ("layer", "forward", "kernel.humming")
    try:
        return [importlib.import_module(f"humming.{name}") for name in names]
    except (ImportError, OSError) as error:
        raise UnavailableError(f"Humming: {error}") from error


def _humming_layer(layer: Layer) -> Any:
    """Return a layer of Humming's, its weights brought from the disk's layout to its own."""
    module, *_ = _humming_modules()
    channel = layer.group_size == layer.K
    stored = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "type": "int",
        "num_bits": 4,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else layer.group_size,
        "symmetric": layer.weight_zero_point is None,
    }
    made = module.HummingLayer(
        shape_n=layer.N, shape_k=layer.K, weight_config=stored, torch_dtype=layer.x.dtype
    ).to(layer.x.device)
    tensors = {"weight_packed": layer.weight_packed, "weight_scale": layer.weight_scale}
    if layer.weight_zero_point is not None:
        tensors["weight_zero_point"] = layer.weight_zero_point
    made.load_from_tensors(tensors)
    made.transform()
    return made


def _humming_config_of(made: Any) -> Callable[[int], str]:
    """Return what says a layer's configuration for a number of tokens, as its own list does."""
    tune = importlib.import_module("humming.tune")
    chosen: dict[int, str] = {}

    def given(M: int) -> str:
        if M not in chosen:
            found = tune.get_heuristics_config(made.humming_config, M, device=made.weight.device)
            chosen[M] = json.dumps(found)
        return chosen[M]

    return given


def _data(parameter: Any) -> Tensor | None:
    return None if parameter is None else parameter.data


STOCK: dict[str, Prepare] = {"Machete": machete, "Humming": humming, "Marlin": marlin}
"""vLLM's order on Hopper; before 0.32 Humming comes last, behind kernels that take every layer."""
_HUMMING_SINCE = (0, 32)
_MACHETE_GROUPS = (64, 128)
_MACHETE_FEATURES = 128
"""Output features of a Machete block, which have to divide a layer's."""


def stock_of(N: int, group_size: int, *, hopper: bool) -> dict[str, Prepare]:
    """Return what vLLM may run a layer on, as far as its installed version has it.

    Machete where it takes the layer, else Humming where it is next; Marlin beside either.

    Args:
        N: output features.
        group_size: G; 128 stands for one group a channel, too.
        hopper: the card is of sm_90, the only one for Machete.
    """
    first = ["Humming"] if _vllm_version() >= _HUMMING_SINCE else []
    if hopper and group_size in _MACHETE_GROUPS and N % _MACHETE_FEATURES == 0:
        first = ["Machete"]
    return {name: STOCK[name] for name in (*first, "Marlin")}


def _vllm_version() -> tuple[int, ...]:
    """Return major and minor; zeros where vLLM is not installed."""
    try:
        text = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
