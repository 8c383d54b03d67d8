"""Experts of a mixture that matter least, dropped with their rows of the router.

Source: REAP, arXiv:2510.13999, §4 (router-weighted expert activation pruning): an expert matters by
the mean, over the tokens that are routed to it, of its router weight times the norm of its output.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.shrink.axes import Target, routing_groups, shapes
from taut_deploy.compress.shrink.importance import best, decoder_of, run, with_hooks
from taut_deploy.compress.shrink.smaller import Cut, fill, probed, require_close
from taut_deploy.compress.skeleton import empty_model
from taut_deploy.errors import ModelError


@dataclass(frozen=True)
class Mixture:
    """The mixture of experts of one block.

    Args:
        block: name of the decoder block.
        experts: name of the module that holds the experts' stacked matrices.
        router: name of the module that chooses among them.
    """

    block: str
    experts: str
    router: str


def mixtures(model: nn.Module, smaller: nn.Module, target: Target) -> list[Mixture]:
    """Every mixture whose experts become fewer.

    Args:
        model: as it is; without weights will do.
        smaller: of the target's configuration.
        target: experts before and after.

    Raises:
        ModelError: there is none, or a block's is not one router and one stack of experts that is
            told which expert each token goes to.
    """
    before, after = shapes(model), shapes(smaller)
    name, blocks = decoder_of(model)
    owners: dict[str, dict[str, bool]] = {}
    for tensor, shape in before.items():
        if (shape[:1], after[tensor][:1]) == ((target.before,), (target.after,)):
            owner = tensor.rpartition(".")[0]
            block = next((i for i in range(len(blocks)) if owner.startswith(f"{name}.{i}.")), None)
            found = owners.setdefault(f"{name}.{block}", {})
            found[owner] = found.get(owner, False) or len(shape) == 3
    made = []
    for block_name, found in owners.items():
        stacks = [owner for owner, stacked in found.items() if stacked]
        routers = [owner for owner, stacked in found.items() if not stacked]
        told = stacks and inspect.signature(model.get_submodule(stacks[0]).forward).parameters
        if len(stacks) != 1 or len(routers) != 1 or len(told or ()) < 3:
            raise ModelError(
                f"--experts: {block_name} is not one router and one stack of experts that is told "
                "each token's experts and their weights; experts of this architecture cannot be "
                "dropped"
            )
        made.append(Mixture(block_name, stacks[0], routers[0]))
    if not made:
        raise ModelError("--experts: no tensor of the model follows its number of experts")
    return made


def measure(
    model: Any, found: list[Mixture], count: int, tokens: torch.Tensor, batch: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Importance of every expert on a text, and the tokens that were routed to it.

    Args:
        model: transformers' model, in memory.
        found: its mixtures.
        count: experts of each.
        tokens: [n, T] int64.
        batch: sequences at a time.

    Returns:
        [count] fp32 and [count] int64 by block; an expert that no token chose has importance 0.
    """
    sums = {one.block: torch.zeros(count) for one in found}
    seen = {one.block: torch.zeros(count, dtype=torch.int64) for one in found}

    def watch(block: str) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, named: dict[str, Any]) -> None:
            hidden, index, weights = [*arguments, *named.values()][:3]
            for expert in range(count):
                token, slot = torch.where(index == expert)
                if not token.numel():
                    continue
                # Its own forward, past the hooks, for this expert alone.
                at = (token, slot)
                out = module.forward(hidden[token], index[at][:, None], weights[at][:, None])
                sums[block][expert] += float(out.float().norm(dim=-1).sum())
                seen[block][expert] += token.numel()

        return hook

    with_hooks(
        [
            model.get_submodule(one.experts).register_forward_pre_hook(
                watch(one.block), with_kwargs=True
            )
            for one in found
        ],
        lambda: run(model, tokens, batch),
    )
    return {block: (sums[block] / seen[block].clamp(min=1), seen[block]) for block in sums}


def most_important(values: torch.Tensor, count: int, groups: int) -> list[int]:
    """The experts that stay, ascending: as many of each group of neighbours.

    Args:
        values: [E] importance.
        count: to keep, a multiple of ``groups``.
        groups: of neighbours, all of one size.
    """
    size = len(values) // groups
    return [
        start + index
        for start in range(0, len(values), size)
        for index in best(values[start : start + size], count // groups)
    ]


def cut_experts(model: Any, target: Target, tokens: torch.Tensor, batch: int) -> Cut:
    """Drop experts; each block keeps its own.

    Args:
        model: transformers' model, in memory.
        target: experts before and after.
        tokens: [n, T] int64 calibration text.
        batch: sequences at a time.

    Raises:
        ModelError: the architecture cannot be cut along its experts.
    """
    smaller = empty_model(target.config, model.dtype)
    found = mixtures(model, smaller, target)
    measured = measure(model, found, target.before, tokens, batch)
    groups = routing_groups(model.config)
    kept = {
        block: most_important(values, target.after, groups)
        for block, (values, _) in measured.items()
    }

    def chosen(name: str) -> dict[tuple[int, int], list[int]]:
        block = next((block for block in kept if name.startswith(block + ".")), None)
        return {} if block is None else {(target.before, target.after): kept[block]}

    fill(model, smaller, chosen)
    _require_same(model, smaller, found, kept, target.before)
    facts = {
        block: {
            "importance": [float(f"{value:.6g}") for value in values.tolist()],
            "tokens": times.tolist(),
        }
        for block, (values, times) in measured.items()
    }
    return Cut(smaller, target, kept, facts)


def _require_same(
    model: Any, smaller: Any, found: list[Mixture], kept: dict[str, list[int]], before: int
) -> None:
    """Check the smaller model against the larger one, routed as the smaller one routes.

    Raises:
        ModelError: they differ, or a router's scores are not those of the kept experts.
    """
    expected: list[torch.Tensor] = []

    def follow(mixture: Mixture) -> Callable[..., Any]:
        router = smaller.get_submodule(mixture.router)
        numbers = torch.tensor(kept[mixture.block], device=model.device)

        def hook(module: nn.Module, arguments: Any, out: Any) -> Any:
            # A bias of experts that the block hands to its router is cut as the router is.
            given = router(*(numbers_of(one) for one in arguments))
            for theirs, mine in zip(out, given, strict=True):
                if theirs.shape[-1] == before and mine.shape[-1] == len(numbers):
                    # Scores of every expert: rounding aside they are the kept rows'.
                    require_close(mine.float(), theirs[..., numbers].float(), "experts")
            return tuple(one if one.is_floating_point() else numbers[one] for one in given)

        def numbers_of(argument: torch.Tensor) -> torch.Tensor:
            return argument[numbers] if argument.shape == (before,) else argument

        return hook

    with_hooks(
        [model.get_submodule(one.router).register_forward_hook(follow(one)) for one in found],
        lambda: expected.append(probed(model)),
    )
    require_close(probed(smaller), expected[0], "experts")
