"""Taut's kernels: Triton implementations, custom ops, weight formats and the vLLM plugin.

Importing the package does nothing. The rooms inside:

- :mod:`taut_kernels.launch`, :mod:`taut_kernels.hopper`: what launchers and device code share
- :mod:`taut_kernels.gemm`: products with compressed weights, ``w4a16`` and ``scaled_mm``
- ``norm``, ``activation``, ``rope``, ``softmax``, ``quantize``: ops along rows, over ``rowwise``
- :mod:`taut_kernels.attention`: ``prefill``, ``decode`` and ``cache_write``
- :mod:`taut_kernels.loss`: cross entropy and distillation losses, with or without the projection
- :mod:`taut_kernels.primitives`: GEMM, transposition, convolution, pooling, reduction
- ``tiles``: tables of measured tiles, a file an op and card
- :mod:`taut_bench.instruments`: roofline, profile, memory, explain, CUDA-graph capture, and
  ``aot``, which compiles every kernel without a GPU
- :mod:`taut_bench.testing`: inputs, error budget, NaN poison
- :mod:`taut_kernels.vllm_plugin`: what vLLM loads
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


def fuse_for_vllm(graph: fx.Graph) -> None:
    """Fuse norms and activations with the quantisation behind them in a graph vLLM compiles.

    Quantisations with nothing to fuse become an op of ours.

    It stands here because vLLM looks for a pass named in its configuration in the top package only;
    :func:`taut_kernels.vllm_plugin.fusion.fuse` does the work.

    Args:
        graph: changed in place.
    """
    from taut_kernels.vllm_plugin.fusion import fuse

    fuse(graph)
