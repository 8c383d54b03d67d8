"""Layers and models as vLLM holds them, on meta tensors: how they are loaded, how they are called.

For :mod:`warm_up_forms`. What is of vLLM's is real but for its quantisers and CUTLASS; our ops are
the entries CUDA tensors reach.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor import parameter
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearLayerConfig,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.models import gpt_oss
from vllm.model_executor.models.llama import LlamaMLP
from vllm.scalar_type import scalar_types

from taut_kernels.activation import silu_mul, silu_mul_launch
from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import padded_dim
from taut_kernels.attention.cache_write import op as cache_write
from taut_kernels.attention.decode import op as decode
from taut_kernels.gemm.w4a16 import dense as w4a16_dense
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.launch import launcher
from taut_kernels.norm import rms_norm, rms_norm_launch
from taut_kernels.rope import op as rope
from taut_kernels.rope import rope_launch
from taut_kernels.rowwise import quantize
from taut_kernels.vllm_plugin import compat, ir_ops, linear, scaled_mm, scaled_mm_op, warm_up_decode

BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
LLAMA, QWEN, SLICE = "Llama-3-8B", "Qwen-2.5-7B", "Llama-3-70B over 8 GPUs"
SHAPES = {
    LLAMA: ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    QWEN: ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    SLICE: ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
}
"""(N, K) of qkv, o, gate_up and down."""
BLOCKS = {LLAMA: (4096, 14336, 32, 8), QWEN: (3584, 18944, 28, 4), SLICE: (8192, 3584, 8, 1)}
"""Hidden size, intermediate size, heads and key heads; heads have 128 columns."""
META = torch.device("meta")
Call = Callable[[int], Any]
Prepare = Callable[[], Any]


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def frozen(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(empty(*shape, dtype=dtype), requires_grad=False)


def cuda_ops() -> dict[str, Any]:
    """`torch.ops.taut` as CUDA tensors see it."""

    def op(launch: Any) -> Any:
        """Return what is called as it is or by its overload's name."""
        packet: Any = functools.partial(launch)
        packet.default = launch
        return packet

    def norm(launch: Any) -> Any:
        packet = op(launch)
        packet.plain = rms_norm._without_residual(launch)
        return packet

    return {
        "w4a16_gemm": op(w4a16._launch_w4a16_gemm),
        "scaled_mm_by_tokens": op(scaled_mm_op._dispatch),
        "silu_mul": op(silu_mul._launch_silu_mul),
        "silu_mul_quant": op(silu_mul._launch_silu_mul_quant),
        "silu_mul_static_quant": op(silu_mul._launch_silu_mul_static_quant),
        "row_quant": op(quantize._launch_row_quant),
        "rope": op(rope._launch_rope),
        "rope_apart": op(rope._launch_rope_apart),
        "rms_norm": norm(rms_norm._launch_rms_norm),
        "rms_norm_quant": op(rms_norm._launch_rms_norm_quant),
        "rms_norm_static_quant": norm(rms_norm._launch_rms_norm_static_quant),
    }


def pretend_cuda() -> None:
    """Replace what vLLM and our ops need a card for, in this process."""
    for name, op in cuda_ops().items():
        setattr(torch.ops.taut, name, op)
    platform = linear.current_platform
    platform.is_cpu, platform.is_cuda = lambda: False, lambda: True
    for module in (parameter, vllm_linear):  # they ask for their place among ranks
        module.get_tensor_model_parallel_rank = lambda: 0
        module.get_tensor_model_parallel_world_size = lambda: 1
    scaled_mm_op._cutlass = lambda x, weight_t, *rest: empty(
        x.shape[0], weight_t.shape[1], dtype=rest[-1]
    )
    for cutlass in (
        scaled_mm.CutlassInt8ScaledMMLinearKernel,
        scaled_mm.CutlassFP8ScaledMMLinearKernel,
    ):
        cutlass.apply_weights = lambda *operands: None
    scaled_mm._custom_ops.scaled_int8_quant = int8_quant
    linear.ask = lambda run, alike: None
    stand_in = linear.TautW4A16LinearKernel._stand_in
    linear.TautW4A16LinearKernel._stand_in = lambda self, device: stand_in(self, META)
    # Shapes only: torch takes its time over meta tensors. The dense product is cuBLAS'.
    formats_mma.repack_weight = repacked_weight
    formats_mma.repack_scale = repacked_scale
    formats_mma.repack_zero_point = lambda packed, N: empty(
        N // 16, -(-packed.shape[1] // 4), 8, dtype=torch.int32
    )
    w4a16_dense._linear = lambda x, weight, bias, y: None


