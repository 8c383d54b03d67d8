"""Whether a worker serves what a recipe makes, on the machine that is to serve it."""

from collections.abc import Collection, Iterable
from typing import Literal

from taut_deploy import host
from taut_deploy.diagnose.kernel_choice import REFUSED

Platform = Literal["cpu", "cuda"]

# Schemes for which neither vLLM 0.32 nor taut's plugin has a kernel on a CPU. vLLM runs W4A8 there
# on W4A16's, which leaves inputs as they are; what a worker then answers is compared like any
# other.
_NOT_ON_CPU = frozenset({"W3A16", "W2A16", "W4AFP8", "NVFP4A16", "MXFP4A16"})
_WITH_AMX = "FP8-BLOCK"


def platform_of(served_by: str) -> Platform:
    """The platform of the machine that ``--served-by`` names.

    Args:
        served_by: ``here``, ``cpu`` or a card.
    """
    if served_by == "here":
        return "cpu" if host.gpu_name() is None else "cuda"
    return "cpu" if served_by == "cpu" else "cuda"


def why_not_served(schemes: Collection[str], kernels: Iterable[str], served_by: str) -> str | None:
    """Say why no worker could serve a checkpoint, None where one can.

    Args:
        schemes: that its layers may be stored in.
        kernels: what is said of each layer's kernel.
        served_by: ``here``, ``cpu`` or a card.
    """
    refused = next((kernel for kernel in kernels if REFUSED in kernel), None)
    if refused is not None:
        return f"cannot be served: {refused}"
    if platform_of(served_by) == "cuda":
        return None
    lacking = sorted(_NOT_ON_CPU & set(schemes))
    if lacking:
        return f"cannot be served: nothing here multiplies {' or '.join(lacking)} on a CPU"
    if _WITH_AMX in schemes and not _has_amx(served_by):
        return f"cannot be served: vLLM takes {_WITH_AMX} on a CPU with AMX alone"
    return None


def _has_amx(served_by: str) -> bool:
    import torch

    # Of another CPU nothing is known.
    return served_by == "here" and bool(torch.cpu._is_amx_tile_supported())
