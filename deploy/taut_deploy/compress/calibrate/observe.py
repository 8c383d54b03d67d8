"""What calibration sees inside one block: statistics of every distinct linear input.

Linears fed by the very same tensor (q, k and v; gate and up) share one :class:`InputGroup`, found
by identity in the first call, so no architecture is named.

An expert sees the tokens that are routed to it. One that gets too few for statistics is shown every
token of the calibration instead, so that none is compressed blindly.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.source.calls import call_block
from taut_deploy.compress.source.experts import LinearExperts
from taut_deploy.compress.source.linears import linear_layers

_SAMPLE_ROWS = 512
# Routed tokens below which an expert is shown all: a Hessian of fewer is mostly damping.
_TOKEN_FLOOR = 256


@dataclass
class InputGroup:
    """Linear layers that read the same input, and what that input looked like.

    Attributes:
        layers: names inside the block.
        producer: name of the module whose output the input is, if any and if only these layers
            read it.
        hessian: [K, K] fp32, mean of ``x xᵀ``; None where nobody asked for it.
        absmax: [K] fp32.
        sample: [T, K] fp32 evenly spaced input rows.
        tokens: rows seen.
        routed: of an expert that was shown every token, how many were routed to it; else None.
    """

    layers: list[str]
    producer: str | None
    hessian: torch.Tensor | None
    absmax: torch.Tensor
    sample: torch.Tensor
    tokens: int = 0
    routed: int | None = None
    _rows: list[torch.Tensor] = field(default_factory=list)

    def add(self, x: torch.Tensor, rows_per_call: int) -> None:
        """Account for one call's input [..., K]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if self.hessian is not None:
            self.hessian.addmm_(rows.T, rows)
        self.absmax = torch.maximum(self.absmax, rows.abs().amax(0))
        self._rows.append(rows[:: max(1, rows.shape[0] // rows_per_call)][:rows_per_call].clone())
        self.tokens += rows.shape[0]

    def start_again(self) -> None:
        """Forget what was seen but for the number of tokens, to be shown every token."""
        self.routed, self.tokens = self.tokens, 0
        self._rows.clear()
        self.absmax.zero_()
        if self.hessian is not None:
            self.hessian.zero_()

    def finish(self) -> None:
        """Turn sums into means."""
        if self.hessian is not None:
            self.hessian /= self.tokens
        self.sample = torch.cat(self._rows)
        self._rows.clear()


@torch.inference_mode()
def observe_block(
    block: nn.Module,
    hidden: torch.Tensor,
    arguments: dict[str, Any],
    batch_size: int,
    with_hessian: bool = True,
) -> list[InputGroup]:
    """Run ``hidden`` through ``block`` and describe every linear input.

    Args:
        block: a loaded decoder block.
        hidden: [B, T, H] its input.
        arguments: its recorded keyword arguments.
        batch_size: sequences per call.
        with_hessian: also accumulate ``x xᵀ``, the dearest statistic; rounding to nearest needs
            none.

    Returns:
        Input groups in order of first use.
    """
    with _seeing_all(block, lambda _name: True):
        groups = _find_groups(block, hidden[:1], arguments)
    if with_hessian:
        for group in groups:
            k = group.absmax.shape[0]
            group.hessian = torch.zeros(k, k, device=hidden.device)
    batches = torch.split(hidden, batch_size)
    _add_inputs(block, groups, batches, arguments)
    starved = [group for group in groups if _expert_of(block, group) and _is_starved(group)]
    if starved:
        names = {_expert_of(block, group) for group in starved}
        for group in starved:
            group.start_again()
        with _seeing_all(block, names.__contains__):
            _add_inputs(block, starved, batches, arguments)
    for group in groups:
        group.finish()
    return groups


def _add_inputs(
    block: nn.Module,
    groups: Collection[InputGroup],
    batches: Collection[torch.Tensor],
    arguments: dict[str, Any],
) -> None:
    rows_per_call = max(1, _SAMPLE_ROWS // len(batches))
    handles = [
        block.get_submodule(group.layers[0]).register_forward_pre_hook(
            lambda _module, args, group=group: group.add(args[0], rows_per_call)
        )
        for group in groups
    ]
    try:
        for batch in batches:
            call_block(block, batch, arguments)
    finally:
        _remove(handles)


def _is_starved(group: InputGroup) -> bool:
    return group.tokens < _TOKEN_FLOOR


def _expert_of(block: nn.Module, group: InputGroup) -> str | None:
    """Name of the expert a group's layers belong to, None where it is none."""
    expert = group.layers[0].rpartition(".")[0]
    owner = block.get_submodule(expert.rpartition(".")[0])
    return expert if isinstance(owner, LinearExperts) else None


@contextmanager
def _seeing_all(block: nn.Module, picks: Callable[[str], bool]) -> Iterator[None]:
    """Show every token to the experts of some names."""
    found = {name: one for name, one in block.named_modules() if isinstance(one, LinearExperts)}
    for name, experts in found.items():
        numbers = range(experts.num_experts)
        experts.seeing_all = frozenset(i for i in numbers if picks(f"{name}.{i}"))
    try:
        yield
    finally:
        for experts in found.values():
            experts.seeing_all = frozenset()


def _find_groups(
    block: nn.Module, hidden: torch.Tensor, arguments: dict[str, Any]
) -> list[InputGroup]:
    # Inputs and outputs are kept alive until all is compared: identity is only meaningful while
    # both tensors live.
    inputs: dict[str, torch.Tensor] = {}
    outputs: list[tuple[str, torch.Tensor]] = []

    def keep_inputs(name: str) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = (value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
            first = next(tensors, None)
            if first is not None:
                inputs[name] = first

        return keep

    def keep_output(name: str) -> Any:
        return lambda _module, _args, out: (
            outputs.append((name, out)) if torch.is_tensor(out) else None
        )

    modules = [(name, module) for name, module in block.named_modules() if name]
    handles = [
        module.register_forward_pre_hook(keep_inputs(name), with_kwargs=True)
        for name, module in modules
    ]
    handles += [module.register_forward_hook(keep_output(name)) for name, module in modules]
    try:
        call_block(block, hidden, arguments)
    finally:
        _remove(handles)
    linears = {name for name, _ in linear_layers(block)}
    groups: list[InputGroup] = []
    by_identity: dict[int, InputGroup] = {}
    for name, x in inputs.items():
        if name not in linears:
            continue
        if id(x) not in by_identity:
            producer = next((producer for producer, out in outputs if out is x), None)
            by_identity[id(x)] = _empty_group(producer, x)
            groups.append(by_identity[id(x)])
        by_identity[id(x)].layers.append(name)
    for group in groups:
        if _has_other_readers(group, inputs):
            group.producer = None
    return groups


def _has_other_readers(group: InputGroup, inputs: dict[str, torch.Tensor]) -> bool:
    """Whether modules besides the group's layers, and what contains them, read the same memory."""
    memory = inputs[group.layers[0]].untyped_storage().data_ptr()
    return any(
        not any(f"{layer}.".startswith(f"{name}.") for layer in group.layers)
        for name, x in inputs.items()
        if x.untyped_storage().data_ptr() == memory
    )


def _empty_group(producer: str | None, x: torch.Tensor) -> InputGroup:
    k = x.shape[-1]
    zeros = torch.zeros(k, device=x.device)
    return InputGroup([], producer, None, zeros, torch.empty(0, k, device=x.device))


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
