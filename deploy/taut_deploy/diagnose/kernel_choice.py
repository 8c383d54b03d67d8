"""Which kernel a quantised layer runs on in a worker here, and what is against ours.

Every answer is a pair: the kernel's name, and a reason or remark, empty where there is none.
"""

from dataclasses import dataclass
from typing import Any, Literal

from taut_deploy import host
from taut_deploy.diagnose.layer_schemes import LayerScheme
from taut_deploy.diagnose.other_rounding import installed_vllm, why_other_rounding

# On a CPU a worker takes the faster of two products as it starts; asking here would compile one.
_OUR_KERNEL = {
    ("W4A16", "cpu"): "taut::weight_only_linear_cpu or torch's int4",
    ("W4A16", "cuda"): "taut::w4a16_gemm",
    ("W8A8", "cuda"): "taut::w8a8_gemm",
    ("FP8", "cuda"): "taut::fp8_gemm",
    ("FP8 by blocks", "cuda"): "taut::fp8_gemm",
}
THEIR_KERNEL = "vLLM's own"
UNKNOWN_KERNEL = "not judged"
REFUSED = "REFUSED by taut worker"
"""How the reason begins for a layer that no worker would load."""
_EIGHT_BIT_CAPABILITY = (9, 0)
CARDS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
"""Cards that can be asked about from anywhere, by the names torch has for them."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What decides a layer's kernel in a worker, apart from the layer.

    Attributes:
        gpu: name of the card, None on a CPU.
        mode: value of ``TAUT_KERNELS``.
        half: whether it computes in fp16.
        fused: whether fused ops are used by default.
        capability: compute capability of the card; None asks the card here.
    """

    gpu: str | None
    mode: str
    half: bool = False
    fused: bool = False
    capability: tuple[int, int] | None = None

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """``cuda`` or ``cpu``."""
        return "cuda" if self.gpu else "cpu"


def engine_here(*, half: bool, suited: bool) -> Engine:
    """Return the engine that a worker would be on this machine.

    Args:
        half: whether the model's own type is fp16: on a CPU a worker takes bf16 all the same.
        suited: whether fused ops suit the model, so that cards with measured engines use them.
    """
    from taut_kernels.for_deploy import requested_mode, used_by_default

    gpu = host.gpu_name()
    fused = suited and used_by_default(gpu)
    return Engine(gpu, requested_mode(), half and gpu is not None, fused)


def engine_of(served_by: str, *, half: bool, suited: bool) -> Engine:
    """Return the engine that a worker would be on this machine or another.

    Args:
        served_by: ``here``, ``cpu`` or a key of :data:`CARDS`.
        half: whether the model's own type is fp16.
        suited: whether fused ops suit the model.
    """
    from taut_kernels.for_deploy import requested_mode, used_by_default

    if served_by == "here":
        return engine_here(half=half, suited=suited)
    if served_by == "cpu":
        return Engine(None, requested_mode())
    gpu = CARDS[served_by]
    fused = suited and used_by_default(gpu)
    return Engine(gpu, requested_mode(), half, fused, _EIGHT_BIT_CAPABILITY)


def choose_kernel(
    name: str, layer: LayerScheme, shape: tuple[int, int], engine: Engine
) -> tuple[str, str]:
    """Return which kernel a layer runs on, and what is against ours there.

    Args:
        name: module name, for example ``model.layers.0.mlp.down_proj``.
        layer: how it is quantised.
        shape: [N, K] as vLLM builds it.
        engine: the worker's.
    """
    from taut_kernels.for_deploy import layer_description as told

    if not layer.judged:
        return UNKNOWN_KERNEL, layer.obstacle or ""
    if (never_ours := _never_ours(name, layer, engine)) is not None:
        return THEIR_KERNEL, never_ours
    if layer.name in told.SERVED:
        return told.SERVED[layer.name] if engine.mode != "off" else _refused_without_plugin()
    if layer.obstacle is not None:
        otherwise = why_other_rounding(layer, engine.device, installed_vllm(engine.device))
        return THEIR_KERNEL, "; ".join(filter(None, (layer.obstacle, otherwise)))
    if layer.name in ("W8A8", "W8A16") and engine.device == "cpu":
        return _choose_eight_bits_on_cpu(layer, shape, engine.mode)
    ours = _OUR_KERNEL.get((layer.name, engine.device))
    if ours is None:
        return THEIR_KERNEL, f"no taut kernel for {layer.name} on {engine.device} yet"
    if engine.mode == "off":
        return THEIR_KERNEL, "TAUT_KERNELS=off"
    if layer.name == "FP8 by blocks":
        return _choose_blocks(ours, shape, engine)
    if layer.name in ("W8A8", "FP8"):
        return _choose_eight_bit(ours, layer.name, shape, engine)
    return _choose_four_bit(ours, layer, shape, engine)


