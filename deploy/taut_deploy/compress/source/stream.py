"""A causal LM whose decoder blocks are in memory one at a time.

The skeleton is built on the meta device; a block's weights are read from the safetensors shards
when it is loaded and dropped when it is released. Nothing here knows a particular architecture: the
decoder is the one long ``ModuleList`` of equal modules, and what the blocks are called with is
recorded from the model's own forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from taut_deploy.compress.source.soundness import (
    StoredTensor,
    require_same_tensors,
    require_sound_values,
)
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import declared_shards, weight_files
from taut_deploy.models.pretrained import load_config

# A call's keyword arguments other than the hidden states, one mapping per decoder block.
BlockArguments = list[dict[str, Any]]


@dataclass(frozen=True)
class DecoderBlock:
    """One decoder block: its position, its name in the state dict, and the module."""

    index: int
    name: str
    module: nn.Module


class WeightReader:
    """Reads single tensors out of a directory's safetensors shards.

    Args:
        directory: model directory.

    Raises:
        ModelError: a shard is missing or cut short, or index and shards contradict each other.
    """

    def __init__(self, directory: Path) -> None:
        self.stored: dict[str, StoredTensor] = {}
        for shard in weight_files(directory):
            found = _header(shard)
            if twice := sorted(found.keys() & self.stored.keys()):
                raise ModelError(
                    f"{shard}: {twice[0]} is in {self.stored[twice[0]].shard.name} too; "
                    "fetch the model again"
                )
            self.stored |= found
        for name, shard_name in declared_shards(directory).items():
            if name not in self.stored or self.stored[name].shard.name != shard_name:
                raise ModelError(
                    f"{directory / shard_name}: the index says that it holds {name}, which it "
                    "does not; fetch the model again"
                )

    @property
    def names(self) -> list[str]:
        """Every tensor's name, in shard order."""
        return list(self.stored)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in its stored dtype.

        Raises:
            ModelError: if no shard holds it.
        """
        if name not in self.stored:
            raise ModelError(f"{name}: no shard of the model holds this tensor")
        with safe_open(self.stored[name].shard, framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor


def _header(shard: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(shard, framework="pt") as handle:
            parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(shard, tuple(part.get_shape()), part.get_dtype())
                for name, part in parts.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{shard}: cannot be read as safetensors ({error}); fetch the model again"
        ) from error


class StreamedModel:
    """Skeleton of a model and the means to fill its parts.

    Args:
        directory: model directory.
        dtype: dtype blocks compute in.
        device: where a loaded block lives.
        trust_remote_code: let the model's own Python code run.

    Raises:
        ModelError: the tensors are not those of the architecture, or not all are finite.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        self._directory = directory
        self._reader = WeightReader(directory)
        self._dtype = dtype
        self._device = device
        config = load_config(directory, trust_remote_code=trust_remote_code)
        try:
            with init_empty_weights(include_buffers=False):
                # sdpa needs no mask tensor for unpadded text, so one recorded call serves every
                # batch size.
                self.model: Any = AutoModelForCausalLM.from_config(
                    config,
                    dtype=dtype,
                    attn_implementation="sdpa",
                    trust_remote_code=trust_remote_code,
                )
        except ValueError as error:
            raise _not_streamed(directory, config.model_type, error) from error
        self.model.eval()
        found = require_same_tensors(directory, self.model, self._reader.stored)
        require_sound_values(self._reader.stored, found, self.model, self._reader)
        self._decoder_name, layers = _find_decoder(self.model)
        self.blocks = [
            DecoderBlock(index, f"{self._decoder_name}.{index}", module)
            for index, module in enumerate(layers)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """What blocks compute in, and what the outer weights are held in."""
        return self._dtype

    @property
    def outer_names(self) -> list[str]:
        """Stored tensors outside the decoder blocks (embeddings, final norm, output head)."""
        return [
            name for name in self._reader.names if not name.startswith(self._decoder_name + ".")
        ]

    def read(self, name: str) -> torch.Tensor:
        """One stored tensor."""
        return self._reader.read(name)

    def load(self, module: nn.Module, prefix: str) -> None:
        """Fill ``module`` (named ``prefix``) with its stored weights in the compute dtype."""
        for name, parameter in list(module.named_parameters()):
            stored = self._reader.read(f"{prefix}.{name}" if prefix else name)
            if stored.shape != parameter.shape:
                raise ModelError(
                    f"{prefix}.{name}: stored shape {tuple(stored.shape)} does not match "
                    f"config.json's {tuple(parameter.shape)}"
                )
            _set_parameter(module, name, stored.to(self._device, self._dtype))

    def release(self, module: nn.Module) -> None:
        """Drop a module's weights again."""
        module.to("meta")

    def load_outer(self) -> None:
        """Fill embeddings, final norm and output head; ties are restored by the model itself."""
        for name in self.outer_names:
            if _has_parameter(self.model, name):
                _set_parameter(
                    self.model, name, self._reader.read(name).to(self._device, self._dtype)
                )
        self.model.tie_weights()

    def rehearse(self) -> None:
        """Run everything outside the blocks once, so that a plan knows what the run would meet.

        Raises:
            ModelError: the architecture's forward cannot be run block by block.
        """
        self.load_outer()
        try:
            hidden, _ = self.enter(torch.zeros(1, 2, dtype=torch.int64))
            self.leave(hidden)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise _not_streamed(self._directory, self.model.config.model_type, error) from error

    @torch.inference_mode()
    def enter(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, BlockArguments]:
        """Run the model up to its first block and record how every block is called.

        Args:
            token_ids: [B, T] int64.

        Returns:
            Hidden states [B, T, H] entering block 0, and the keyword arguments of each block.
        """
        recorders = [_Recorder(block.module) for block in self.blocks]
        layers = self.model.get_submodule(self._decoder_name)
        for index, recorder in enumerate(recorders):
            layers[index] = recorder
        try:
            self.model.base_model(input_ids=token_ids.to(self._device), use_cache=False)
        finally:
            for block in self.blocks:
                layers[block.index] = block.module
        first = recorders[0].hidden
        if first is None:
            raise ModelError("the model's forward never called its first decoder block")
        return first, [recorder.arguments for recorder in recorders]

    @torch.inference_mode()
    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: hidden states [B, T, H] to logits [B, T, V] fp32."""
        norm = _final_norm(self.model.base_model)
        logits: torch.Tensor = self.model.get_output_embeddings()(norm(hidden)).float()
        return logits


def _not_streamed(directory: Path, model_type: str, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:160]
    return ModelError(
        f"{directory}: config.json: model_type {model_type!r} cannot be compressed block by block "
        f"({reason}); take a model of another architecture"
    )


def call_block(module: nn.Module, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """Run one decoder block; some return a tuple whose first item is the hidden state."""
    out = module(hidden, **arguments)
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


def linear_layers(block: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The block's linear layers with their names inside it."""
    return (
        (name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)
    )


class _Recorder(nn.Module):
    """Stands in for a decoder block: keeps its call and passes the hidden states through."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._of = (block,)  # in a tuple, so that it does not become a part of this module
        self.hidden: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.hidden = hidden
        self.arguments = arguments
        return hidden

    def __getattr__(self, name: str) -> Any:
        # Some models read attributes such as ``attention_type`` off the block before calling it.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._of[0], name)


def _find_decoder(model: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    uniform = [
        (name, module) for name, module in lists if len({type(entry) for entry in module}) == 1
    ]
    if not uniform:
        raise ModelError(f"{type(model).__name__}: found no list of decoder blocks")
    return max(uniform, key=lambda item: len(item[1]))


def _final_norm(base: nn.Module) -> nn.Module:
    for name in ("norm", "final_layernorm", "ln_f"):
        if hasattr(base, name):
            norm: nn.Module = getattr(base, name)
            return norm
    raise AttributeError("found no final norm: norm, final_layernorm, ln_f")


def _has_parameter(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    try:
        return leaf in model.get_submodule(owner)._parameters
    except AttributeError:
        return False


def _set_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
