"""A decoder block under compression: what its stages find and leave behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.formats.protocol import LayerFormat, StoredLayer
from taut_deploy.errors import ModelError
from taut_deploy.models.values import is_finite


@dataclass
class LayerState:
    """One linear layer of the block.

    A stage that changes the weight gives the module another tensor (``module.weight.data = …``) and
    never writes into the old one: that may be the reference. Once the layer is stored, the module
    holds what that stands for, or its nearest in the dtype that blocks compute in.

    Attributes:
        name: full name in the state dict.
        module: the layer; its weight is what the stages so far made of it, maybe in fp32.
        group: statistics of its input, shared with the layers that read the same.
        stages: positions in the recipe of the stages that act on it.
        format: what it will be stored in, None where it stays dense.
        reference: its weight after all transforms and before anything was lost, [N, K].
        mask: [N, K] bool, False where a weight was pruned; later stages keep those zero.
        methods: what was done, in order.
        stored: the layer as it will be written, once a storing stage was there.
        rank: of a factorised layer.
    """

    name: str
    module: nn.Linear
    group: InputGroup
    stages: frozenset[int]
    format: LayerFormat | None
    reference: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    methods: list[str] = field(default_factory=list)
    stored: StoredLayer | None = None
    rank: int | None = None

    def sound_weight(self) -> torch.Tensor:
        """The weight as it is now, [N, K] fp32.

        Raises:
            ModelError: it or the layer's input is not finite; names the layer.
        """
        self.require_sound()
        return self.module.weight.data.float()

    def require_sound(self) -> None:
        """Raise as :meth:`sound_weight` does, without its copy."""
        # Either would spread silently: NaN compares false and ends as code 0 of scale 0.
        for what, tensor in (
            ("weight", self.module.weight.data),
            ("input during calibration", self.group.absmax),
        ):
            if not is_finite(tensor):
                raise ModelError(
                    f"{self.name}: its {what} holds NaN or infinity; the model is broken"
                )

    def hessian(self) -> torch.Tensor:
        """``x xᵀ`` of its input, [K, K] fp32.

        Raises:
            ModelError: calibration overflowed; names the layer.
        """
        found = self.group.hessian
        if found is None:
            raise TypeError(f"{self.name}: no stage said that it needs a Hessian")
        if not bool(torch.isfinite(found).all()):
            raise ModelError(
                f"{self.name}: the squares of its input overflow; calibrate with other text"
            )
        return found

    def at(self, device: torch.device, group: InputGroup) -> "LayerState":
        """A copy on another device, to be worked on there.

        Args:
            device: the other one.
            group: its input's statistics there.
        """
        weight = nn.Parameter(self.module.weight.data.to(device), requires_grad=False)
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        module.weight = weight
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, module=module, group=group, mask=mask)

    def stored_weight(self) -> torch.Tensor:
        """What the stored layer stands for, [N, K] fp32."""
        if self.stored is None:
            raise TypeError(f"{self.name}: it is not stored yet")
        held = self.module.weight.data
        # The block may have been called since, in the dtype of its input.
        return held if held.dtype == torch.float32 else self.stored.dequantize()

    def store(self, stored: StoredLayer, method: str) -> None:
        """Keep the layer as it will be written; the block computes with it from here on.

        Args:
            stored: the layer.
            method: what made it, for the report.
        """
        self.stored = stored
        self.methods.append(method)
        self.module.weight.data = stored.dequantize()
        self.round_inputs(stored.round_input)

    def round_inputs(self, rounded: Callable[[torch.Tensor], torch.Tensor]) -> RemovableHandle:
        """As :func:`round_inputs` of its module."""
        return round_inputs(self.module, rounded)


def round_inputs(
    module: nn.Module, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> RemovableHandle:
    """Let a layer see its inputs rounded from here on; gradients pass straight through.

    Args:
        module: the layer.
        rounded: an input [..., K] as the engine rounds it.
    """

    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if torch.is_grad_enabled():
            return (x + (rounded(x.detach()) - x.detach()), *args[1:])
        return (rounded(x), *args[1:])

    return module.register_forward_pre_hook(hook)


@dataclass(frozen=True)
class Example:
    """What a block is to compute.

    Attributes:
        inputs: [B, T, H] as its compressed predecessors give them.
        targets: [B, T, H] what the original model's block gives there.
        call: runs the block on a batch of inputs.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass
class BlockState:
    """A loaded block and what calibration saw in it.

    Attributes:
        module: the block.
        name: its name in the state dict.
        groups: every distinct linear input, in order of first use.
        layers: its linear layers by their names inside the block, in the same order.
        example: what it is to compute, where a stage of the recipe asks for it.
        devices: that share the work on its layers, its own first; none for its own alone.
    """

    module: nn.Module
    name: str
    groups: list[InputGroup]
    layers: dict[str, LayerState]
    example: Example | None = None
    devices: Sequence[torch.device] = ()

    def of_stage(self, index: int) -> list[LayerState]:
        """The layers that the recipe's stage at this position acts on."""
        return [*self.named_of_stage(index).values()]

    def named_of_stage(self, index: int) -> dict[str, LayerState]:
        """The same by their names inside the block."""
        return {name: layer for name, layer in self.layers.items() if index in layer.stages}

    def groups_of_stage(self, index: int) -> list[InputGroup]:
        """The inputs read by any layer the stage at this position acts on."""
        return [
            group
            for group in self.groups
            if any(index in self.layers[name].stages for name in group.layers)
        ]
