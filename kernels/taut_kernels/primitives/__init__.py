"""The classic kernels as ladders: each rung adds one idea, is kept, and is benchmarked.

- :mod:`.gemm`: `matmul`, four rungs from plain pointers to measured tiles
- :mod:`.transposition`: `transpose`, five rungs
- :mod:`.convolution`: `conv2d` as an implicit product
- :mod:`.pooling`: `max_pool2d`, `avg_pool2d`
- :mod:`.reduction`: `reduce`: sum, max, mean; three rungs

``python -m taut_bench.primitives --output DIR`` shows what each idea gains.
"""

from taut_kernels.primitives.convolution import conv2d
from taut_kernels.primitives.gemm import matmul
from taut_kernels.primitives.pooling import avg_pool2d, max_pool2d
from taut_kernels.primitives.reduction import reduce
from taut_kernels.primitives.transposition import transpose

__all__ = ["avg_pool2d", "conv2d", "matmul", "max_pool2d", "reduce", "transpose"]
