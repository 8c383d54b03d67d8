"""FP8 weights with one scale for each block of 128×128, inputs with one for 128 channels.

The format DeepSeek-V3 (arXiv:2412.19437, §3.3) is published in, as compressed-tensors stores it:
``float-quantized`` with the strategy ``block``.
"""

from dataclasses import dataclass

from compressed_tensors.quantization import QuantizationArgs

from taut_deploy.compress.formats.float8 import Float8Format

BLOCK = 128


@dataclass(frozen=True, eq=False)
class Float8BlockFormat(Float8Format):
    """FP8 (e4m3) with one scale for each square of weights."""

    @property
    def group_size(self) -> int:
        """Weights a scale covers along K."""
        return BLOCK

    def why_not(self, n: int, k: int) -> str | None:
        """Why a layer [N, K] cannot have this format; None if it can.

        vLLM rounds inputs in whole groups and refuses layers that it joins at a broken block;
        compressed-tensors derives the blocks from the scales' shape, which must be unmistakable.
        """
        for what, size in (("output", n), ("input", k)):
            if size % BLOCK:
                return f"blocks of {BLOCK} do not divide its {what} of {size}"
        if k == BLOCK:
            return f"one block of {BLOCK} is its whole input, which is read as a scale per channel"
        return None

    @property
    def weight_arguments(self) -> QuantizationArgs:
        """``weights`` of a config group."""
        return QuantizationArgs(
            num_bits=8,
            type="float",
            symmetric=True,
            strategy="block",
            block_structure=[BLOCK, BLOCK],
            dynamic=False,
        )

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""
        blocks = (n // BLOCK) * (k // BLOCK)
        return n * k + blocks * self.spec.scale_dtype.itemsize
