"""The mixed-precision linear kernel vLLM chooses for W4A16 layers.

Holds no arithmetic: it converts the weights once after loading and calls `taut::w4a16_gemm` (CUDA),
`taut::weight_only_linear_cpu` or, where that is not faster, `taut::w4a16_gemm_cpu` (CPU). This
module imports vLLM; only :mod:`.registration` imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import MPLinearKernel
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.gemm.w4a16 import verdict as measured_w4a16
from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.gemm.w4a16.lookup import ONE_OF_EACH
from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.launch.compile_ahead import ask, warmed_up
from taut_kernels.vllm_plugin import compat, cpu_four_bits, known_answer
from taut_kernels.vllm_plugin.mode import requested_mode
from taut_kernels.vllm_plugin.selection import why_not_ours, why_not_preferred

ARRIVALS = "taut_arrivals"
WARM_UP_TOKENS = ONE_OF_EACH
CPU_TOKENS = (1, 16, 64)


def _replace(layer: torch.nn.Module, name: str, tensor: Tensor) -> None:
    # A plain Parameter: Dynamo does not trace vLLM's parameter classes.
    replace_parameter(layer, name, torch.nn.Parameter(tensor, requires_grad=False))


class TautW4A16LinearKernel(MPLinearKernel):  # type: ignore[misc]
    """W4A16 on our own kernels, symmetric or with zero points.

    The class name is unique on purpose: ``VLLM_DISABLED_KERNELS`` matches it.
    """

    isa: int | None = None
    """Of our product on a CPU; None where torch's serves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not current_platform.is_cpu():
            # Compiled while weights are read.
            here = torch.device("cuda")
            ask(lambda: self._call_every_tile(self._stand_in(here)), self._alike())

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least CUDA compute capability, ×10."""
        return 80

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Decide on one layer; a refusal carries its reason and vLLM asks the next kernel."""
        reason = refusal(c)
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Repack the layer's parameters from the disk layout, in place."""
        K, N = self.config.partition_weight_shape
        _to_disk_layout(getattr(layer, self.w_q_name))
        _to_disk_layout(getattr(layer, self.w_s_name))
        weight, scale, zero = compat.kernel_weight_params(self, layer)
        if not self.config.zero_points:
            zero = None  # GPTQ keeps one, filled with the middle, in symmetric layers too
        if zero is not None:
            _to_disk_layout(zero)
        stored = (weight.data, scale.data, _data(zero))
        if current_platform.is_cpu():
            weight, scale, zero = self._for_cpu(*stored, K)
        else:
            weight = formats_mma.repack_weight(weight.data, K)
            scale = formats_mma.repack_scale(scale.data.to(self.config.act_type))
            zero = None if zero is None else formats_mma.repack_zero_point(zero.data, N)
            arrivals = w4a16.make_arrivals(N, weight.device)
            layer.register_buffer(ARRIVALS, arrivals, persistent=False)
        _replace(layer, self.w_q_name, weight)
        _replace(layer, self.w_s_name, scale)
        if self.w_zp_name is not None:
            if zero is not None:
                _replace(layer, self.w_zp_name, zero)
            elif hasattr(layer, self.w_zp_name):
                setattr(layer, self.w_zp_name, None)
        if not current_platform.is_cpu():
            self._compile_every_tile(layer)
        self._check(layer, *stored)

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Compute the layer; x is [..., K], the result [..., N]."""
        K, N = self.config.partition_weight_shape
        weight, scale, zero = compat.kernel_weight_params(self, layer)
        rows = x.reshape(-1, K)
        # The operands were checked once at loading; the public functions would check them on every
        # call.
        if self.isa is not None:
            y = cpu_linear.multiply(rows, weight, scale, zero, bias, N, self.isa)
        elif x.device.type == "cpu":
            group = K // scale.shape[0]
            y = torch.ops.taut.w4a16_gemm_cpu.default(rows, weight, scale, bias, group)
        else:
            group = K if self.config.group_size == -1 else self.config.group_size
            arrivals = getattr(layer, ARRIVALS)
            y = torch.ops.taut.w4a16_gemm.default(rows, weight, scale, zero, bias, arrivals, group)
        result: Tensor = y.view(*x.shape[:-1], N)
        return result

    def _for_cpu(
        self, packed: Tensor, scale: Tensor, zero: Tensor | None, K: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Lay the weights out for the product that serves on this CPU."""
        if cpu_four_bits.why_ours() is None:
            return *formats.repack_for_cpu(packed, scale, zero, K), None
        self.isa = int(cpu_linear.best_isa())
        zeros = None if zero is None else formats.unpack_zero_point(zero, len(scale))
        return cpu_linear.pack(formats.unpack_weight(packed, K), scale, zeros, 4)

    def _compile_every_tile(self, layer: torch.nn.Module) -> None:
        """Run each kernel and tile once, so that no request waits for the compiler."""
        warmed_up(lambda: self._call_every_tile(layer), self._alike())

    def _call_every_tile(self, layer: torch.nn.Module) -> None:
        K, _ = self.config.partition_weight_shape
        device = getattr(layer, self.w_q_name).device
        # Only rank 0 of a row-parallel layer adds the bias, so a layer with one is called in both
        # ways.
        biases = {None, getattr(layer, "bias", None)}
        for M in WARM_UP_TOKENS:
            x = torch.zeros(M, K, dtype=self.config.act_type, device=device)
            for bias in biases:
                self.apply_weights(layer, x, bias)

    def _alike(self) -> tuple[Any, ...]:
        """Return what layers of the same forms have in common."""
        c = self.config
        return (*c.partition_weight_shape, c.group_size, c.zero_points, c.act_type)

    def _stand_in(self, device: torch.device) -> torch.nn.Module:
        """Return a layer with parameters of the right kind and size, without what they hold."""
        K, N = self.config.partition_weight_shape
        groups = 1 if self.config.group_size == -1 else K // self.config.group_size
        with torch.device("meta"):
            weight = formats_mma.repack_weight(torch.empty(N, K // 8, dtype=torch.int32), K)
            scale = formats_mma.repack_scale(torch.empty(N, groups, dtype=self.config.act_type))
            words = torch.empty(-(-N // 8), groups, dtype=torch.int32)
            zero = formats_mma.repack_zero_point(words, N) if self.config.zero_points else None
        layer = torch.nn.Module()
        made = {self.w_q_name: weight, self.w_s_name: scale, self.w_zp_name: zero}
        for name, like in made.items():
            if like is not None:
                setattr(layer, name, torch.empty_like(like, device=device))
        setattr(layer, ARRIVALS, w4a16.make_arrivals(N, device))
        return layer

    def _check(
        self, layer: torch.nn.Module, packed: Tensor, scale: Tensor, zero: Tensor | None
    ) -> None:
        """Multiply a known block, and compare with the weights as they lie on disk."""
        K, N = self.config.partition_weight_shape
        group = K // scale.shape[1]
        zeros = "" if zero is None else " with zero points"
        known_answer.check(
            type(self).__name__,
            f"W4A16 in groups of {group}{zeros}",
            (N, K),
            CPU_TOKENS if current_platform.is_cpu() else WARM_UP_TOKENS,
            lambda x: self.apply_weights(layer, x),
            lambda rows: formats.dequantise(packed, scale, zero, K, rows),
            known_answer.plain_block(K),
            self.config.act_type,
            packed.device,
        )


def _data(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.data


def _to_disk_layout(parameter: Any) -> None:
    """Bring GPTQ's and AWQ's [K/8, N] parameters to compressed-tensors' [N, K/8]."""
    packed = getattr(parameter, "packed_dim", None)
    if packed is None:
        permute_param_layout_(parameter, input_dim=1, output_dim=0)
    else:
        permute_param_layout_(
            parameter,
            input_dim=1,
            output_dim=0,
            packed_dim=1 if packed == parameter.input_dim else 0,
        )


def refusal(config: Any) -> str | None:
    """Say why our kernel does not apply to an `MPLinearLayerConfig`, None where it does.

    Args:
        config: vLLM's description of a layer's shard.
    """
    if reason := compat.why_other_weights(config, scalar_types.uint4b8, scalar_types.uint4):
        return reason
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return f"no taut kernel for {current_platform.device_type}"
    K, N = config.partition_weight_shape
    device = "cpu" if current_platform.is_cpu() else "cuda"
    weights = weight_format.of_layer(config.group_size, K, has_zeros=bool(config.zero_points))
    return why_not_ours(
        N, K, config.group_size, dtype=config.act_type, device=device
    ) or why_not_preferred(_gpu(), requested_mode(), N, K, weights)


def remark(config: Any) -> str | None:
    """Say what is known, or not known, against our kernel on a layer it serves.

    Args:
        config: vLLM's description of a layer's shard.

    Returns:
        One line, or None; always None on a shape or card nobody measured.
    """
    if current_platform.is_cpu():
        return cpu_four_bits.why_not_ours()
    K, N = config.partition_weight_shape
    group_size, dtype = config.group_size, config.act_type
    has_zeros = bool(config.zero_points)
    return measured_w4a16.remark(_gpu(), N, K, group_size, dtype, has_zeros=has_zeros)


def _gpu() -> str | None:
    if not current_platform.is_cuda():
        return None
    name: str = current_platform.get_device_name()
    return name
