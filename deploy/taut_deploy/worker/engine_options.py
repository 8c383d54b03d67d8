"""What vLLM is told so that taut's norms, activations and attention run in its graph; CUDA only."""

from typing import Any

from taut_deploy import host
from taut_deploy.diagnose import default_kernels
from taut_deploy.errors import WorkerError
from taut_deploy.worker.arguments import read_extra
from taut_deploy.worker.spec import WorkerSpec


def fused_engine_options(asked: bool | None, mode: str, *, suited: bool) -> dict[str, Any]:
    """What vLLM has to be told so that taut's norms and activations run in its graph.

    Args:
        asked: whether ``--fused-ops`` was given, False for ``--no-fused-ops``, None for neither.
        mode: value of ``TAUT_KERNELS``.
        suited: whether to use them by default on a card whose engines were measured.

    Returns:
        Flags and their JSON values; empty where they are not used.

    Raises:
        WorkerError: they were asked for and cannot run here.
    """
    if asked is False or not (asked or suited):
        return {}
    from taut_kernels.for_deploy import fused_ops

    gpu = host.gpu_name()
    if not asked and not fused_ops.used_by_default(gpu):
        return {}
    reason = fused_ops.why_not_fused_ops(gpu, mode)
    if reason is not None and asked:
        raise WorkerError(f"--fused-ops: {reason}")
    return dict(fused_ops.engine_options(gpu, mode))


def attention_engine_options(asked: bool | None, mode: str, *, suited: bool) -> dict[str, str]:
    """What vLLM has to be told so that batches of one new token a sequence attend on taut's kernel.

    Args:
        asked: whether ``--decode-attention`` was given, False for ``--no-decode-attention``, None
            for neither.
        mode: value of ``TAUT_KERNELS``.
        suited: whether to use it by default where it can run.

    Returns:
        Flags and their values; empty where it is not used.

    Raises:
        WorkerError: it was asked for and cannot run here.
    """
    if asked is False or not (asked or suited):
        return {}
    from taut_kernels.for_deploy import decode_attention

    gpu = host.gpu_name()
    reason = decode_attention.why_not_used(gpu, mode)
    if reason is not None and asked:
        raise WorkerError(f"--decode-attention: {reason}")
    return decode_attention.engine_options(gpu, mode)


def suited_options(spec: WorkerSpec) -> tuple[bool, bool]:
    """Say whether fused ops and decode attention suit a worker; for CUDA only: imports torch.

    Args:
        spec: the worker.
    """
    config = default_kernels.config_of(spec.checkpoint)
    kv_cache_dtype, extra = read_extra(spec, {})
    return (
        default_kernels.suits_fused_ops(config, extra),
        default_kernels.suits_decode_attention(config, kv_cache_dtype, extra),
    )
