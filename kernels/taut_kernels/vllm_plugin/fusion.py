"""A pass over vLLM's compiled graph: its quantisations become ours, fused where that is possible.

A norm or activation and the quantisation behind it become one op. vLLM fuses per-token
quantisation with a norm for fp8 only, and with an activation not at all. What is left (the input of
the o projection, which attention writes; a norm that something else reads too) becomes
`taut::row_quant`, which may start before the kernel in front has ended; vLLM's op cannot. vLLM's
configuration takes a pass by name: ``--compilation-config '{"inductor_passes":
{"post_grad_custom_post_pass": "taut_kernels.fuse_for_vllm"}}'``. It runs before vLLM lowers its IR
ops and never touches a norm or activation that something else reads too. Holds no arithmetic.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from taut_kernels.activation import silu_mul
from taut_kernels.norm import rms_norm
from taut_kernels.rowwise import quantize, row_quant

_logger = logging.getLogger(__name__)
_FUSED = {"norms": 0, "activations": 0, "quantisations": 0}
"""What this process has fused or replaced so far, for the worker's record."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A quantisation in the graph.

    Attributes:
        node: the functionalised call.
        input: what it quantises.
        dtype: 8-bit type of the result.
        scale: given scale, or None where each row gets its own.
        results: the nodes that take the values and the scales out of ``node``.
    """

    node: fx.Node
    input: fx.Node
    dtype: torch.dtype
    scale: fx.Node | None
    results: tuple[fx.Node | None, fx.Node | None]


def _vllm_op(name: str) -> Any:
    namespace = torch.ops._C
    return getattr(namespace, name).default if hasattr(namespace, name) else None


def _result(node: fx.Node, index: int) -> fx.Node | None:
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    return None


def _quantisation(node: fx.Node) -> Quantisation | None:
    """Read a node as a quantisation we have a fused form of."""
    if node.target is not auto_functionalized:
        return None
    op, kwargs = node.args[0], node.kwargs
    source = kwargs.get("input")
    if op is None or not isinstance(source, fx.Node):
        return None
    values, scales = _result(node, 1), _result(node, 2)
    if op is _vllm_op("dynamic_scaled_int8_quant") and kwargs.get("azp") is None:
        return Quantisation(node, source, row_quant.INT8, None, (values, scales))
    if op is _vllm_op("dynamic_per_token_scaled_fp8_quant") and kwargs.get("scale_ub") is None:
        return Quantisation(node, source, row_quant.FP8, None, (values, scales))
    scale = kwargs.get("scale")
    if op is _vllm_op("static_scaled_fp8_quant") and isinstance(scale, fx.Node):
        one = scale.meta["val"].numel() == 1 and scale.meta["val"].dtype is torch.float32
        if one:
            return Quantisation(node, source, row_quant.FP8, scale, (values, None))
    return None


def _is_rows(node: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    if not isinstance(node, fx.Node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype not in dtypes:
        return False
    return bool(value.stride(1) == 1)


def _fused_call(
    graph: fx.Graph, quantisation: Quantisation, op: str, arguments: tuple[Any, ...]
) -> None:
    """Insert our op at the current point and hand its results to the quantisation's users."""
    ops = torch.ops.taut
    if quantisation.scale is None:
        target = getattr(ops, f"{op}_quant").default
        fused = graph.call_function(target, (*arguments, quantisation.dtype))
        taken = [graph.call_function(operator.getitem, (fused, index)) for index in (0, 1)]
    else:
        target = getattr(ops, f"{op}_static_quant").default
        fused = graph.call_function(target, (*arguments, quantisation.scale))
        taken = [fused]
    for new, old in zip(taken, quantisation.results, strict=False):
        if old is not None:
            new.meta["val"] = old.meta["val"]
            old.replace_all_uses_with(new)
            graph.erase_node(old)
    if quantisation.scale is None:
        fused.meta["val"] = tuple(node.meta.get("val") for node in taken)
    graph.erase_node(quantisation.node)


def _fuse_norm(graph: fx.Graph, quantisation: Quantisation) -> bool:
    """Fuse with `vllm_ir.rms_norm`."""
    norm = quantisation.input
    x, weight, epsilon, *rest = norm.args
    if any(extra is not None for extra in rest) or not _weight_fits(x, weight):
        return False
    with graph.inserting_before(quantisation.node):
        _fused_call(graph, quantisation, "rms_norm", (x, weight, None, epsilon))
    graph.erase_node(norm)
    return True


