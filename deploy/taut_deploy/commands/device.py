"""``--device``, ``--devices`` and ``--served-by``: what computes, and what is to serve."""

import re
from collections.abc import Sequence

from taut_deploy.diagnose.kernel_choice import CARDS
from taut_deploy.errors import OutputError, RecipeError


def require_device(device: str) -> None:
    """Check that a device is there.

    Raises:
        OutputError: it is not.
    """
    if device not in {"cpu", "cuda"}:
        raise OutputError(f"--device {device}: use cpu or cuda")
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise OutputError("--device cuda: torch sees no CUDA device here; use --device cpu")


def require_machine(served_by: str) -> None:
    """Check that kernels are known for a machine.

    Raises:
        RecipeError: they are not.
    """
    if served_by not in (known := ("here", "cpu", *CARDS)):
        raise RecipeError(f"--served-by: {served_by!r} is none of {', '.join(known)}")


def parse_devices(text: str) -> tuple[str, ...]:
    """What ``--devices`` names, in its order; one device is no sharing.

    Args:
        text: such as ``cuda:0,cuda:1``; ``cpu`` may come several times.

    Raises:
        OutputError: a device is unknown, not there or named twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name != "cpu" and not re.fullmatch(r"cuda:\d+", name):
            raise OutputError(
                f"--devices {text}: {name!r} is no device; name cards as cuda:0,cuda:1"
            )
    if len(names) < 2:
        raise OutputError(f"--devices {text}: name two or more, or use --device")
    if "cpu" in names and set(names) != {"cpu"}:
        raise OutputError(f"--devices {text}: cards and CPU compute differently; leave cpu out")
    cards = [int(name.removeprefix("cuda:")) for name in names if name != "cpu"]
    if len(set(cards)) < len(cards):
        raise OutputError(f"--devices {text}: names a card twice; name each once")
    if cards:
        _require_cards(text, cards)
    return names


def _require_cards(text: str, cards: Sequence[int]) -> None:
    import torch

    count = torch.cuda.device_count()
    if (missing := next((card for card in cards if card >= count), None)) is not None:
        raise OutputError(f"--devices {text}: torch sees {count} cards here, no cuda:{missing}")
