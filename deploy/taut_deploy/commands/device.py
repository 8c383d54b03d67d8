"""``--device`` and ``--served-by``: what computes, and what is to serve."""

from taut_deploy.diagnose.kernel_choice import CARDS
from taut_deploy.errors import OutputError, RecipeError


def require_device(device: str) -> None:
    """Check that a device is there.

    Raises:
        OutputError: it is not.
    """
    import torch

    if device not in {"cpu", "cuda"}:
        raise OutputError(f"--device {device}: use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise OutputError("--device cuda: torch sees no CUDA device here; use --device cpu")


def require_machine(served_by: str) -> None:
    """Check that kernels are known for a machine.

    Raises:
        RecipeError: they are not.
    """
    if served_by not in (known := ("here", "cpu", *CARDS)):
        raise RecipeError(f"--served-by: {served_by!r} is none of {', '.join(known)}")
