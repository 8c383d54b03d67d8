"""Every difference between the vLLM versions we support (0.26 to 0.33), in one file.

| | 0.26 | 0.32 |
|---|---|---|
| `MPLinearKernel._get_weight_params` | (w_q, w_s, w_zp, w_gidx) | (w_q, w_s, w_zp) |
| `MPLinearLayerConfig.has_g_idx` | present | absent: act-order is refused earlier |
| `MPLinearKernel.__init__` | takes `w_gidx_param_name` too | does not |

Neither version has a public way to put a kernel first: `register_linear_kernel` appends, and
Machete, Marlin or CPUWNA16 would win. We insert into the priority lists in place, since their
readers hold the list object.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_PLATFORMS = ("CUDA", "CPU")


class IncompatibleVllmError(RuntimeError):
    """This vLLM lacks an extension point the plugin needs."""


def kernel_weight_params(
    kernel: Any, layer: torch.nn.Module
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (weight, scale, zero point or None) of a layer, from either tuple shape.

    Args:
        kernel: an `MPLinearKernel`.
        layer: the layer it serves.
    """
    weight, scale, zero_point = kernel._get_weight_params(layer)[:3]
    return weight, scale, zero_point


def has_act_order(config: Any) -> bool:
    """Say whether an `MPLinearLayerConfig` asks for activation reordering (0.26 only)."""
    return bool(getattr(config, "has_g_idx", False))


def why_other_weights(config: Any, symmetric: Any, with_zeros: Any) -> str | None:
    """Say what an `MPLinearLayerConfig` asks beyond codes of a type, None where it is nothing.

    Args:
        config: vLLM's description of a layer's shard.
        symmetric: weight type without zero points.
        with_zeros: weight type with them.
    """
    if config.weight_type not in (symmetric, with_zeros):
        return f"no taut kernel for weights of type {config.weight_type} yet"
    if (config.weight_type == with_zeros) != config.zero_points:
        return f"weight type {config.weight_type} with zero_points={config.zero_points}"
    if has_act_order(config):
        return "activation reordering (g_idx) is not supported"
    if getattr(config, "out_type", None) not in (None, config.act_type):
        return f"output type {config.out_type} differs from activation type {config.act_type}"
    return None


def insert_first(
    kernel: type, selection: ModuleType, platforms: Sequence[str] = _PLATFORMS
) -> None:
    """Put a mixed-precision kernel first for some platforms, once.

    Args:
        kernel: subclass of `MPLinearKernel`.
        selection: `vllm.model_executor.kernels.linear`.
        platforms: names of vLLM's `PlatformEnum`.

    Raises:
        IncompatibleVllmError: the priority lists are not where we know them.
    """
    try:
        lists = selection._POSSIBLE_KERNELS
        targets = [lists[getattr(selection.PlatformEnum, name)] for name in platforms]
        triton_backend = selection._LINEAR_BACKEND_KERNEL_MAP["triton"]
    except (AttributeError, KeyError) as error:
        raise IncompatibleVllmError(
            f"vLLM's linear kernel lists are not where this plugin expects them: {error!r}"
        ) from error
    for kernels in targets:
        if kernel not in kernels:
            kernels.insert(0, kernel)
    # Without this, --linear-backend triton would filter us out.
    triton_backend.add(kernel)


def insert_scaled_mm_first(
    kernel: type, selection: ModuleType, kind: str, platform: str = "CUDA"
) -> None:
    """Put an 8-bit kernel first for a platform, once.

    Args:
        kernel: subclass of `Int8ScaledMMLinearKernel`, `FP8ScaledMMLinearKernel` or
            `Fp8BlockScaledMMLinearKernel`.
        selection: `vllm.model_executor.kernels.linear`.
        kind: ``INT8``, ``FP8`` or ``FP8_BLOCK``.
        platform: ``CUDA`` or ``CPU``.

    Raises:
        IncompatibleVllmError: the priority lists are not where we know them.
    """
    try:
        possible = getattr(selection, f"_POSSIBLE_{kind}_KERNELS")
        kernels = possible[getattr(selection.PlatformEnum, platform)]
        triton_backend = selection._LINEAR_BACKEND_KERNEL_MAP["triton"]
    except (AttributeError, KeyError) as error:
        raise IncompatibleVllmError(
            f"vLLM's {kind} kernel lists are not where this plugin expects them: {error!r}"
        ) from error
    if kernel not in kernels:
        kernels.insert(0, kernel)
    if platform == "CUDA":
        triton_backend.add(kernel)


def block_kernel_without(kernel: type, config: Any, selection: ModuleType) -> type:
    """Return the kernel vLLM would choose for FP8 with blocks of weights if ours were not there.

    Args:
        kernel: ours.
        config: an `FP8ScaledMMLinearLayerConfig`.
        selection: `vllm.model_executor.kernels.linear`.

    Raises:
        ValueError: vLLM has none for the layer.
    """
    possible = {
        platform: [other for other in kernels if other is not kernel]
        for platform, kernels in selection._POSSIBLE_FP8_BLOCK_KERNELS.items()
    }
    choose = selection.choose_scaled_mm_linear_kernel
    # Asked for since 0.32.
    named = {"quantization": "fp8_block_w8a8"}
    wanted = named if "quantization" in inspect.signature(choose).parameters else {}
    chosen: type = choose(config, possible, **wanted)
    return chosen


