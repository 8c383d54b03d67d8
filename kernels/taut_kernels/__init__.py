"""Taut's kernels: Triton implementations, custom ops, weight formats and the vLLM plugin.

Importing the package does nothing. The rooms inside:

- :mod:`taut_kernels.gemm`: matrix products over compressed weights, one op a file
- :mod:`taut_kernels.formats`: disk and kernel layouts of weights
- :mod:`taut_kernels.tiles`: tile tables
- :mod:`taut_kernels.aot`: compile every kernel without a GPU
- :mod:`taut_kernels.testing`: inputs, error budget, NaN poison
- :mod:`taut_kernels.vllm_plugin`: what vLLM loads
"""