def _never_ours(name: str, layer: LayerScheme, engine: Engine) -> str | None:
    if unserved := layer.unserved.why(name, engine.device):
        return f"{REFUSED}: {unserved}"
    if ".experts." in name:
        return "one of many experts, which vLLM multiplies in one kernel of its own"
    return None


def _refused_without_plugin() -> tuple[str, str]:
    return THEIR_KERNEL, f"{REFUSED}: only taut's plugin loads it; leave out off"


def _choose_int8_on_cpu(mode: str) -> tuple[str, str]:
    """W8A8 on a CPU: vLLM's product where it is right."""
    from taut_kernels.for_deploy import why_int8_wrong

    wrong = why_int8_wrong()
    if wrong is None:
        return THEIR_KERNEL, "no taut kernel for W8A8 on cpu where vLLM's product is right"
    if mode == "off":
        return THEIR_KERNEL, f"{REFUSED}: {wrong}"
    return "TautCPUInt8ScaledMMLinearKernel", wrong


def _choose_eight_bits_on_cpu(
    layer: LayerScheme, shape: tuple[int, int], mode: str
) -> tuple[str, str]:
    """W8A8 on a CPU, or W8A16, for which vLLM has no kernel."""
    if layer.name == "W8A8":
        return _choose_int8_on_cpu(mode)
    from taut_kernels.for_deploy import why_not_packed

    if mode == "off":
        return _refused_without_plugin()
    groups = 1 if layer.group_size == -1 else shape[1] // layer.group_size
    if reason := why_not_packed(shape[1], groups, 8):
        return "vLLM's bf16 product", f"{reason}: dequantised at load, no memory saved"
    # Which of the two is measured as a worker starts; asking here would compile ours.
    return "taut::weight_only_linear_cpu or vLLM's bf16, dequantised", ""


def _choose_four_bit(
    ours: str, layer: LayerScheme, shape: tuple[int, int], engine: Engine
) -> tuple[str, str]:
    """W4A16, where a layer is ours at every number of tokens or at none."""
    import torch

    from taut_kernels.for_deploy import of_layer, remark, why_not_ours, why_not_preferred

    group = layer.group_size
    weights = of_layer(group, shape[1], has_zeros=layer.zero_points)
    dtype = torch.float16 if engine.half else torch.bfloat16
    reason = why_not_ours(*shape, group, dtype=dtype, device=engine.device)
    if reason := reason or why_not_preferred(engine.gpu, engine.mode, *shape, weights):
        return THEIR_KERNEL, reason
    return ours, remark(engine.gpu, *shape, group, dtype, has_zeros=layer.zero_points) or ""


def _wrong_capability(engine: Engine) -> str | None:
    """Say why the card runs no 8-bit kernel of ours, None where it does."""
    import torch

    capability = engine.capability or torch.cuda.get_device_capability()
    if capability == _EIGHT_BIT_CAPABILITY:
        return None
    got = "".join(map(str, capability))
    return f"taut's 8-bit kernels are for compute capability 90, got {got}"


def _choose_blocks(ours: str, shape: tuple[int, int], engine: Engine) -> tuple[str, str]:
    """FP8 with blocks of weights, where each call chooses by its number of tokens."""
    from taut_kernels.for_deploy import block_scaled_mm_op

    asked = (engine.gpu, *shape, engine.mode)
    if reason := _wrong_capability(engine) or block_scaled_mm_op.why_not_at_all(*asked):
        return THEIR_KERNEL, reason
    why = block_scaled_mm_op.why_partly(*asked)
    return _at_some_tokens(ours, why)


def _choose_eight_bit(
    ours: str, scheme: str, shape: tuple[int, int], engine: Engine
) -> tuple[str, str]:
    """Int8 and FP8, where each call chooses by its number of tokens."""
    import torch

    from taut_kernels.for_deploy import scaled_mm_op

    if reason := _wrong_capability(engine):
        return THEIR_KERNEL, reason
    dtype = torch.int8 if scheme == "W8A8" else torch.float8_e4m3fn
    asked: tuple[Any, ...] = (dtype, engine.gpu, *shape, engine.mode)
    why = scaled_mm_op.why_partly(*asked, in_layer=engine.fused)
    otherwise = scaled_mm_op.why_partly(*asked, in_layer=not engine.fused)
    kernel, remark = _at_some_tokens(ours, why)
    if reason := scaled_mm_op.why_not_at_all(*asked):
        kernel, remark = THEIR_KERNEL, reason
    if why != otherwise:
        flag = "--no-fused-ops" if engine.fused else "--fused-ops"
        remark += f"; with {flag}: {otherwise or 'ours at every number of tokens'}"
    return kernel, remark.removeprefix("; ")


def _at_some_tokens(ours: str, why: str | None) -> tuple[str, str]:
    """Name both kernels where some numbers of tokens are not ours, with the reason."""
    return (ours, "") if why is None else (f"{ours} + {THEIR_KERNEL}", why)
