"""A causal LM whose decoder blocks are in memory one at a time.

The skeleton is built on the meta device; a block's weights are read from the shards when it is
loaded and dropped when it is released. Nothing here knows a particular architecture: what the
blocks are called with is recorded from the model's own forward, and what follows the last one is
that forward too.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.free_memory import return_freed_memory
from taut_deploy.compress.skeleton import empty_model
from taut_deploy.compress.source.calls import (
    BlockArguments,
    Recorder,
    call_block,
    per_row,
    why_not_replayed,
)
from taut_deploy.compress.source.decoder import DecoderBlock, make_skeleton
from taut_deploy.compress.source.linears import (
    dense_products,
    expression_of_stack,
    products_of_stack,
)
from taut_deploy.compress.source.names import Place
from taut_deploy.compress.source.soundness import require_same_tensors, require_sound_values
from taut_deploy.compress.source.weights import WeightReader
from taut_deploy.errors import ModelError
from taut_deploy.models.pretrained import load_config, reason_of
from taut_deploy.out_of_memory import let_pass

# What a forward may raise that is called in a way it was not written for.
_FORWARD_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    IndexError,
    KeyError,
    AssertionError,
)


class StreamedModel:
    """Skeleton of a model and the means to fill its parts.

    Args:
        directory: model directory.
        dtype: dtype blocks compute in.
        device: where a loaded block lives.
        trust_remote_code: let the model's own Python code run.
        checked: values were found sound already, which takes reading all of them.

    Raises:
        ModelError: it is no causal LM, the tensors are not those of the architecture, or not all
            are finite.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        trust_remote_code: bool = False,
        checked: bool = False,
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = device
        config = load_config(directory, trust_remote_code=trust_remote_code)
        self.model = empty_model(config, dtype, trust_remote_code=trust_remote_code).eval()
        self._reader = WeightReader(directory, as_numbers=True)
        skeleton = make_skeleton(self.model, self._reader.stored)
        self._places = require_same_tensors(directory, skeleton, self._reader.stored)
        if not checked:
            require_sound_values(self._places, self.model, self._reader)
        self._decoder_name = skeleton.decoder
        self.blocks = skeleton.blocks
        self._as_tuple = False

    @property
    def dtype(self) -> torch.dtype:
        """What blocks compute in, and what the outer weights are held in."""
        return self._dtype

    @property
    def outer_names(self) -> list[str]:
        """Stored tensors outside the blocks: embeddings, final norm, head, other towers."""
        outer = {place.stored for name, place in self._places.items() if not self._is_inner(name)}
        return [name for name in self._reader.names if name in outer]

    def _is_inner(self, name: str) -> bool:
        return name.startswith(self._decoder_name + ".")

    def read(self, name: str) -> torch.Tensor:
        """One stored tensor, by its stored name."""
        return self._reader.read(name)

    def load(self, module: nn.Module, prefix: str, without: Collection[str] = ()) -> None:
        """Fill ``module`` (named ``prefix``) with its stored weights in the compute dtype.

        Args:
            module: to fill.
            prefix: its name in the skeleton.
            without: tensors that stay empty, by their names in the module.
        """
        for owner in module.modules():
            for leaf, buffer in owner._buffers.items():
                owner._buffers[leaf] = None if buffer is None else buffer.to(self._device)
        for name in module.state_dict():
            place = self._places.get(f"{prefix}.{name}")
            if place is not None and name not in without:
                self._fill(module, name, place)

    def release(self, module: nn.Module) -> None:
        """Drop a module's weights and what was made of them; tables it computes itself stay."""
        for owner in module.modules():
            if isinstance(owner, nn.Linear):
                owner._forward_pre_hooks.clear()  # they hold a compressed layer's codes
            for leaf, parameter in owner._parameters.items():
                if parameter is not None:
                    empty = torch.empty_like(parameter, device="meta")
                    owner._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        return_freed_memory()

    def release_outer(self) -> None:
        """Drop everything outside the blocks, none of which is loaded."""
        self.release(self.model)

    def load_outer(self) -> None:
        """Fill everything outside the blocks; ties are restored by the model itself."""
        for name, place in self._places.items():
            if not self._is_inner(name):
                self._fill(self.model, name, place)
        self.model.tie_weights()

    def _fill(self, module: nn.Module, name: str, place: Place) -> None:
        owner, _, leaf = name.rpartition(".")
        target = module.get_submodule(owner)
        value = place.read(self._reader).to(self._device)
        if leaf in target._parameters:
            target._parameters[leaf] = nn.Parameter(value.to(self._dtype), requires_grad=False)
        else:
            target._buffers[leaf] = value

    def to_stored(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the skeleton as a checkpoint of this family holds them.

        Args:
            tensors: by name in the skeleton; a layer's new tensors under the layer's name.

        Returns:
            By name in a file. What has the name of a stored tensor has its orientation too.
        """
        return dict(self._stored(name, tensor) for name, tensor in tensors.items())

    def _stored(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        place: Place | None = self._places.get(name)
        if place is None or place.entry is not None:
            layer, _, leaf = name.rpartition(".")
            return f"{self.stored_layer(layer)}.{leaf}", tensor
        return place.stored, tensor.T if place.turned else tensor

    def stored_layer(self, layer: str) -> str:
        """What a checkpoint of this family calls a layer, from its name in the skeleton."""
        place: Place | None = self._places.get(f"{layer}.weight")
        if place is None:
            return layer
        if place.entry is None:
            return place.stored.removesuffix(".weight")
        leaf = layer.rpartition(".")[2]
        return f"{place.stored.rpartition('.')[0]}.{place.entry}.{leaf}"

    def dense_layers(self, compressed: Iterable[str]) -> list[str]:
        """Linear layers that stay dense, under every name readers look them up by.

        Args:
            compressed: skeleton names of those that do not.

        Returns:
            Those outside the blocks first.
        """
        done = set(compressed)
        dense = [
            layer
            for name, module in self.model.named_modules()
            for layer in (*dense_products(name, module), *products_of_stack(name, module))
            if layer not in done
        ]
        dense.sort(key=self._is_inner)
        spellings = ((name, self.stored_layer(name)) for name in dense)
        stacks = (
            expression_of_stack(name)
            for name, module in self.model.named_modules()
            if products_of_stack(name, module)
        )
        return list(dict.fromkeys((*(one for pair in spellings for one in pair), *stacks)))

    @property
    def stacked_experts(self) -> list[str]:
        """Experts in the blocks that stay in one tensor, and so dense, by name."""
        return [
            name
            for name, module in self.model.named_modules()
            if self._is_inner(name) and products_of_stack(name, module)
        ]

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run everything outside the blocks and one block of each kind, as the run would.

        Raises:
            ModelError: the architecture's forward cannot be run block by block.
        """
        self.load_outer()
        one, other = torch.tensor([[0, 1, 2]]), torch.tensor([[3, 3, 1]])
        try:
            self._as_tuple = self._hands_on_tuples(one)
            told = [[call.arguments for call in self._record(text)] for text in (one, other)]
            hidden, arguments = self.enter(one)
            self.leave(hidden)
            for block in self._one_of_each_kind():
                self.load(block.module, block.name)
                call_block(block.module, hidden, arguments[block.index])
                self.release(block.module)
        except _FORWARD_ERRORS as error:
            let_pass(error)
            raise self._not_streamed(reason_of(error, 160)) from error
        if (why := why_not_replayed(*told)) is not None:
            raise self._not_streamed(why)

    def _one_of_each_kind(self) -> list[DecoderBlock]:
        """The first block of each set of tensors."""
        kinds: dict[frozenset[tuple[str, torch.Size]], DecoderBlock] = {}
        for block in self.blocks:
            tensors = block.module.state_dict().items()
            kinds.setdefault(frozenset((name, value.shape) for name, value in tensors), block)
        return list(kinds.values())

    def _hands_on_tuples(self, tokens: torch.Tensor) -> bool:
        """Whether the model expects tuples of its blocks: without them its forward goes wrong."""
        try:
            self._record(tokens)
        except (*_FORWARD_ERRORS, ModelError) as error:
            let_pass(error)
            return True
        return False

    @torch.inference_mode()
    def enter(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, BlockArguments]:
        """Run the model up to its first block and record how every block is called.

        Args:
            token_ids: [B, T] int64.

        Returns:
            Hidden states [B, T, H] entering block 0, and the keyword arguments of each block for
            a batch of any size.
        """
        row = token_ids[:1]
        one, two = (
            [call.arguments for call in self._record(rows)] for rows in (row, torch.cat([row, row]))
        )
        return self.embed(token_ids), per_row(one, two)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, H] entering block 0, from token ids [B, T]."""
        hidden = self._record(token_ids)[0].hidden
        if hidden is None:
            raise self._not_streamed("its forward never calls the first of them")
        return hidden

    @torch.inference_mode()
    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """All that follows the last block: hidden states [B, T, H] to logits [B, T, V] fp32."""
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64)
        recorders = self._recorders()
        recorders[-1].leaves = lambda _: hidden
        logits: torch.Tensor = self._run(self.model, tokens, recorders).logits
        return logits.float()

    def _recorders(self) -> list[Recorder]:
        return [Recorder(block.module, as_tuple=self._as_tuple) for block in self.blocks]

    def _record(self, tokens: torch.Tensor) -> list[Recorder]:
        """Record a call of every block, each of which must be handed what the one before gave."""
        recorders = self._recorders()
        out = self._run(self.model.base_model, tokens, recorders)[0]
        for before, after in itertools.pairwise(recorders):
            if after.hidden is None or after.hidden is not before.hidden:
                raise self._not_streamed(
                    "something happens between its blocks, or not all of them are called"
                )
        if out.shape[:2] != tokens.shape:
            raise self._not_streamed(f"its forward gives {tuple(out.shape)} for {tokens.shape}")
        return recorders

    def _run(self, model: Any, tokens: torch.Tensor, recorders: list[Recorder]) -> Any:
        layers: Any = self.model.get_submodule(self._decoder_name)
        for index, recorder in enumerate(recorders):
            layers[index] = recorder
        try:
            return model(input_ids=tokens.to(self._device), use_cache=False)
        finally:
            for block in self.blocks:
                layers[block.index] = block.module

    def _not_streamed(self, reason: str) -> ModelError:
        return ModelError(
            f"{self._directory}: config.json: model_type {self.model.config.model_type!r} cannot "
            f"be compressed block by block ({reason}); take a model of another architecture"
        )
