"""Which of vLLM's norms, activations and rotary embeddings run on our kernels, and why.

Two places decide. The plugin registers IR providers and replaces `CustomOp` classes in every worker
process (:func:`install`, which imports vLLM); the launcher passes :func:`engine_options`, without
which vLLM's own priority and passes stay. ``TAUT_KERNELS=prefer`` does either only on a card whose
measured table ships, ``require`` on every CUDA device. Linear layers are decided elsewhere
(:mod:`.selection`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taut_kernels.launch import tile_tables
from taut_kernels.rowwise import tiles as tiles_fused

if TYPE_CHECKING:
    import torch

PASS = "taut_kernels.fuse_for_vllm"  # noqa: S105 (an Inductor pass, not a word of entry)

_ENGINES_MEASURED = frozenset({"NVIDIA H200", "NVIDIA H100 80GB HBM3"})
"""Cards on which engines of W4A16, FP8 and int8 with and without them were timed, of Llama-3-8B's
shape (kernels/README.md)."""


def used_by_default(gpu: str | None) -> bool:
    """Say whether a worker whose model suits them uses fused ops without being told to.

    Args:
        gpu: as for :func:`why_not_fused_ops`.
    """
    return gpu in _ENGINES_MEASURED


def why_not_fused_ops(gpu: str | None, mode: str) -> str | None:
    """Say why a worker keeps vLLM's own norms and activations.

    Args:
        gpu: card name as `torch.cuda.get_device_name` spells it, None without CUDA.
        mode: value of ``TAUT_KERNELS``.

    Returns:
        A reason, or None where ours are used.
    """
    if mode == "off":
        return "TAUT_KERNELS=off"
    if gpu is None:
        return "no CUDA device: vLLM's CPU graph is compiled as a whole"
    if mode == "prefer" and tile_tables.of_card(tiles_fused.tables(), gpu) is None:
        return f"not measured against vLLM's on {gpu}; TAUT_KERNELS=require runs them"
    return None


def engine_options(gpu: str | None, mode: str) -> dict[str, dict[str, Any]]:
    """Return what vLLM has to be told beside loading the plugin.

    vLLM's own norm and activation fusions are turned off: they know fp8 only and would take the
    pairs ours fuses. Its all-reduce with a norm behind it (FlashInfer's, between cards) reads the
    residual before it waits for the kernel in front: behind ours, which let it start early, that
    may be too soon. ``+quant_fp8`` keeps fp8 quantisation an op that can be found in the graph.

    Args:
        gpu: as for :func:`why_not_fused_ops`.
        mode: likewise.

    Returns:
        Flags and their JSON values; empty where ours are not used.
    """
    if why_not_fused_ops(gpu, mode) is not None:
        return {}
    return {
        "--ir-op-priority": {"rms_norm": ["taut"], "fused_add_rms_norm": ["taut"]},
        "--compilation-config": {
            "custom_ops": ["+quant_fp8"],
            "inductor_passes": {"post_grad_custom_post_pass": PASS},
            "pass_config": {
                "fuse_norm_quant": False,
                "fuse_act_quant": False,
                "fuse_allreduce_rms": False,
            },
        },
    }


def in_graph() -> bool:
    """Say whether this process's engine was told what :func:`engine_options` returns."""
    from vllm.config import CompilationMode, get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or config.compilation_config.mode == CompilationMode.NONE:
        return False
    passes: dict[str, str] = config.compilation_config.inductor_passes
    return passes.get("post_grad_custom_post_pass") == PASS


def _gpu() -> str | None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    name: str = current_platform.get_device_name()
    return name


def install(mode: str) -> None:
    """Register providers and classes in this process.

    Args:
        mode: ``prefer`` or ``require``.

    Raises:
        IncompatibleVllmError: this vLLM lacks an extension point.
    """
    from taut_kernels.vllm_plugin import ir_ops

    gpu = _gpu()
    ir_ops.install(supported=gpu is not None)
    if why_not_fused_ops(gpu, mode) is None:
        from taut_kernels.vllm_plugin import custom_ops

        custom_ops.install()


def conclude(model: torch.nn.Module, mode: str) -> dict[str, Any]:
    """Compile what a loaded model can reach, and say what its norms and activations run on.

    Args:
        model: as vLLM loaded it.
        mode: ``prefer`` or ``require``.

    Returns:
        ``providers`` (IR op → first provider), ``custom_ops`` (class → owner → count),
        ``reason`` (why ours are not used, or None) and ``refused`` (IR op → why calls of it are not
        ours all the same; known from the graph's lowering on).
    """
    from taut_kernels.vllm_plugin import ir_ops

    reason = why_not_fused_ops(_gpu(), mode)
    providers = ir_ops.live_providers()
    counts: dict[str, dict[str, int]] = {}
    if reason is None:
        from taut_kernels.vllm_plugin import custom_ops

        counts = custom_ops.live_ops(model)
    if reason is None or ir_ops.PROVIDER in providers.values():
        # The second by vLLM's own flag, on a card nobody measured.
        _warm_up(model)
    ir_ops.refused.clear()
    return {"providers": providers, "custom_ops": counts, "reason": reason, "refused": {}}


def _warm_up(model: torch.nn.Module) -> None:
    from taut_kernels.launch.compile_ahead import warmed_up
    from taut_kernels.vllm_plugin import known_ops, warm_up

    device = next(model.parameters()).device
    if device.type != "cpu":
        widths = warm_up.widths_of(model)
        warmed_up(lambda: warm_up.compile_all(widths, device, _gpu()))
        known_ops.check_ops(widths, device)


def summary(found: dict[str, Any]) -> str:
    """Put a record in one line.

    Args:
        found: what :func:`conclude` returned.
    """
    parts = [f"{op}={provider}" for op, provider in found["providers"].items()]
    for name, owners in found["custom_ops"].items():
        parts += [f"{name}={owner} ×{count}" for owner, count in owners.items()]
    line = ", ".join(parts)
    return line if found["reason"] is None else f"{line}; not ours: {found['reason']}"
