"""Which format serves a scheme."""

from collections.abc import Callable, Collection

import torch

from taut_deploy.compress.formats.activations import (
    Activations,
    Float8Dynamic,
    Float8Fixed,
    Int8PerToken,
)
from taut_deploy.compress.formats.float4 import Float4Format
from taut_deploy.compress.formats.float8 import Float8Format
from taut_deploy.compress.formats.float8_block import BLOCK, Float8BlockFormat
from taut_deploy.compress.formats.float8_tensor import Float8TensorFormat
from taut_deploy.compress.formats.integer import IntegerFormat, PackedIntegerFormat
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize.float4 import Float4Spec
from taut_deploy.compress.quantize.float8 import Float8Spec, Float8TensorSpec
from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.errors import RecipeError
from taut_deploy.recipe.schemes import SCHEMES
from taut_deploy.recipe.stages import Quantize

_GROUP_SIZES = (128, 64, 32)

# (stage, group size chosen, dtype of the model's weights and of plain scales) -> the format
_Make = Callable[[Quantize, int | None, torch.dtype], WeightFormat]


def weights_alone(
    bits: int, group_size: int | None, dtype: torch.dtype, *, symmetric: bool = True
) -> PackedIntegerFormat:
    """The format of integer weights whose inputs stay in 16 bits.

    Args:
        bits: of a weight.
        group_size: weights a scale covers along K; None for one scale a row.
        dtype: of the scales.
        symmetric: False adds zero points.
    """
    # Of 8 bits one code more is worth nothing; what activations multiply is left to their kernels.
    spec = GridSpec(bits, group_size, symmetric, dtype, signed_scales=symmetric and bits < 8)
    return PackedIntegerFormat(f"W{bits}A16", spec, Activations())


def _integer_weights(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    return weights_alone(stage.num_bits, group_size, dtype, symmetric=stage.symmetric)


def _int8_by_int8(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    return IntegerFormat(stage.scheme, GridSpec(8, group_size, True, dtype), Int8PerToken())


def _fp8_by_fp8(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    del group_size
    return Float8Format(stage.scheme, Float8Spec(dtype), Float8Dynamic())


def _fp8_by_fixed_fp8(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    del group_size
    return Float8Format(stage.scheme, Float8Spec(dtype), Float8Fixed(dtype))


def _fp8_by_tensor(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    del group_size
    return Float8TensorFormat(stage.scheme, Float8TensorSpec(dtype), Float8Fixed(dtype))


def _fp8_blocks(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    del group_size
    return Float8BlockFormat(stage.scheme, Float8Spec(dtype, BLOCK), Float8Dynamic(BLOCK))


def _int4_by_int8(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    return PackedIntegerFormat(stage.scheme, GridSpec(4, group_size, True, dtype), Int8PerToken())


def _int4_by_fp8(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    return PackedIntegerFormat(stage.scheme, GridSpec(4, group_size, True, dtype), Float8Dynamic())


def _nvfp4_alone(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    del group_size
    _require_bfloat16(stage, dtype)
    return Float4Format(stage.scheme, Float4Spec(16, powers_of_two=False), Activations())


def _mxfp4_alone(stage: Quantize, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    del group_size
    _require_bfloat16(stage, dtype)
    return Float4Format(stage.scheme, Float4Spec(32, powers_of_two=True), Activations())


def _require_bfloat16(stage: Quantize, dtype: torch.dtype) -> None:
    """Refuse what transformers would load and then not multiply: it reads FP4 as bfloat16."""
    if dtype is not torch.bfloat16:
        raise RecipeError(
            f"stages.quantize.scheme: {stage.scheme} is for models in bfloat16, this one is in "
            f"{str(dtype).removeprefix('torch.')}; store it in bfloat16 or choose W4A16"
        )


FORMATS: dict[str, _Make] = {
    "W8A8": _int8_by_int8,
    "W4A16": _integer_weights,
    "W8A16": _integer_weights,
    "W3A16": _integer_weights,
    "W2A16": _integer_weights,
    "W4A8": _int4_by_int8,
    "W4AFP8": _int4_by_fp8,
    "FP8": _fp8_by_fp8,
    "FP8-STATIC": _fp8_by_fixed_fp8,
    "FP8-TENSOR": _fp8_by_tensor,
    "FP8-BLOCK": _fp8_blocks,
    "NVFP4A16": _nvfp4_alone,
    "MXFP4A16": _mxfp4_alone,
}


def weight_format(
    stage: Quantize, input_sizes: Collection[int], dtype: torch.dtype
) -> WeightFormat:
    """The format a stage asks for, its group size chosen to divide every layer.

    Args:
        stage: of the recipe.
        input_sizes: K of the layers it stores.
        dtype: of the model's weights, which plain scales, factors and books have too.

    Raises:
        RecipeError: no allowed group size divides every K.
    """
    group = None
    if SCHEMES[stage.scheme].grouped:
        group = dividing_group_size(stage.method, stage.group_size, input_sizes)
    return FORMATS[stage.scheme](stage, group, dtype)


def dividing_group_size(
    method: str, asked: int | str | None, input_sizes: Collection[int]
) -> int | None:
    """The largest allowed group size up to the one asked for that divides every layer's input.

    Args:
        method: of the stage, for the message.
        asked: its ``group_size``; None or ``channel`` for one scale a row.
        input_sizes: K of the layers.

    Raises:
        RecipeError: there is none.
    """
    if not isinstance(asked, int):
        return None
    if (group := largest_dividing(asked, input_sizes)) is not None:
        return group
    sizes = ", ".join(str(k) for k in sorted(set(input_sizes)))
    raise RecipeError(
        f"stages.{method}.group_size: none of 128, 64, 32 up to {asked} divides "
        f"every layer input ({sizes}); put the odd layers into 'ignore'"
    )


def largest_dividing(asked: int, input_sizes: Collection[int]) -> int | None:
    """The largest allowed group size up to ``asked`` that divides every K; None if none does."""
    fitting = (
        group
        for group in _GROUP_SIZES
        if group <= asked and all(k % group == 0 for k in input_sizes)
    )
    return next(fitting, None)
