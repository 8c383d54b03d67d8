"""`taut::w8a8_gemm` and `taut::fp8_gemm`: products of 8-bit operands with scales.

`dispatch` runs what `lookup` or `rule` chose: `few` and `pairs` (few tokens), `hopper` (schedules
"shared" and "turns"), ``blocks_*`` (FP8 in 128 × 128 blocks) or the portable kernel.
"""
