"""``--device`` of the commands that compute on one."""

from taut_deploy.errors import OutputError


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
