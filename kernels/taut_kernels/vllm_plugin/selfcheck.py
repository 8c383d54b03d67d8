"""Is the plugin live here? Asked by the launcher before it becomes a worker, and by `taut doctor`.

vLLM logs a plugin that fails to load and goes on without it, so the question must be asked outside.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import torch

GROUP = "vllm.general_plugins"
NAME = "taut"
TARGET = "taut_kernels.vllm_plugin:register"


def why_not_ready(vllm_plugins_env: str | None) -> str | None:
    """Say why a vLLM worker started now would not run our kernels.

    Args:
        vllm_plugins_env: the value of ``VLLM_PLUGINS`` the worker will see, None where it is unset.

    Returns:
        One line with the way out, or None where the plugin is found, not excluded, and computes a
        known answer.
    """
    return (
        _why_not_found(list(entry_points(group=GROUP)))
        or _why_excluded(vllm_plugins_env)
        or _why_wrong_answer(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    )


def why_int8_wrong() -> str | None:
    """Say why vLLM's int8 product must not serve W8A8 on this machine's CPU.

    Imports vLLM, which takes seconds.

    Returns:
        One line, or None where the product is right or vLLM has no such kernel here.
    """
    try:
        from taut_kernels.vllm_plugin import cpu_int8
    except ImportError:  # a vLLM for GPUs
        return None
    return cpu_int8.why_not_stock()


def _why_not_found(found: list[EntryPoint]) -> str | None:
    ours = [point for point in found if point.name == NAME]
    if not ours:
        return f"no entry point {NAME!r} in {GROUP!r}: install taut into this environment"
    if all(point.value != TARGET for point in ours):
        return f"entry point {NAME!r} is {ours[0].value!r}, expected {TARGET!r}: reinstall taut"
    return None


def _why_excluded(vllm_plugins_env: str | None) -> str | None:
    # As vLLM reads it: unset loads everything, else a comma list of names without stripping; ""
    # excludes all.
    if vllm_plugins_env is None or NAME in vllm_plugins_env.split(","):
        return None
    return f"VLLM_PLUGINS={vllm_plugins_env!r} excludes {NAME!r}: unset it or add the name"


def _why_wrong_answer(device: torch.device) -> str | None:
    """Compute a product that is exact in bf16: x = 1, weights 3, scale 0.5, K = 128 → 192."""
    from taut_kernels.gemm.w4a16 import disk as formats
    from taut_kernels.gemm.w4a16 import layout as formats_mma
    from taut_kernels.gemm.w4a16.cpu import w4a16_gemm_cpu
    from taut_kernels.gemm.w4a16.op import make_arrivals, w4a16_gemm

    N, K, group_size = 32, 128, 32
    packed = formats.pack_weight(torch.full((N, K), 3, dtype=torch.int8))
    scale = torch.full((N, K // group_size), 0.5, dtype=torch.bfloat16)
    x = torch.ones(2, K, dtype=torch.bfloat16, device=device)
    if device.type == "cpu":
        y = w4a16_gemm_cpu(x, *formats.repack_for_cpu(packed, scale, None, K))
    else:
        qweight = formats_mma.repack_weight(packed, K).to(device)
        scales = formats_mma.repack_scale(scale).to(device)
        arrivals = make_arrivals(N, device)
        y = w4a16_gemm(x, qweight, scales, group_size=group_size, arrivals=arrivals)
    if not torch.equal(y.cpu(), torch.full((2, N), 192.0, dtype=torch.bfloat16)):
        return f"taut::w4a16_gemm computes a wrong answer on {device}: run pytest tests/kernels"
    return None
