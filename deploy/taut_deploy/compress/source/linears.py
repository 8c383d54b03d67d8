"""The linear layers of a decoder block, whatever class they are of.

GPT-2 and its kin use transformers' ``Conv1D``, which stores its weight [K, N]: in the skeleton it
becomes an ``nn.Linear``, and its weight is turned when it is read and written.
"""

import re
from collections.abc import Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D

from taut_deploy.compress.source.experts import ExpertNames, LinearExperts


def linear_layers(block: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The block's linear layers with their names inside it, routers and gates of experts left out.

    A router decides by small differences, costs nothing, and servers hold it dense.
    """
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and not _is_router(block, name, module):
            yield name, module


def dense_products(name: str, module: nn.Module) -> list[str]:
    """The layer a module is to readers: a linear one, or a router with a matrix of its own."""
    weight = module._parameters.get("weight")
    matrix = weight is not None and weight.ndim == 2 and not isinstance(module, nn.Embedding)
    return [name] if matrix else []


def products_of_stack(name: str, module: nn.Module) -> list[str]:
    """What servers look experts up by that stay stacked in 3-D tensors: the first one's layers."""
    stacked = [value for value in module._parameters.values() if value is not None]
    if not any(value.ndim == 3 for value in stacked) or isinstance(module, nn.Conv1d):
        return []
    names = ExpertNames()
    return [f"{name}.0.{leaf}" for leaf in (names.gate, names.up, names.down)]


def expression_of_stack(name: str) -> str:
    """The names of :func:`products_of_stack` as one expression, for readers that rename layers.

    vLLM's gpt-oss takes ``down_proj`` at a name's end for its own tensor's, in our list too;
    expressions it leaves alone. What stands before the blocks' list differs between readers.
    """
    inner = re.search(r"[^.]+\.\d+\..*", name)
    place = re.escape(name if inner is None else inner[0])
    names = ExpertNames()
    return rf"re:.*{place}\.0\.({names.gate}|{names.up}|{names.down})$"


def _is_router(block: nn.Module, name: str, module: nn.Linear) -> bool:
    parent = block.get_submodule(name.rpartition(".")[0])
    experts = [child for child in parent.children() if _num_experts(child)]
    return any(module.out_features in (1, _num_experts(child)) for child in experts)


def _num_experts(module: nn.Module) -> int:
    """How many experts a module holds: as a list of equal modules, or stacked; 0 for no such."""
    if isinstance(module, LinearExperts):
        return module.num_experts
    stacked = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(parameter.ndim == 3 for parameter in stacked):
        return next(parameter.shape[0] for parameter in stacked if parameter.ndim == 3)
    if isinstance(module, nn.ModuleList) and len({type(entry) for entry in module}) == 1:
        return len(module)
    return 0


def replace_conv1d(block: nn.Module) -> list[str]:
    """Put an ``nn.Linear`` in place of every ``Conv1D``; weights stay on the meta device.

    Returns:
        Names inside the block of what was replaced.
    """
    found = [name for name, module in block.named_modules() if isinstance(module, Conv1D)]
    for name in found:
        weight = block.get_submodule(name).get_parameter("weight")
        rows, columns = weight.shape
        linear = nn.Linear(rows, columns, device="meta", dtype=weight.dtype)
        block.set_submodule(name, linear)
    return found
