"""Our ops by name, with inputs drawn for given sizes.

A size is set as ``M=16``; one that is not set has the default of a Llama-3-8B layer. What looks
like a switch (``residual``, ``zeros``, ``scale``…) is a size of 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_bench import testing
from taut_bench.instruments import attention_cases, loss_cases, primitive_cases, training_cases
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.subject import Subject
from taut_bench.testing import scaled_mm as testing_scaled_mm
from taut_kernels.activation import silu_mul
from taut_kernels.gemm.scaled_mm import cpu_int8, cpu_linear
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.w4a16 import cpu as w4a16_cpu
from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.gemm.weight_only import cpu_linear as weight_only
from taut_kernels.norm import rms_norm
from taut_kernels.rope import op as rope
from taut_kernels.rowwise import quantize, row_quant

# Importing an op's module registers it.
_REGISTERING = (fp8, quantize, rms_norm, rope, silu_mul, w4a16, w4a16_cpu, w8a8)

Sizes = Mapping[str, int]
_EPSILON = 1e-5
_POSITIONS = 8192


@dataclass(frozen=True)
class OpCase:
    """How to call one op.

    Args:
        sizes: every size it knows, with its default.
        dtypes: of the activations, the default first.
        make: sizes, dtype and device → the arguments of the call.
        devices: kinds of device it runs on.
        call: a public function that can run its gradients; None calls `torch.ops.taut.<op>`, which
            is forward only.
    """

    sizes: dict[str, int]
    dtypes: tuple[torch.dtype, ...]
    make: Callable[[Sizes, torch.dtype, torch.device], tuple[Any, ...]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    call: Callable[..., Any] | None = None


def _draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _w4a16_case(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> testing.W4A16Case:
    return testing.make_w4a16_case(
        sizes["M"],
        sizes["N"],
        sizes["K"],
        sizes["G"],
        dtype=dtype,
        asymmetric=bool(sizes["zeros"]),
        with_bias=bool(sizes["bias"]),
        device=str(device),
    )


def _w4a16(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return _w4a16_case(sizes, dtype, device).operands()


def _w4a16_cpu(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    case = _w4a16_case(sizes, dtype, torch.device("cpu"))
    K = sizes["K"]
    packed = formats.repack_for_cpu(
        case.weight_packed, case.weight_scale, case.weight_zero_point, K
    )
    return (case.x, *packed, case.bias, K // packed[1].shape[0])


def _int8_cpu(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    case = testing_scaled_mm.make_scaled_mm_case(
        "w8a8_gemm", sizes["M"], sizes["N"], sizes["K"], out_dtype=dtype, device=str(device)
    )
    scales = case.weight_scale.reshape(-1)
    return (case.x, case.weight.float(), case.x_scale, scales, None, None, dtype)


def _int8_linear_cpu(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    if (reason := cpu_linear.why_not_here()) is not None:
        raise ValueError(f"{cpu_linear.OP} cannot run here: {reason}")
    M, N, K = sizes["M"], sizes["N"], sizes["K"]
    case = testing_scaled_mm.make_scaled_mm_case("w8a8_gemm", M, N, K, device=str(device))
    packed, sums = cpu_linear.pack(case.weight)
    scales, vnni = case.weight_scale.reshape(-1), cpu_linear.has_vnni()
    x = _draw((M, K), dtype, device)
    return (x, packed, scales, sums, None, None, None, True, vnni)


def _weight_only(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    if (reason := weight_only.why_not_here()) is not None:
        raise ValueError(f"{weight_only.OP} cannot run here: {reason}")
    case = _w4a16_case(sizes, dtype, torch.device("cpu"))
    packed = weight_only.pack(case.values, case.weight_scale, case.zeros, 4)
    return (case.x, *packed, case.bias, sizes["N"], int(weight_only.best_isa()))


def _scaled_mm(op: str) -> Callable[[Sizes, torch.dtype, torch.device], tuple[Any, ...]]:
    def make(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return testing_scaled_mm.make_scaled_mm_case(
            op,
            sizes["M"],
            sizes["N"],
            sizes["K"],
            with_bias=bool(sizes["bias"]),
            out_dtype=dtype,
            device=str(device),
        ).operands()

    return make


def _norm(last: Callable[[Sizes, torch.device], tuple[Any, ...]]) -> Any:
    def make(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        shape = (sizes["M"], sizes["N"])
        residual = _draw(shape, dtype, device) if sizes["residual"] else None
        weight = torch.ones(sizes["N"], dtype=dtype, device=device)
        return (_draw(shape, dtype, device), weight, residual, _EPSILON, *last(sizes, device))

    return make


def _silu(last: Callable[[Sizes, torch.device], tuple[Any, ...]]) -> Any:
    def make(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = _draw((sizes["M"], 2 * sizes["N"]), dtype, device)
        form = (1.702, 1.0, 7.0, True) if sizes["gpt_oss"] else (1.0, 0.0, None, False)
        return (x, *form, *last(sizes, device))

    return make


def _nothing(sizes: Sizes, device: torch.device) -> tuple[Any, ...]:
    return ()


def _quantised_dtype(sizes: Sizes, device: torch.device) -> tuple[Any, ...]:
    dtype = row_quant.INT8 if sizes["int8"] else row_quant.FP8
    if reason := row_quant.why_not_supported(dtype, device):
        raise InstrumentError(reason)
    return (dtype,)


def _rows(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return (_draw((sizes["M"], sizes["N"]), dtype, device), *_quantised_dtype(sizes, device))


def _given_scale(sizes: Sizes, device: torch.device) -> tuple[Any, ...]:
    if reason := row_quant.why_not_supported(row_quant.FP8, device):
        raise InstrumentError(reason)
    return (torch.full((1,), 0.01, device=device),)


def _rope(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    T, D = sizes["M"], sizes["D"]
    positions, cache = training_cases.positions_and_angles(sizes, dtype, device)
    q = _draw((T, sizes["Hq"], D), dtype, device)
    k = _draw((T, sizes["Hk"], D), dtype, device)
    return positions, q, k, cache, True


def _loss(
    name: str,
    sizes: dict[str, int],
    make: Callable[[Sizes, torch.dtype, torch.device], tuple[Any, ...]],
) -> OpCase:
    return OpCase(sizes, _FLOATS, make, call=loss_cases.LOSSES[name])


_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALF, torch.float32)
_PRODUCT = {"M": 16, "N": 4096, "K": 4096, "bias": 0}
_W4A16 = {**_PRODUCT, "G": 128, "zeros": 0}
_NORM = {"M": 1024, "N": 4096, "residual": 0}
_SILU = {"M": 1024, "N": 14336, "gpt_oss": 0}
_HEADS = {"M": 1024, "Hq": 32, "Hk": 8, "D": 128}
_IMAGE = {"B": 32, "C": 64, "side": 56}
_LOGITS = {"M": 1024, "V": 32000}
_PROJECTION = {"M": 1024, "H": 2048, "V": 32000}
_DISTILLATION = _PROJECTION | {"Ht": 4096}

OP_CASES: dict[str, OpCase] = {
    "w4a16_gemm": OpCase(_W4A16, _HALF, _w4a16),
    "w4a16_gemm_cpu": OpCase(_W4A16, (torch.bfloat16,), _w4a16_cpu, ("cpu",)),
    cpu_int8.OP: OpCase(_PRODUCT, (torch.bfloat16,), _int8_cpu, ("cpu",)),
    cpu_linear.OP: OpCase(_PRODUCT, (torch.bfloat16,), _int8_linear_cpu, ("cpu",)),
    weight_only.OP: OpCase(_W4A16, (torch.bfloat16,), _weight_only, ("cpu",)),
    "w8a8_gemm": OpCase(_PRODUCT, _HALF, _scaled_mm("w8a8_gemm")),
    "fp8_gemm": OpCase(_PRODUCT, _HALF, _scaled_mm("fp8_gemm")),
    "rms_norm": OpCase(_NORM, _FLOATS, _norm(_nothing)),
    "rms_norm_quant": OpCase(_NORM | {"int8": 0}, _FLOATS, _norm(_quantised_dtype)),
    "rms_norm_static_quant": OpCase(_NORM, _FLOATS, _norm(_given_scale)),
    "silu_mul": OpCase(_SILU, _FLOATS, _silu(_nothing)),
    "silu_mul_quant": OpCase(_SILU | {"int8": 0}, _FLOATS, _silu(_quantised_dtype)),
    "silu_mul_static_quant": OpCase(_SILU, _FLOATS, _silu(_given_scale)),
    "row_quant": OpCase({"M": 1024, "N": 4096, "int8": 0}, _FLOATS, _rows),
    "rope": OpCase(_HEADS, _FLOATS, _rope),
    "rope_apart": OpCase(_HEADS, _FLOATS, _rope),
    "cross_entropy": _loss("cross_entropy", _LOGITS, loss_cases.logits_and_target),
    "linear_cross_entropy": _loss(
        "linear_cross_entropy", _PROJECTION, loss_cases.projection_and_target
    ),
    "linear_kl": _loss("linear_kl", _DISTILLATION, loss_cases.two_projections),
    "linear_jsd": _loss("linear_jsd", _DISTILLATION, loss_cases.two_projections),
    "matmul": OpCase(_PRODUCT | {"version": 4}, _HALF, primitive_cases.matmul),
    "transpose": OpCase({"M": 4096, "N": 4096, "version": 4}, _FLOATS, primitive_cases.transpose),
    # version 0: what the shape allows
    "conv2d": OpCase(_IMAGE | {"N": 64, "version": 0}, _HALF, primitive_cases.conv2d),
    "max_pool2d": OpCase(_IMAGE, _FLOATS, primitive_cases.max_pool2d),
    "avg_pool2d": OpCase(_IMAGE, _FLOATS, primitive_cases.avg_pool2d),
    "reduce": OpCase({"M": 4096, "N": 4096, "version": 3}, _FLOATS, primitive_cases.reduce),
    **{
        name: OpCase(sizes, _HALF, make, call=attention_cases.CALLS.get(name))
        for name, (sizes, make) in attention_cases.CASES.items()
    },
    **{
        name: OpCase(sizes, _FLOATS, make, call=training_cases.CALLS[name])
        for name, (sizes, make) in training_cases.CASES.items()
    },
}
"""Name of an op, or of a loss, → how to call it."""


def from_op(
    name: str,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    backward: bool = False,
) -> Subject:
    """Build a subject from one of our ops.

    Args:
        name: a key of :data:`OP_CASES`.
        sizes: those that differ from the defaults.
        device: where to run.
        dtype: of the activations; None for the op's default.
        backward: a step runs the gradients as well; losses only.

    Raises:
        InstrumentError: an unknown op or size, a size the op has no layout for, a dtype or device
            it does not run on.
    """
    if name not in OP_CASES:
        raise InstrumentError(f"{name}: no such op; known are {', '.join(sorted(OP_CASES))}")
    case = OP_CASES[name]
    for size, value in sizes.items():
        if size not in case.sizes:
            raise InstrumentError(f"--shape {size}={value}: {name} has {_listed(case.sizes)}")
        if value < (1 if case.sizes[size] else 0):
            raise InstrumentError(f"--shape {size}={value}: must be positive")
    if backward and case.call is None:
        trainable = ", ".join(sorted(known for known, case in OP_CASES.items() if case.call))
        raise InstrumentError(f"--backward: {name} is forward only; of the ops {trainable} are not")
    if device.type not in case.devices:
        raise InstrumentError(f"{name}: runs on {', '.join(case.devices)} only, not on {device}")
    chosen = case.dtypes[0] if dtype is None else dtype
    if chosen not in case.dtypes:
        known = ", ".join(str(known).removeprefix("torch.") for known in case.dtypes)
        raise InstrumentError(f"--dtype {str(chosen).removeprefix('torch.')}: {name} takes {known}")
    try:
        args = case.make(case.sizes | dict(sizes), chosen, device)
    except (ValueError, RuntimeError) as error:
        raise InstrumentError(f"{name} {_listed(case.sizes | dict(sizes))}: {error}") from error
    set_sizes = ",".join(f"{size}={value}" for size, value in sizes.items())
    label = f"{name}[{set_sizes}]" if set_sizes else name
    call = case.call or getattr(torch.ops.taut, name)
    return Subject(label, call, args, device, backward=backward)


def _listed(sizes: Sizes) -> str:
    return ",".join(f"{name}={value}" for name, value in sizes.items())
