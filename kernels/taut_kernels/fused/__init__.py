"""Memory-bound ops of a decoder layer, one op a file.

Serving, forward only: :mod:`~taut_kernels.fused.rms_norm`, :mod:`~taut_kernels.fused.silu_mul`,
:mod:`~taut_kernels.fused.rope`, with 8-bit quantisation behind them, and
:mod:`~taut_kernels.fused.quantize`, quantisation alone. Training, forward and backward:
:mod:`~taut_kernels.fused.softmax`, :mod:`~taut_kernels.fused.layer_norm`,
:mod:`~taut_kernels.fused.rms_norm_train`, :mod:`~taut_kernels.fused.swiglu`,
:mod:`~taut_kernels.fused.rope_train`, and :mod:`~taut_kernels.fused.modules`.
"""