def use_card(name: str) -> None:
    """Let every table and choice be that card's."""
    launcher.gpu_name = lambda device: name
    for plan in (
        w4a16._plan,
        rms_norm_launch.plan,
        silu_mul_launch.plan,
        quantize._plan,
        rope_launch.plan,
    ):
        plan.cache_clear()  # a process has one card
    linear.current_platform.get_device_name = lambda: name


def repacked_weight(packed: torch.Tensor, K: int) -> torch.Tensor:
    return empty(packed.shape[0] // 16, K // 64, 32, 4, dtype=torch.int32)


def repacked_scale(scale: torch.Tensor) -> torch.Tensor:
    N, groups = scale.shape
    return empty(N // 16, -(-groups // 4), 8, 4, 2, dtype=scale.dtype)


def int8_quant(x: Any, scale: Any, azp: Any, symmetric: bool) -> tuple[Any, Any, Any]:
    """Return what vLLM's op of that name returns."""
    M = x.shape[0]
    if scale is not None:
        return torch.empty_like(x, dtype=INT8), scale, azp
    found = None if symmetric else empty(M, 1, dtype=torch.int32)
    return torch.empty_like(x, dtype=INT8), empty(M, 1, dtype=torch.float32), found


def w4a16_kernel(
    N: int, K: int, dtype: torch.dtype, group_size: int, zero_points: bool
) -> linear.TautW4A16LinearKernel:
    """Return the kernel of a layer, constructed as vLLM does."""
    of = scalar_types.uint4 if zero_points else scalar_types.uint4b8
    config = MPLinearLayerConfig((K, N), (K, N), of, dtype, group_size, zero_points)
    zeros = "weight_zero_point" if zero_points else None
    kernel = linear.TautW4A16LinearKernel(config, "weight_packed", "weight_scale", zeros)
    kernel.w_gidx_name = None
    return kernel


def w4a16_layer(
    N: int, K: int, dtype: torch.dtype, group_size: int, zero_points: bool
) -> tuple[Prepare, list[Call]]:
    """Return how a layer with a bias is prepared, and the ways it is called."""
    kernel = w4a16_kernel(N, K, dtype, group_size, zero_points)
    groups = 1 if group_size == -1 else K // group_size
    layer = torch.nn.Module()
    places = {"input_dim": 1, "output_dim": 0, "weight_loader": lambda *_: None}
    words = {"packed_factor": 8, **places}
    layer.weight_packed = parameter.PackedvLLMParameter(
        data=empty(N, K // 8, dtype=torch.int32), packed_dim=1, **words
    )
    layer.weight_scale = parameter.GroupQuantScaleParameter(
        data=empty(N, groups, dtype=dtype), **places
    )
    if zero_points:
        layer.weight_zero_point = parameter.PackedvLLMParameter(
            data=empty(N // 8, groups, dtype=torch.int32), packed_dim=0, **words
        )
    layer.bias = frozen(N, dtype=dtype)
    return lambda: kernel.process_weights_after_loading(layer), called(kernel, layer, K, dtype)


def called(kernel: Any, layer: Any, K: int, dtype: torch.dtype) -> list[Call]:
    """Return calls of a layer without and with its bias, then with rows cut out of wider ones."""

    def with_bias(M: int) -> Any:
        rows = empty(M, K + 256, dtype=dtype)[:, 128 : 128 + K]
        kernel.apply_weights(layer, rows, layer.bias)

    return [lambda M: kernel.apply_weights(layer, empty(M, K, dtype=dtype)), with_bias]


def int8_layer(
    N: int, K: int, dtype: torch.dtype, static: bool, symmetric: bool
) -> tuple[Prepare, list[Call]]:
    """Return as :func:`w4a16_layer`."""
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = frozen(N, K, dtype=INT8), frozen(N, 1, dtype=torch.float32)
    layer.bias, layer.azp_adj = frozen(N, dtype=dtype), None
    layer.logical_widths, layer.params_dtype = [N], dtype
    layer.input_scale = frozen(1, dtype=torch.float32) if static else None
    layer.input_zero_point = frozen(1, dtype=INT8) if static and not symmetric else None
    config = Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=static, is_channelwise=True, input_symmetric=symmetric
    )
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    kernel = scaled_mm.TautInt8ScaledMMLinearKernel.__new__(scaled_mm.TautInt8ScaledMMLinearKernel)
    kernel.config, kernel.layer_param_names = config, names
    return lambda: kernel.process_weights_after_loading(layer), called(kernel, layer, K, dtype)


def fp8_layer(
    N: int, K: int, dtype: torch.dtype, static: bool, channel: bool
) -> tuple[Prepare, list[Call]]:
    """Return as :func:`w4a16_layer`."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(empty(N, K, dtype=FP8).t(), requires_grad=False)
    layer.weight_scale = frozen(N if channel else 1, 1, dtype=torch.float32)
    layer.bias = frozen(N, dtype=dtype)
    layer.input_scale = frozen(1, dtype=torch.float32) if static else None
    layer.input_scale_ub = None
    by_token = quant_utils.kFp8DynamicTokenSym
    kernel = scaled_mm.TautFP8ScaledMMLinearKernel.__new__(scaled_mm.TautFP8ScaledMMLinearKernel)
    kernel.config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=quant_utils.kFp8StaticChannelSym,
        activation_quant_key=quant_utils.kFp8StaticTensorSym if static else by_token,
        weight_shape=(N, K),
        input_dtype=dtype,
        out_dtype=dtype,
    )
    kernel.layer_param_names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]

    def quant_fp8(x: Any, scale: Any, upper_bound: Any) -> tuple[Any, Any]:
        found = empty(x.shape[0], 1, dtype=torch.float32) if scale is None else scale
        return torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format), found

    kernel.quant_fp8 = quant_fp8
    return lambda: kernel.process_weights_after_loading(layer), called(kernel, layer, K, dtype)


def decode_attention(form: warm_up_decode.DecodeForm, most: int) -> tuple[Prepare, list[Call]]:
    """Return as :func:`w4a16_layer`; what batches of up to `most` and their contexts ask for."""

    def prepare() -> None:
        warm_up_decode._compiled.clear()
        warm_up_decode.compile_decode(form, most, META)

    def call(B: int, longest: int, heads_first: bool) -> None:
        width = (form.heads + 2 * form.kv_heads) * form.head_dim
        q = empty(B, width, dtype=form.dtype)[:, : form.heads * form.head_dim]
        q = q.unflatten(1, (form.heads, form.head_dim)).unsqueeze(1)
        heads, keys = (form.kv_heads, form.page_size)
        shape = (999, heads, keys) if heads_first else (999, keys, heads)
        kv = empty(*shape, 2 * form.head_dim, dtype=form.cache_dtype)
        kv = kv if heads_first else kv.transpose(1, 2)
        k, v = compat.keys_and_values(kv, form.head_dim)
        scale = empty(dtype=torch.float32) if form.cache_dtype == FP8 else None
        table = empty(B, -(-longest // form.page_size), dtype=torch.int32)
        lens, arrivals = empty(B, dtype=torch.int32), empty(B * form.heads, dtype=torch.int32)
        settings = decode.Settings(table, lens, scale, scale, arrivals, longest, form.window, 0.1)
        gpu, dim = launcher.gpu_name(q.device), padded_dim(form.head_dim)
        load = decode.load(q, k, settings)
        tile, splits, shares = attention_tiles.bounded_decode(
            gpu, dim, form.cache_dtype.itemsize, *load, B
        )
        out = empty(B, 1, form.heads, form.head_dim, dtype=form.dtype)
        decode.launch(tile, q, k, v, settings, splits, out, shares)

    def update(B: int, heads_first: bool, turned: bool) -> None:
        """Write as many tokens, cut out of a projection or (a turned key) not, and padding."""
        dim, kv_heads = form.head_dim, form.kv_heads
        wide = empty(B + 3, (form.heads + 2 * kv_heads) * dim, dtype=form.dtype)
        new = [
            wide[:, at * dim : (at + kv_heads) * dim].unflatten(1, (kv_heads, dim))
            for at in (form.heads, form.heads + kv_heads)
        ]
        if turned:
            new[0] = empty(B + 3, kv_heads, dim, dtype=form.dtype)
        shape = (999, kv_heads, form.page_size) if heads_first else (999, form.page_size, kv_heads)
        kv = empty(*shape, 2 * dim, dtype=form.cache_dtype)
        caches = compat.keys_and_values(kv if heads_first else kv.transpose(1, 2), dim)
        scale = empty(dtype=torch.float32) if form.cache_dtype == FP8 else None
        cache_write.launch(*new, *caches, empty(B, dtype=torch.int64), scale, scale)
        # One token alone: torch may give its only row any stride.
        single = [x.as_strided((1, kv_heads, dim), (1, dim, 1)) for x in new]
        cache_write.launch(*single, *caches, empty(1, dtype=torch.int64), scale, scale)

    contexts = (1, 64, 130, 1024, 1500, 8192, 131072)
    return prepare, [
        lambda B, n=n, heads_first=heads_first: call(B, n, heads_first)
        for n, heads_first in itertools.product(contexts, (False, True))
    ] + [
        lambda B, heads_first=heads_first, turned=turned: update(B, heads_first, turned)
        for heads_first, turned in itertools.product((False, True), repeat=2)
    ]


class InnerAttention(torch.nn.Module):
    """What vLLM's `Attention` has for the warm-up."""

    def __init__(self, heads: int, *_: Any, num_kv_heads: int, **more: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, num_kv_heads
        self.kv_sharing_target_layer_name = more.get("kv_sharing_target_layer_name")


class Attention(torch.nn.Module):
    """What an attention of vLLM's models has for its rotary embedding."""

    def __init__(
        self, heads: int, kv_heads: int, dtype: torch.dtype, apart: bool, shares: str | None = None
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, 128
        rotary = op_registry_oot["RotaryEmbedding"]
        self.rotary_emb = rotary(128, 128, 8192, 1e4, True, dtype)
        self.rotary_emb.apart = apart  # as where vLLM compiles
        names = {"num_kv_heads": kv_heads, "kv_sharing_target_layer_name": shares}
        self.attn = InnerAttention(heads, **names)


def gpt_oss_attention(heads: int, kv_heads: int) -> torch.nn.Module:
    """Build vLLM's own: other names of heads, angles in fp32."""
    scaling = {"factor": 32.0, "original_max_position_embeddings": 4096}
    scaling |= {"rope_theta": 1.5e5, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = SimpleNamespace(
        head_dim=64, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=128,
        max_position_embeddings=8192, rope_parameters=scaling, sliding_window=128,
    )  # fmt: skip
    gpt_oss.Attention = InnerAttention
    gpt_oss.get_tensor_model_parallel_world_size = lambda: 1
    rotary_embedding._ROPE_DICT.clear()  # one of another model's type has the same key
    return gpt_oss.OAIAttention(config, prefix="layers.0.attn")


class ClampedMlp(torch.nn.Module):
    """An MLP with gpt-oss's activation, and with names other than Llama's."""

    def __init__(self, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.merged_proj = torch.nn.Module()
        self.merged_proj.output_size_per_partition = 2 * columns
        self.merged_proj.output_sizes, self.merged_proj.params_dtype = [columns] * 2, dtype
        self.act = SwigluOAIAndMul()


def block(name: str, dtype: torch.dtype, quantised: torch.dtype | None) -> torch.nn.ModuleDict:
    """Build what the warm-up recognises of a model: norms and activations of all kinds."""
    hidden, intermediate, heads, kv_heads = BLOCKS[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with META:
        parts = torch.nn.ModuleDict(
            {
                "norm": RMSNorm(hidden),
                "gemma": GemmaRMSNorm(hidden),
                "wide": RMSNorm(hidden, dtype=torch.float32),
                "weightless": RMSNorm(hidden, has_weight=False),
                "attention": Attention(heads, kv_heads, dtype, apart=False),
                "compiled": Attention(heads, kv_heads, dtype, apart=True),
                "shared": Attention(heads, kv_heads, dtype, apart=True, shares="layers.0.attn"),
                "oss": gpt_oss_attention(heads, kv_heads),
                "mlp": LlamaMLP(hidden, intermediate, "silu"),
                "clamped": ClampedMlp(intermediate, dtype),
                "o_proj": vllm_linear.RowParallelLinear(heads * 128, hidden, bias=False),
                "replicated": vllm_linear.ReplicatedLinear(hidden, 64, bias=False),
            }
        )
    torch.set_default_dtype(before)
    if quantised is not None:
        for layer in ("o_proj", "replicated"):
            parts[layer].weight = frozen(1, 1, dtype=quantised)
    if quantised is FP8:
        parts["mlp"].input_scale = frozen(1, dtype=torch.float32)
    return parts


def norm_calls(name: str, dtype: torch.dtype, quantised: torch.dtype | None) -> list[Call]:
    """Return the calls of norms that vLLM's graph and our pass over it make."""
    hidden, ops = BLOCKS[name][0], torch.ops.taut
    weights = [empty(hidden, dtype=dtype), empty(hidden, dtype=torch.float32), None]
    scale = empty(1, dtype=torch.float32)

    def plain(M: int) -> None:
        for weight in weights:
            ir_ops.rms_norm(empty(M, hidden, dtype=dtype), weight, 1e-5)
            ir_ops.rms_norm(empty(M, 2 * hidden, dtype=dtype)[:, hidden:], weight, 1e-5)
            operands = (empty(M, hidden, dtype=dtype), empty(M, hidden, dtype=dtype), weight)
            ir_ops.fused_add_rms_norm(*operands, 1e-5)

    def quantising(M: int) -> None:
        x = empty(M, hidden, dtype=dtype)
        for weight, residual in itertools.product(weights, (None, torch.empty_like(x))):
            ops.rms_norm_quant(x, weight, residual, 1e-5, quantised)
            if quantised is FP8:
                ops.rms_norm_static_quant.default(x, weight, residual, 1e-5, scale)

    return [plain] if quantised is None else [plain, quantising]


def input_calls(name: str, dtype: torch.dtype, quantised: torch.dtype | None) -> list[Call]:
    """Return the calls of quantisation alone: of attention's output, of a norm with two readers."""
    hidden, _, heads, _ = BLOCKS[name]

    def quantising(M: int) -> None:
        torch.ops.taut.row_quant(empty(M, heads * 128, dtype=dtype), quantised)
        torch.ops.taut.row_quant(empty(M, hidden, dtype=dtype), quantised)

    return [] if quantised is None else [quantising]


def activation_calls(
    model: Any, name: str, dtype: torch.dtype, quantised: torch.dtype | None
) -> list[Call]:
    """Return the calls of activations and of the rotary embeddings."""
    _, columns, heads, kv_heads = BLOCKS[name]
    ops, scale = torch.ops.taut, empty(1, dtype=torch.float32)

    def plain(M: int) -> None:
        x = empty(M, 2 * columns, dtype=dtype)
        model["mlp"].act_fn.forward_cuda(x)
        model["clamped"].act.forward_cuda(x)

    def quantising(M: int) -> None:
        x = empty(M, 2 * columns, dtype=dtype)
        for form in ((1.0, 0.0, None, False), (1.702, 1.0, 7.0, True)):
            ops.silu_mul_quant(x, *form, quantised)
            if quantised is FP8:
                ops.silu_mul_static_quant(x, *form, scale)

    def rotating(M: int) -> None:
        qkv = empty(M, (heads + 2 * kv_heads) * 128, dtype=dtype)
        q, k, _ = qkv.split([heads * 128, kv_heads * 128, kv_heads * 128], dim=1)
        positions = empty(M, dtype=torch.int64)
        for attention in ("attention", "compiled"):
            model[attention].rotary_emb.forward_cuda(positions, q, k)
        model["shared"].rotary_emb.forward_cuda(positions, q.contiguous(), None)
        narrow = empty(M, (heads + 2 * kv_heads) * 64, dtype=dtype)
        q, k, _ = narrow.split([heads * 64, kv_heads * 64, kv_heads * 64], dim=1)
        model["oss"].rotary_emb.forward_cuda(positions, q, k)

    return [plain, rotating] if quantised is None else [plain, rotating, quantising]