def _weight_fits(x: Any, weight: Any) -> bool:
    if not _is_rows(x, rms_norm.DTYPES) or x.meta["val"].shape[1] > rms_norm.MAX_N:
        return False
    if weight is None:
        return True
    return weight.meta["val"].dtype in (x.meta["val"].dtype, torch.float32)


def _fuse_add_norm(graph: fx.Graph, quantisation: Quantisation) -> bool:
    """Fuse with `vllm_ir.fused_add_rms_norm`, whose second result is the new residual."""
    normed = quantisation.input
    norm = normed.args[0]
    assert isinstance(norm, fx.Node)
    x, residual, weight, epsilon, *rest = norm.args
    if any(extra is not None for extra in rest) or not _weight_fits(x, weight):
        return False
    if not _is_rows(residual, (x.meta["val"].dtype,)):  # type: ignore[union-attr]
        return False
    assert isinstance(residual, fx.Node)
    scale = quantisation.scale
    if scale is not None and scale.op not in ("placeholder", "get_attr"):
        return False
    summed = _result(norm, 1)
    # Here, so that the new residual is there before its first reader. Our op updates a copy, which
    # vLLM's clone elimination drops where nobody reads the old residual.
    with graph.inserting_before(norm):
        copy = graph.call_function(torch.ops.aten.clone.default, (residual,))
        copy.meta["val"] = residual.meta["val"]
        _fused_call(graph, quantisation, "rms_norm", (x, weight, copy, epsilon))
    if summed is not None:
        summed.replace_all_uses_with(copy)
        graph.erase_node(summed)
    graph.erase_node(normed)
    graph.erase_node(norm)
    return True


def _fuse_activation(graph: fx.Graph, quantisation: Quantisation) -> bool:
    """Fuse with `taut::silu_mul`."""
    activation = quantisation.input
    if not _is_rows(activation.args[0], silu_mul.DTYPES):
        return False
    with graph.inserting_before(quantisation.node):
        _fused_call(graph, quantisation, "silu_mul", tuple(activation.args))
    graph.erase_node(activation)
    return True


def _replace(graph: fx.Graph, quantisation: Quantisation) -> bool:
    """Replace a quantisation by each row's own scale that nothing was fused with."""
    source = quantisation.input
    if quantisation.scale is not None or not _is_rows(source, quantize.DTYPES):
        return False
    if source.meta["val"].shape[1] > quantize.MAX_N:
        return False
    with graph.inserting_before(quantisation.node):
        _fused_call(graph, quantisation, "row", (source,))
    return True


def _producer(node: fx.Node) -> Any:
    """Return what computes a node: an op, for a first result the op it is taken from."""
    if node.target is operator.getitem and node.args[1] == 0:
        source = node.args[0]
        return source.target if isinstance(source, fx.Node) else None
    return node.target


def _fuse_with_producer(graph: fx.Graph, quantisation: Quantisation) -> str | None:
    """Fuse with what computes the input, where nothing else reads it; return what that was."""
    if len(quantisation.input.users) != 1:
        return None
    ir, producer = torch.ops.vllm_ir, _producer(quantisation.input)
    if producer is ir.rms_norm.default:
        return "norms" if _fuse_norm(graph, quantisation) else None
    if producer is ir.fused_add_rms_norm.default:
        return "norms" if _fuse_add_norm(graph, quantisation) else None
    if producer is torch.ops.taut.silu_mul.default:
        return "activations" if _fuse_activation(graph, quantisation) else None
    return None


def fuse(graph: fx.Graph) -> None:
    """Replace norm or activation + quantisation by our fused op wherever one reads the other alone.

    Other quantisations, by each row's own scale, become `taut::row_quant`.

    Args:
        graph: vLLM's functional post-grad graph, before IR lowering; changed in place.
    """
    before = fused_so_far()
    for node in list(graph.nodes):
        quantisation = _quantisation(node)
        if quantisation is None:
            continue
        if kind := _fuse_with_producer(graph, quantisation):
            _FUSED[kind] += 1
        else:
            _FUSED["quantisations"] += _replace(graph, quantisation)
    new = {name: count - before[name] for name, count in _FUSED.items()}
    if any(new.values()):
        _logger.info(
            "taut fused with a quantisation: %(norms)d norms, %(activations)d acts; "
            "alone: %(quantisations)d quantisations",
            new,
        )


def fused_so_far() -> dict[str, int]:
    """Return how many norms and activations this process has fused with a quantisation.

    Under ``quantisations`` those that it has replaced alone.
    """
    return dict(_FUSED)
