"""Rotations: the same function in a basis where no channel sticks out, folded into the weights.

Sources: QuaRot, arXiv:2404.00456, §4 and SpinQuant, arXiv:2405.16406, §3: R1 turns the residual
stream (embedding, every block, head), R2 turns each head's values. Both are folded offline, nothing
is multiplied at run time. R1 passes through a norm only if the norm does not weigh channels and
does not subtract a mean, so its weight is folded into the layers it feeds first. Embedding and head
then differ: tied ones are untied, which costs one more ``vocabulary x hidden`` tensor.
"""

import torch
from torch import nn

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.equalize.fold import weight_offset

# Layers whose output is added to the residual stream.
_WRITERS = ("o_proj", "down_proj")


def fuse_norm(norm: nn.Module, layers: list[nn.Linear]) -> None:
    """Move a norm's channel weights into the layers it feeds; it weighs nothing afterwards.

    Raises:
        ValueError: the norm has a bias or does not scale its output by its weight.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        raise ValueError(f"{type(norm).__name__} has no weight per channel")
    offset = weight_offset(norm, weight)
    if offset is None or getattr(norm, "bias", None) is not None:
        raise ValueError(f"{type(norm).__name__} is not a scaling RMSNorm")
    scale = weight.data.float() + offset
    for layer in layers:
        layer.weight.data = layer.weight.data.float() * scale
    weight.data = torch.full_like(weight.data, 1.0 - offset)


def rotate_inputs(layer: nn.Linear, rotation: torch.Tensor) -> None:
    """Let a layer read inputs turned by ``rotation`` [K, K]: ``W ← W R``."""
    layer.weight.data = (layer.weight.data.double() @ rotation).float()


def rotate_outputs(layer: nn.Linear, rotation: torch.Tensor) -> None:
    """Let a layer write outputs turned by ``rotation`` [N, N]: ``W ← Rᵀ W``, ``b ← Rᵀ b``."""
    layer.weight.data = (rotation.T @ layer.weight.data.double()).float()
    if layer.bias is not None:
        layer.bias.data = (layer.bias.data.double() @ rotation).float()


def rotate_values(value: nn.Linear, output: nn.Linear, rotation: torch.Tensor) -> None:
    """R2: turn every head's values and turn them back in the output projection.

    Args:
        value: value projection, [heads_kv * d, H].
        output: output projection, [H, heads * d].
        rotation: [d, d], the same for every head, so that grouped queries may share values.

    Raises:
        ValueError: the head width does not divide a projection.
    """
    width = len(rotation)
    if value.out_features % width or output.in_features % width:
        raise ValueError(
            f"heads of {width} do not divide the values ({value.out_features}) or the output "
            f"projection ({output.in_features})"
        )
    heads = torch.eye(value.out_features // width, dtype=rotation.dtype, device=rotation.device)
    rotate_outputs(value, torch.kron(heads, rotation))
    heads = torch.eye(output.in_features // width, dtype=rotation.dtype, device=rotation.device)
    rotate_inputs(output, torch.kron(heads, rotation))


def rotate_block(
    block: nn.Module,
    groups: list[InputGroup],
    residual: torch.Tensor,
    heads: torch.Tensor | None,
) -> None:
    """Turn one decoder block: ``block'(h R) = block(h) R``.

    Weights are fp32 afterwards; the caller checks the function (:func:`require_same_function`) and
    casts.

    Args:
        block: a loaded decoder block of RMSNorms, attention and a gated MLP.
        groups: its linear inputs (:func:`~taut_deploy.compress.calibrate.observe.observe_block`).
        residual: R1, [H, H] fp64.
        heads: R2, [d, d] fp64, or None to leave the values alone.

    Raises:
        ValueError: a layer reads or writes the residual stream in a way that is not known.
    """
    modules = dict(block.named_modules())
    for group in groups:
        layers = [_linear(modules[name]) for name in group.layers]
        leaf = group.layers[0].rpartition(".")[2]
        if leaf in _WRITERS:
            if len(layers) != 1 or layers[0].out_features != len(residual):
                raise ValueError(f"{group.layers[0]} does not write the residual stream")
            rotate_outputs(layers[0], residual)
        elif group.read_elsewhere:
            raise ValueError(f"{group.producer} is read by more than {', '.join(group.layers)}")
        elif group.producer is not None and layers[0].in_features == len(residual):
            fuse_norm(modules[group.producer], layers)
            for layer in layers:
                rotate_inputs(layer, residual)
        else:
            raise ValueError(f"{group.layers[0]} reads neither a norm nor a head's values")
    if heads is not None:
        _rotate_heads(modules, heads)


def rotate_ends(
    embedding: torch.Tensor, norm: nn.Module, head: nn.Linear, residual: torch.Tensor
) -> torch.Tensor:
    """Turn what stands before and behind the blocks.

    Args:
        embedding: [V, H] token embeddings.
        norm: final norm; weighs nothing afterwards.
        head: output head with a weight of its own; takes the norm's weight and R1.
        residual: R1, [H, H] fp64.

    Returns:
        The turned embedding, [V, H] fp32.

    Raises:
        ValueError: the norm cannot be folded.
    """
    fuse_norm(norm, [head])
    rotate_inputs(head, residual)
    return (embedding.double() @ residual).float()


def require_same_function(
    before: torch.Tensor, after: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Refuse a part of the model that does something else after turning.

    Args:
        before: [B, T, H] output of the part as it was, fp32.
        after: [B, T, H] output of the turned part for the turned input, fp32.
        residual: R1, or None where the output is not of the residual stream.

    Raises:
        ValueError: the outputs differ by more than fp32 rounding makes plausible.
    """
    wanted = before.double() if residual is None else before.double() @ residual
    error = float((after.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    if not error < 1e-4:
        raise ValueError(f"turning the residual stream changes its output by {error:.1e}")


def _rotate_heads(modules: dict[str, nn.Module], heads: torch.Tensor) -> None:
    for name, module in modules.items():
        if name.rpartition(".")[2] != "v_proj":
            continue
        output = modules.get(name.removesuffix("v_proj") + "o_proj")
        if output is None:
            raise ValueError(f"{name} has no output projection beside it")
        rotate_values(_linear(module), _linear(output), heads)


def _linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{type(module).__name__} is not a linear layer")
    return module
