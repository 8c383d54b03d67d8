"""The ``rotate`` stage: a model directory whose residual stream and values are turned.

One decoder block is in memory at a time, beside embeddings and head. Every part is run before and
after on a few tokens in fp32; one that then does something else is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.calibrate.observe import observe_block
from taut_deploy.compress.equalize.hadamard import random_rotation
from taut_deploy.compress.equalize.rotate import require_same_function, rotate_block, rotate_ends
from taut_deploy.compress.job import CompressionJob, fingerprint, stored_dtype
from taut_deploy.compress.kept_files import kept_files
from taut_deploy.compress.shards import shard_index, shard_name
from taut_deploy.compress.source.calls import call_block
from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.workspace import Workspace, remove_leftovers
from taut_deploy.errors import RecipeError
from taut_deploy.files import copy_files, write_json_atomically
from taut_deploy.models.directory import read_config
from taut_deploy.recipe import Rotate

_TOKENS = 8

Progress = Callable[[int, int, str], None]


def rotate_model(job: CompressionJob, stage: Rotate, output: Path, progress: Progress) -> None:
    """Write ``job.model``, turned, as a plain model directory; one that is there is left alone.

    Args:
        job: whose model, device and right to run the model's code are used.
        stage: of the recipe.
        output: directory to make; another run goes on where a killed one was.
        progress: told of every block.

    Raises:
        RecipeError: the model cannot be turned; names the part.
        ModelError: the model cannot be read.
        OutputError: the disk is full.
    """
    if output.is_dir():
        remove_leftovers(output)
        return
    identity = {**fingerprint(job), "rotate": stage.hashed()}
    workspace = Workspace(output, identity, job.resume)
    rotation = _Rotation(job, stage)
    blocks = rotation.stream.blocks
    for block in blocks:
        if workspace.committed(f"block-{block.index}") is None:
            progress(block.index, len(blocks), f"rotating {block.name}")
            workspace.save_shard(shard_name(block.index, len(blocks)), rotation.block(block))
            workspace.commit(f"block-{block.index}", {})
    workspace.save_shard(shard_name(len(blocks), len(blocks)), rotation.ends())
    target, source = workspace.directory, Path(job.model.path)
    write_json_atomically(target / "model.safetensors.index.json", shard_index(target))
    copy_files(kept_files(source, with_code=job.trust_remote_code), source, target)
    config = {**read_config(source), "tie_word_embeddings": False}
    write_json_atomically(target / "config.json", config)
    workspace.publish()


def rehearse_rotation(job: CompressionJob, stage: Rotate) -> int:
    """Turn the first block and the ends in memory, so that a plan refuses what the run would.

    Returns:
        Bytes that the model grows by: its head, where that was tied.

    Raises:
        RecipeError: the model cannot be turned; names the part.
        ModelError: the model cannot be read.
    """
    rotation = _Rotation(job, stage)
    rotation.block(rotation.stream.blocks[0])
    tied = rotation.is_tied
    rotation.ends()
    weight = rotation.stream.model.get_output_embeddings().weight
    return weight.numel() * stored_dtype(Path(job.model.path)).itemsize if tied else 0


class _Rotation:
    """A model in fp32, the matrices that turn it, and a few tokens to compare with."""

    def __init__(self, job: CompressionJob, stage: Rotate) -> None:
        directory, device = Path(job.model.path), torch.device(job.device)
        if "text_config" in read_config(directory):
            raise RecipeError(
                f"stages.rotate: {directory}: its embeddings also take what is no text; leave this "
                "stage out"
            )
        self._dtype = stored_dtype(directory)
        self.stream = StreamedModel(
            directory, torch.float32, device, trust_remote_code=job.trust_remote_code
        )
        self.stream.rehearse()
        embeddings = self.stream.model.get_input_embeddings().weight
        self._residual = random_rotation(embeddings.shape[1], stage.seed).to(device)
        width = _value_width(self.stream.blocks[0].module)
        self._heads = None if width is None else random_rotation(width, stage.seed + 1).to(device)
        self._tokens = torch.arange(_TOKENS)[None] % embeddings.shape[0]
        self._hidden, self._arguments = self.stream.enter(self._tokens)
        self._turned = (self._hidden.double() @ self._residual).float()

    @property
    def is_tied(self) -> bool:
        """Whether embeddings and head share their weight."""
        model = self.stream.model
        tied: bool = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        return tied

    @torch.inference_mode()
    def block(self, block: DecoderBlock) -> dict[str, torch.Tensor]:
        """Load one block and turn it; its tensors by their names in a file."""
        module, arguments = block.module, self._arguments[block.index]
        self.stream.load(module, block.name)
        groups = observe_block(module, self._hidden, arguments, 1, with_hessian=False)
        before = call_block(module, self._hidden, arguments)
        try:
            rotate_block(module, groups, self._residual, self._heads)
            after = call_block(module, self._turned, arguments)
            require_same_function(before, after, self._residual)
        except (ValueError, TypeError) as error:
            raise _refusal(block.name, error) from error
        kept = {name for name, _ in module.named_parameters()}
        tensors = {
            f"{block.name}.{name}": value.to(self._dtype) if name in kept else value
            for name, value in module.state_dict().items()
        }
        stored = self.stream.to_stored(tensors)
        self.stream.release(module)
        return stored

    @torch.inference_mode()
    def ends(self) -> dict[str, torch.Tensor]:
        """Turn embeddings, final norm and head; all that is outside the blocks, as in a file."""
        model = self.stream.model
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        norm, logits = self._final_norm(head)
        if self.is_tied:
            head.weight = nn.Parameter(embeddings.weight.data.clone(), requires_grad=False)
        try:
            embeddings.weight.data = rotate_ends(embeddings.weight.data, norm, head, self._residual)
            require_same_function(self._hidden, self.stream.embed(self._tokens), self._residual)
            require_same_function(logits, self.stream.leave(self._turned), None)
        except (ValueError, TypeError) as error:
            raise _refusal("embeddings and head", error) from error
        names = {module: name for name, module in model.named_modules()}
        turned = {
            f"{names[module]}.weight": module.weight.data.to(self._dtype)
            for module in (embeddings, norm, head)
        }
        stored = {name: self.stream.read(name) for name in self.stream.outer_names}
        return stored | self.stream.to_stored(turned)

    def _final_norm(self, head: nn.Module) -> tuple[Any, torch.Tensor]:
        """The module whose output the head reads, and the logits."""
        read: list[torch.Tensor] = []
        given: list[tuple[nn.Module, torch.Tensor]] = []
        modules = [module for module in self.stream.model.modules() if module is not head]
        handles = [head.register_forward_pre_hook(lambda _module, args: read.append(args[0]))]
        handles += [
            module.register_forward_hook(
                lambda module, _args, out: (
                    given.append((module, out)) if torch.is_tensor(out) else None
                )
            )
            for module in modules
        ]
        try:
            logits = self.stream.leave(self._hidden)
        finally:
            for handle in handles:
                handle.remove()
        memory = read[0].untyped_storage().data_ptr()
        for module, out in given:
            if out.untyped_storage().data_ptr() == memory:
                return module, logits
        raise _refusal("head", "it does not read a norm")


def _value_width(block: nn.Module) -> int | None:
    """Width of one head's values; None where values have no projection of their own."""
    for name, module in block.named_modules():
        if name.rpartition(".")[2] == "v_proj":
            width = getattr(block.get_submodule(name.rpartition(".")[0]), "head_dim", None)
            return width if isinstance(width, int) and isinstance(module, nn.Linear) else None
    return None


def _refusal(part: str, reason: object) -> RecipeError:
    return RecipeError(
        f"stages.rotate: {part}: {reason}; this architecture cannot be rotated, leave the stage out"
    )