def register_ir_provider(
    op: Any,
    provider: str,
    implementation: Callable[..., Any],
    takes: Callable[..., bool],
    supported: bool,
    *,
    inplace: bool = False,
) -> None:
    """Register an implementation of one of vLLM's IR ops.

    Args:
        op: a `vllm.ir.op.IrOp`.
        provider: its name in ``--ir-op-priority``.
        implementation: with exactly the op's parameters.
        takes: likewise; says whether the implementation takes a call.
        supported: whether this platform runs it.
        inplace: whether it may overwrite the op's activations.

    Raises:
        IncompatibleVllmError: the op has other parameters than we know.
    """
    try:
        register = op.register_impl(
            provider, supported=supported, supports_args=takes, inplace=inplace
        )
        register(implementation)
    except (AttributeError, TypeError, ValueError) as error:
        raise IncompatibleVllmError(f"vLLM's IR op {op} is not the one we know: {error}") from error


def after_model_load(base_loader: Any, callback: Callable[[torch.nn.Module], None]) -> None:
    """Call back with each model once its weights are processed, before it serves.

    Args:
        base_loader: `vllm.model_executor.model_loader.base_loader.BaseModelLoader`.
        callback: may raise to refuse the model.

    Raises:
        IncompatibleVllmError: the loader has no `load_model`.
    """
    _call_after(base_loader, "load_model", "BaseModelLoader", callback)


def after_engine_start(stat_logger: Any, callback: Callable[[], None]) -> None:
    """Call back in the API server's process once its engine has loaded the model.

    vLLM has an entry point for stat loggers of others, but one that is merely installed undoes
    ``--disable-log-stats``; its own Prometheus logger is told the same moment.

    Args:
        stat_logger: `vllm.v1.metrics.loggers.PrometheusStatLogger`.
        callback: sets metrics of ours.

    Raises:
        IncompatibleVllmError: the logger has no `log_engine_initialized`.
    """
    name = "log_engine_initialized"
    _call_after(stat_logger, name, "PrometheusStatLogger", lambda _: callback())


def _call_after(owner: Any, name: str, described: str, callback: Callable[[Any], None]) -> None:
    """Have a method of a class of vLLM's call back with what it returns, once."""
    original = getattr(owner, name, None)
    if original is None:
        raise IncompatibleVllmError(f"vLLM's {described} has no {name}")
    if getattr(original, "_taut_callback", None) is not None:
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        callback(result)
        return result

    method._taut_callback = callback  # type: ignore[attr-defined]
    setattr(owner, name, method)


def register_attention_backend(registry: ModuleType, name: str, path: str) -> bool:
    """Register an attention backend under a name that vLLM keeps free, once.

    Args:
        registry: `vllm.v1.attention.backends.registry`.
        name: of the backend, a member of `AttentionBackendEnum`.
        path: of its class.

    Returns:
        Whether the name is ours; another plugin may have it.

    Raises:
        IncompatibleVllmError: the registry is not what we know.
    """
    try:
        backend = registry.AttentionBackendEnum[name]
        if backend.is_overridden():
            return bool(backend.get_path() == path)
        registry.register_backend(backend, path)
    except (AttributeError, TypeError, ValueError) as error:
        raise IncompatibleVllmError(
            f"vLLM's attention backends are not where this plugin expects them: {error!r}"
        ) from error
    return True


def keys_and_values(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return FlashAttention's cache as keys and values, [pages, page size, Hk, D].

    Args:
        kv_cache: [pages, Hk, page size, 2D], any strides: a key and its value are neighbours.
        head_dim: D.

    Raises:
        IncompatibleVllmError: it has another shape.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * head_dim:
        raise IncompatibleVllmError(
            f"vLLM's cache is not [pages, heads, page size, 2 x {head_dim}]: "
            f"{tuple(kv_cache.shape)}"
        )
    # The stride of a single head may be anything; 1 would be compiled in.
    single = kv_cache.shape[1] == 1
    both = kv_cache.squeeze(1).unsqueeze(2) if single else kv_cache.transpose(1, 2)
    return both[..., :head_dim], both[..., head_dim:]


def quantised_queries(query: Tensor, scale: Tensor) -> Tensor:
    """Quantise queries to fp8 as vLLM's attention layer does before FlashAttention 3.

    Args:
        query: [tokens, Hq, D].
        scale: one element.
    """
    from vllm import _custom_ops

    quantised: Tensor = _custom_ops.scaled_fp8_quant(query.flatten(1), scale)[0]
    return quantised.view(query.shape)
