"""What a checkpoint holds of a compressed block."""

import torch

from taut_deploy.compress.block import CompressedBlock
from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.errors import CheckpointError


def tensors_of(
    block: DecoderBlock, result: CompressedBlock, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The block's tensors by their names in the skeleton, layers' new ones under the layer's.

    Args:
        block: compressed.
        result: what is stored of its layers.
        dtype: of parameters that stay dense; buffers keep theirs.

    Raises:
        CheckpointError: what was packed does not read back.
    """
    tensors: dict[str, torch.Tensor] = {}
    parameters = {name for name, _ in block.module.named_parameters()}
    for name, value in block.module.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer not in result.stored:
            tensors[f"{block.name}.{name}"] = value.to(dtype) if name in parameters else value
            continue
        stored = result.stored[layer]
        written = stored.tensors()
        if not stored.reads_back(written):
            raise CheckpointError(
                f"{block.name}.{layer}: what was packed does not read back; nothing was written"
            )
        tensors |= {f"{block.name}.{layer}.{key}": part for key, part in written.items()}
    return tensors
