"""All that the command line needs of this package, in one place: nothing else of it is imported.

Importing this module imports nothing: a name brings its module with it when it is first asked for,
so that commands which need no tensor library start without one.

============================  =====================================================================
why_not_ready                 why a worker here would not load the plugin
why_int8_wrong                why vLLM's int8 product must not serve on this CPU
requested_mode, cache_key,    what ``TAUT_KERNELS`` asks for, and what tells compiled graphs of one
MODE_VARIABLE                 set of kernels from another's
compiled_graph                what lets a worker load the graph that one before it compiled
fused_ops, decode_attention   whether vLLM's norms and attention are exchanged, why not, and options
ELEMENT_BYTES                 of a paged cache's types
why_not_ours, remark,         which kernel a W4A16 layer would get, and why
why_not_preferred, of_layer,
is_measured, WeightFormat
measured_here                 the file of what was measured on this machine's card
scaled_mm_op,                 likewise for layers of 8 bits
block_scaled_mm_op
linear_kl,                    losses of training whose logits never exist as a whole
linear_cross_entropy
why_not_packed                which layers our product of 4- and 8-bit weights takes on a CPU
codebook, layer_description,  how checkpoints of ``quant_method: "taut"`` are described and read
low_rank_linear
============================  =====================================================================
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taut_kernels.formats import codebook as codebook
    from taut_kernels.formats import layer_description as layer_description
    from taut_kernels.formats.low_rank import low_rank_linear as low_rank_linear
    from taut_kernels.gemm.w4a16.verdict import is_measured as is_measured
    from taut_kernels.gemm.w4a16.verdict import remark as remark
    from taut_kernels.gemm.w4a16.weight_format import WeightFormat as WeightFormat
    from taut_kernels.gemm.w4a16.weight_format import of_layer as of_layer
    from taut_kernels.gemm.weight_only.cpu_linear import why_not_packed as why_not_packed
    from taut_kernels.launch import measured_here as measured_here
    from taut_kernels.loss.linear_cross_entropy import (
        linear_cross_entropy as linear_cross_entropy,
    )
    from taut_kernels.loss.linear_kl import linear_kl as linear_kl
    from taut_kernels.vllm_plugin import MODE_VARIABLE as MODE_VARIABLE
    from taut_kernels.vllm_plugin import block_scaled_mm_op as block_scaled_mm_op
    from taut_kernels.vllm_plugin import cache_key as cache_key
    from taut_kernels.vllm_plugin import compiled_graph as compiled_graph
    from taut_kernels.vllm_plugin import decode_attention as decode_attention
    from taut_kernels.vllm_plugin import fused_ops as fused_ops
    from taut_kernels.vllm_plugin import requested_mode as requested_mode
    from taut_kernels.vllm_plugin import scaled_mm_op as scaled_mm_op
    from taut_kernels.vllm_plugin.decode_attention import ELEMENT_BYTES as ELEMENT_BYTES
    from taut_kernels.vllm_plugin.fused_ops import used_by_default as used_by_default
    from taut_kernels.vllm_plugin.fused_ops import why_not_fused_ops as why_not_fused_ops
    from taut_kernels.vllm_plugin.selection import why_not_ours as why_not_ours
    from taut_kernels.vllm_plugin.selection import why_not_preferred as why_not_preferred
    from taut_kernels.vllm_plugin.selfcheck import why_int8_wrong as why_int8_wrong
    from taut_kernels.vllm_plugin.selfcheck import why_not_ready as why_not_ready

_PLACES: dict[str, tuple[str, ...]] = {
    "formats.low_rank": ("low_rank_linear",),
    "gemm.w4a16.verdict": ("is_measured", "remark"),
    "gemm.w4a16.weight_format": ("WeightFormat", "of_layer"),
    "gemm.weight_only.cpu_linear": ("why_not_packed",),
    "loss.linear_cross_entropy": ("linear_cross_entropy",),
    "loss.linear_kl": ("linear_kl",),
    "vllm_plugin": ("MODE_VARIABLE", "cache_key", "requested_mode"),
    "vllm_plugin.decode_attention": ("ELEMENT_BYTES",),
    "vllm_plugin.fused_ops": ("used_by_default", "why_not_fused_ops"),
    "vllm_plugin.selection": ("why_not_ours", "why_not_preferred"),
    "vllm_plugin.selfcheck": ("why_int8_wrong", "why_not_ready"),
}
_MODULES: dict[str, tuple[str, ...]] = {
    "formats": ("codebook", "layer_description"),
    "launch": ("measured_here",),
    "vllm_plugin": (
        "block_scaled_mm_op",
        "compiled_graph",
        "decode_attention",
        "fused_ops",
        "scaled_mm_op",
    ),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}
_FOLDER_OF = {name: folder for folder, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # the type checker is to know the names above and no others

    def __getattr__(name: str) -> Any:
        """Import what a name stands for (PEP 562)."""
        if name in _MODULE_OF:
            return getattr(import_module(f"taut_kernels.{_MODULE_OF[name]}"), name)
        if name in _FOLDER_OF:
            return import_module(f"taut_kernels.{_FOLDER_OF[name]}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names."""
    return sorted((*_MODULE_OF, *_FOLDER_OF))
