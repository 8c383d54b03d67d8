"""The smaller model of a cut: its weights, and how it is compared with the larger one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.shrink.axes import Target, indices
from taut_deploy.errors import ModelError

_PROBE_TOKENS = 24
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Cut:
    """A smaller model and what was kept.

    Args:
        model: the smaller model.
        target: the axis and its sizes.
        kept: units that stay, by block; under ``""`` those of the whole model.
        measured: what each block's units were chosen by, for the report; by block.
    """

    model: Any
    target: Target
    kept: dict[str, list[int]]
    measured: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a file holds of a model: parameters, tied ones under each name, and lasting buffers."""
    kept = model.state_dict(keep_vars=True)
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | {name: value for name, value in kept.items() if name not in found}


def fill(
    model: Any,
    smaller: Any,
    chosen: Callable[[str], dict[tuple[int, int], list[int]]],
    places: dict[str, str] | None = None,
) -> None:
    """Give the skeleton its weights.

    Args:
        model: the larger one.
        smaller: on the meta device; filled.
        chosen: pieces of :func:`.axes.indices` for a tensor of the larger model.
        places: prefixes of names in the smaller model, and in the larger one.

    Raises:
        ModelError: a tensor is not there, or shrinks in no known way.
    """
    old = stored_tensors(model)
    for name, empty in stored_tensors(smaller).items():
        source = next(
            (
                before + name.removeprefix(now)
                for now, before in (places or {}).items()
                if name.startswith(now)
            ),
            name,
        )
        if source not in old:
            raise ModelError(f"{source}: the model has no such tensor")
        value, shape = old[source].detach(), tuple(empty.shape)
        for dim, entries in enumerate(indices(tuple(value.shape), shape, name, chosen(source))):
            if entries is not None:
                value = value.index_select(dim, torch.tensor(entries, device=value.device))
        owner, _, leaf = name.rpartition(".")
        module = smaller.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value.clone(), requires_grad=False)
        else:
            module._buffers[leaf] = value.clone()
    smaller.to(model.device)
    smaller.tie_weights()
    smaller.eval()


def probe(model: Any) -> torch.Tensor:
    """A few tokens of the vocabulary, [1, T] int64."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    return (torch.arange(_PROBE_TOKENS, device=model.device)[None] * 37) % rows


@torch.inference_mode()
def probed(model: Any) -> torch.Tensor:
    """Logits of :func:`probe`, [1, T, V] fp32."""
    logits: torch.Tensor = model(input_ids=probe(model), use_cache=False).logits
    return logits.float()


def require_close(got: torch.Tensor, expected: torch.Tensor, axis: str) -> None:
    """Check the smaller model's logits against those of the larger one without its dropped units.

    Raises:
        ModelError: they differ.
    """
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-12))
    if not error <= _TOLERANCE:
        raise ModelError(
            f"--{axis}: the smaller model computes something else than the larger one without its "
            f"dropped units (by {error:.1%}); this architecture cannot be shrunk along it"
        )
