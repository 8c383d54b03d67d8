"""Whether a GGUF file holds the tensors of its architecture: all, no others, of their sizes.

transformers' own table of names is asked, with a skeleton of the model that has no storage.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from taut_deploy.errors import ModelError
from taut_deploy.models.gguf_header import GgufHeader
from taut_deploy.models.values import is_finite


def require_all_tensors(source: Path, header: GgufHeader, config: Any) -> dict[str, torch.Size]:
    """Compare the header's tensors with what the architecture has.

    Args:
        source: the file, for errors.
        header: checked.
        config: transformers', made from the header's metadata.

    Returns:
        Shapes by transformers' names, tied ones included.

    Raises:
        ModelError: naming the first tensor that is missing, unknown or of another size.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    hf_names = _hf_names(skeleton, header.architecture, config)
    stored: dict[str, int] = defaultdict(int)
    unknown = []
    for name, tensor in header.tensors.items():
        if name in hf_names:
            stored[hf_names[name]] += tensor.elements
        else:
            unknown.append(name)
    tied = skeleton.all_tied_weights_keys
    gguf_names = {hf_name: name for name, hf_name in hf_names.items()}
    shapes = {name: value.shape for name, value in skeleton.state_dict().items()}
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    missing = [name for name in sizes if name not in stored and tied.get(name) not in stored]
    if missing:
        shown = gguf_names.get(missing[0], missing[0])
        raise ModelError(
            f"{source}: {len(missing)} tensors are missing, the first is {shown}; "
            "fetch the whole file"
        )
    if unknown:
        raise ModelError(
            f"{source}: transformers has no place for {len(unknown)} of its tensors, the first is "
            f"{unknown[0]}; without it this is another model, so take its Hugging Face directory"
        )
    for name, elements in stored.items():
        if sizes.get(name) != elements:
            raise ModelError(
                f"{source}: the tensor {gguf_names[name]} has {elements} values, its metadata "
                f"says {sizes.get(name)}"
            )
    return shapes


def require_shapes(
    source: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
) -> None:
    """Compare what was loaded: transformers puts a GGUF's tensors in whatever shape they have.

    Raises:
        ModelError: naming the first tensor of another shape.
    """
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape)
        if found != tuple(shape):
            raise ModelError(
                f"{source}: the tensor {name} has the shape {found}, its metadata says "
                f"{tuple(shape)}"
            )


def _hf_names(skeleton: Any, architecture: str, config: Any) -> dict[str, str]:
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    names: dict[str, str] = get_gguf_hf_weights_map(skeleton, processor)
    return names


def require_finite(source: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse NaN and infinity, which the weights of no model have.

    Raises:
        ModelError: naming the first tensor with one.
    """
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ModelError(f"{source}: the tensor {name} holds NaN or infinity; fetch it again")
