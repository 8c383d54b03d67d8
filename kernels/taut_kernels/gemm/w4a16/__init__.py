"""`taut::w4a16_gemm`: activations of 16 bits times weights of 4.

`op` is the op, `dispatch` runs what `lookup` or `rule` chose; a kernel is a tile
(``*_tile``), a launcher and, beside it, device code (``*_kernel``, ``*_jit``, ``*_ptx``)::

    decode       few tokens, mma.sync          decode_ring  to 64 tokens, behind a ring
    ring         wgmma behind cp.async         tma          wgmma fed by TMA
    pair         two tiles of tma              dense        dequantise, then cuBLAS
    portable     what every card runs          cpu          vLLM's kernel for CPUs
"""
