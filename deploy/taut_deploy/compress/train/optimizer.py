"""AdamW over master weights: torch's, or bitsandbytes' with 8-bit moments."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.errors import OutputError

_BETAS = (0.9, 0.95)


def make_optimizer(masters: dict[str, nn.Parameter], settings: TrainSettings) -> Any:
    """An optimizer over the masters, matrices decayed and the rest not.

    Raises:
        OutputError: bitsandbytes is asked for and not installed.
    """
    matrices = [value for value in masters.values() if value.dim() >= 2]
    rest = [value for value in masters.values() if value.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "adamw8bit":
        return _bitsandbytes().optim.AdamW8bit(groups, lr=settings.learning_rate, betas=_BETAS)
    fused = all(value.is_cuda for value in masters.values())
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=_BETAS, fused=fused)


def require_optimizer(settings: TrainSettings) -> None:
    """Check that the optimizer's package is there, before a model is loaded.

    Raises:
        OutputError: it is not.
    """
    if settings.optimizer == "adamw8bit":
        _bitsandbytes()


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def moments(optimizer: Any) -> dict[str, torch.Tensor]:
    """The optimizer's state as plain tensors, numbers included."""
    found = {}
    places: set[int] = set()
    for index, state in optimizer.state_dict()["state"].items():
        for path, value in _leaves(state, ()):
            kind = "tensor" if isinstance(value, torch.Tensor) else "int"
            tensor = torch.as_tensor(value)
            # bitsandbytes shares its code books among weights, which safetensors refuses.
            shared = tensor.data_ptr() in places
            places.add(tensor.data_ptr())
            found["|".join((str(index), *path, kind))] = tensor.clone() if shared else tensor
    return found


def restore_moments(
    optimizer: Any,
    found: dict[str, torch.Tensor],
    part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Put back what :func:`moments` took.

    Args:
        optimizer: over the same masters.
        found: by the names that they were given.
        part: what is held here of a moment, whole, beside its master.
    """
    masters = [one for group in optimizer.param_groups for one in group["params"]]
    document = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for name, value in found.items():
        index, *path, key, kind = name.split("|")
        place = state.setdefault(int(index), {})
        for deeper in path:
            place = place.setdefault(deeper, {})
        place[key] = part(value, masters[int(index)]) if kind == "tensor" else int(value)
    document["state"] = state
    optimizer.load_state_dict(document)


def _leaves(state: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with the keys that lead to it; bitsandbytes keeps its own a level deeper."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise OutputError(
            "optimizer: adamw8bit needs the package bitsandbytes: pip install 'taut[train]', or "
            "use adamw"
        ) from error
    return bitsandbytes
