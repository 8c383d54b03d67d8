"""What calibration sees inside one block: statistics of every distinct linear input.

Linears fed by the very same tensor (q, k and v; gate and up) share one :class:`InputGroup`, found
by identity in the first call, so no architecture is named.

An expert sees the tokens that are routed to it. One that gets too few for statistics is shown every
token of the calibration instead, so that none is compressed blindly.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.calibrate.gram import add_gram, mirror
from taut_deploy.compress.calibrate.readers import Readers
from taut_deploy.compress.replicas import Replica, over_replicas, replicas_of
from taut_deploy.compress.source.calls import call_block
from taut_deploy.compress.source.experts import LinearExperts
from taut_deploy.compress.source.linears import linear_layers
from taut_deploy.compress.threads import largest_product, single_thread

_SAMPLE_ROWS = 512
# Routed tokens below which an expert is shown all: a Hessian of fewer is mostly damping.
_TOKEN_FLOOR = 256


@dataclass
class InputGroup:
    """Linear layers that read the same input, and what that input looked like.

    Attributes:
        layers: names inside the block.
        producer: name of the module whose output the input is, if any.
        hessian: [K, K] fp32, mean of ``x xᵀ``; None where nobody asked for it.
        absmax: [K] fp32.
        sample: [T, K] fp32 evenly spaced input rows.
        tokens: rows seen.
        read_elsewhere: whether the producer's output also goes where no layer of the group is: to a
            router, into a residual.
        routed: of an expert that was shown every token, how many were routed to it; else None.
    """

    layers: list[str]
    producer: str | None
    hessian: torch.Tensor | None
    absmax: torch.Tensor
    sample: torch.Tensor
    tokens: int = 0
    read_elsewhere: bool = False
    routed: int | None = None
    _rows: list[torch.Tensor] = field(default_factory=list)
    # What further devices have summed up, by their number.
    _sums: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(
        self, x: torch.Tensor, rows_per_call: int, device: int = 0, pool: Executor | None = None
    ) -> None:
        """Account for one call's input [..., K], seen on the device of that number."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if self.hessian is not None:
            add_gram(self._sum_of(device, self.hessian, rows), rows, pool)
        low, high = rows.aminmax(dim=0)  # without a copy of all
        largest = torch.maximum(-low, high).to(self.absmax.device)
        self.absmax = torch.maximum(self.absmax, largest)
        sample = rows[:: max(1, rows.shape[0] // rows_per_call)][:rows_per_call].clone()
        self._rows.append(sample.to(self.absmax.device))
        self.tokens += rows.shape[0]

    def _sum_of(self, device: int, first: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if device == 0:
            return first
        if device not in self._sums:
            self._sums[device] = torch.zeros_like(first, device=rows.device)
        return self._sums[device]

    def at(self, device: torch.device) -> "InputGroup":
        """A copy of what was found on another device."""
        hessian = None if self.hessian is None else self.hessian.to(device)
        return replace(
            self,
            hessian=hessian,
            absmax=self.absmax.to(device),
            sample=self.sample.to(device),
            _rows=[],
            _sums={},
        )

    def start_again(self) -> None:
        """Forget what was seen but for the number of tokens, to be shown every token."""
        self.routed, self.tokens = self.tokens, 0
        self._rows.clear()
        self._sums.clear()
        self.absmax.zero_()
        if self.hessian is not None:
            self.hessian.zero_()

    def finish(self) -> None:
        """Turn sums into means; those of several devices are added in the devices' order."""
        if self.hessian is not None:
            for device in sorted(self._sums):
                self.hessian += self._sums.pop(device).to(self.hessian.device)
            mirror(self.hessian)
            self.hessian /= self.tokens
        self.sample = torch.cat(self._rows)
        self._rows.clear()


def unobserved(block: nn.Module) -> list[InputGroup]:
    """Every linear layer as a group of its own of which nothing is known."""
    return [
        InputGroup([name], None, None, torch.zeros(k), torch.empty(0, k))
        for name, layer in linear_layers(block)
        for k in (layer.in_features,)
    ]


@torch.inference_mode()
def observe_block(
    block: nn.Module,
    hidden: torch.Tensor,
    arguments: dict[str, Any],
    batch_size: int,
    with_hessian: bool = True,
    devices: Sequence[torch.device] = (),
) -> list[InputGroup]:
    """Run ``hidden`` through ``block`` and describe every linear input.

    Args:
        block: a loaded decoder block.
        hidden: [B, T, H] its input.
        arguments: its recorded keyword arguments.
        batch_size: sequences per call.
        with_hessian: also accumulate ``x xᵀ``, the dearest statistic; rounding to nearest needs
            none.
        devices: that share the batches, the block's own first; none for its own alone.

    Returns:
        Input groups in order of first use.
    """
    replicas = replicas_of(block, arguments, devices)
    one = largest_product(block, hidden[:1])
    with _seeing_all(replicas, lambda _name: True), single_thread(one):
        groups = _find_groups(replicas[0].module, replicas[0].moved(hidden[:1]), arguments)
    if with_hessian:
        for group in groups:
            k = group.absmax.shape[0]
            group.hessian = torch.zeros(k, k, device=group.absmax.device)
    every = (replicas, hidden, batch_size)
    _add_inputs(groups, *every)
    starved = [group for group in groups if _expert_of(block, group) and _is_starved(group)]
    if starved:
        names = {_expert_of(block, group) for group in starved}
        for group in starved:
            group.start_again()
        with _seeing_all(replicas, names.__contains__):
            _add_inputs(starved, *every)
    for group in groups:
        group.finish()
    return groups


def _add_inputs(
    groups: Collection[InputGroup],
    replicas: Sequence[Replica],
    hidden: torch.Tensor,
    batch_size: int,
) -> None:
    calls = -(-hidden.shape[0] // batch_size)
    rows_per_call = max(1, _SAMPLE_ROWS // calls)
    # Each thread's own: batches go side by side, and are accounted for in their order.
    seen = threading.local()
    handles = [
        replica.module.get_submodule(group.layers[0]).register_forward_pre_hook(
            lambda _module, args, group=group: seen.inputs.append((group, args[0]))
        )
        for replica in replicas
        for group in groups
    ]

    def inputs_of(
        replica: Replica, batch: torch.Tensor
    ) -> tuple[int, list[tuple[InputGroup, torch.Tensor]]]:
        seen.inputs = []
        replica.call(batch)
        return replica.number, seen.inputs

    try:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for device, inputs in over_replicas(inputs_of, hidden, batch_size, replicas):
                # Where operations have a thread each, threads share them out.
                alone = torch.get_num_threads() == 1
                for group, x in inputs:
                    pool = threads if alone and not x.is_cuda else None
                    group.add(x, rows_per_call, device, pool)
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
def _seeing_all(replicas: Iterable[Replica], picks: Callable[[str], bool]) -> Iterator[None]:
    """Show every token to the experts of some names."""
    found = [
        (name, one)
        for replica in replicas
        for name, one in replica.module.named_modules()
        if isinstance(one, LinearExperts)
    ]
    for name, experts in found:
        numbers = range(experts.num_experts)
        experts.seeing_all = frozenset(i for i in numbers if picks(f"{name}.{i}"))
    try:
        yield
    finally:
        for _, experts in found:
            experts.seeing_all = frozenset()


def _find_groups(
    block: nn.Module, hidden: torch.Tensor, arguments: dict[str, Any]
) -> list[InputGroup]:
    inputs: dict[str, torch.Tensor] = {}
    # Outputs are kept alive until the call is over: identity is only meaningful while both tensors
    # live.
    outputs: list[tuple[str, torch.Tensor]] = []

    def keep_input(name: str) -> Any:
        return lambda _module, args: inputs.__setitem__(name, args[0])

    def keep_output(name: str) -> Any:
        return lambda _module, _args, out: (
            outputs.append((name, out)) if torch.is_tensor(out) else None
        )

    linears = dict(linear_layers(block))
    handles = [
        module.register_forward_pre_hook(keep_input(name)) for name, module in linears.items()
    ]
    handles += [
        module.register_forward_hook(keep_output(name))
        for name, module in block.named_modules()
        if name
    ]
    readers = Readers(block)
    try:
        with readers:
            call_block(block, hidden, arguments)
    finally:
        _remove(handles)
    groups: list[InputGroup] = []
    by_identity: dict[int, InputGroup] = {}
    for name, x in inputs.items():
        if id(x) not in by_identity:
            producer = next((producer for producer, out in outputs if out is x), None)
            by_identity[id(x)] = _empty_group(producer, x)
            groups.append(by_identity[id(x)])
        by_identity[id(x)].layers.append(name)
    for x in inputs.values():
        group = by_identity[id(x)]
        if group.producer is not None:
            group.read_elsewhere = bool(readers.of(x) - {*group.layers, group.producer})
    return groups


def _empty_group(producer: str | None, x: torch.Tensor) -> InputGroup:
    k = x.shape[-1]
    zeros = torch.zeros(k, device=x.device)
    return InputGroup([], producer, None, zeros, torch.empty(0, k, device=x.device))


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
