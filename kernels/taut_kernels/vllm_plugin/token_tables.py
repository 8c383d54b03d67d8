"""Quantised embeddings in vLLM where it does not serve them: on a CPU, and tied to the head.

vLLM (0.26 to 0.33) looks rows of packed embeddings up by a Triton kernel, which no CPU runs, and
cannot multiply by them. Here the rows of a CPU are dequantised by torch, and a tied head gets a
copy of the table in the layout of its own product: of 8 bits that is ours, where it can be
compiled. Holds no arithmetic of its own. This module imports vLLM.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding import (  # noqa: E501
    CompressedTensorsEmbeddingWNA16Int,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsWNA16,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform

from taut_kernels.formats.token_table import dequantised_rows, signed_codes
from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.vllm_plugin import known_answer

_PARTS = ("weight_packed", "weight_scale", "weight_shape")
# Of a table that is unpacked at a time.
_ROWS_AT_ONCE = 4096
_TOKENS = (1, 16)


class _Head:
    """What the record says of a head that vLLM has no kernel for, asked as of its kernel objects.

    Args:
        bits: of a code.
        obstacle: why our product does not multiply it; None where it does.
    """

    def __init__(self, bits: int, obstacle: str | None) -> None:
        self.taut_scheme = f"W{bits}A16"
        self.obstacle = obstacle

    def taut_record(self) -> tuple[str, str | None]:
        """Return what multiplies, and why that is no kernel of ours."""
        reason = self.obstacle and f"{self.obstacle}: dequantised at load, no memory saved"
        return TautTokenTableMethod.__name__, reason


class TautTokenTableMethod(CompressedTensorsEmbeddingWNA16Int):  # type: ignore[misc]
    """A packed table of the vocabulary: rows are looked up, a head is multiplied by.

    Args:
        weight_quant: how it is packed.
        multiplies: whether it is a head; None for embeddings, which are one where they are tied.
    """

    def __init__(self, weight_quant: QuantizationArgs, multiplies: bool | None = None) -> None:
        super().__init__(weight_quant)
        self._multiplies = _are_tied() if multiplies is None else multiplies
        self._head = torch.nn.Module()
        self._scheme: Any = None
        self._dense = UnquantizedEmbeddingMethod()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the parameters that the checkpoint's tensors are loaded into."""
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        if not self._multiplies:
            return
        if _has_no_kernel(self.num_bits):
            self.kernel: Any = _Head(
                self.num_bits, self._obstacle(input_size_per_partition, params_dtype)
            )
            return
        self._scheme = CompressedTensorsWNA16(
            strategy=str(getattr(self.strategy, "value", self.strategy)),
            num_bits=self.num_bits,
            group_size=self.group_size,
            symmetric=True,
            layer_name=getattr(layer, "prefix", "lm_head"),
        )
        self._scheme.create_weights(
            self._head,
            input_size=input_size,
            output_size=output_size,
            input_size_per_partition=input_size_per_partition,
            output_partition_sizes=output_partition_sizes,
            params_dtype=params_dtype,
            **extra_weight_attrs,
        )
        self.kernel = self._scheme.kernel

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Give the head its copy of the table."""
        super().process_weights_after_loading(layer)
        if self._scheme is not None:
            for name in _PARTS:
                getattr(self._head, name).data.copy_(getattr(layer, name).data)
            self._scheme.process_weights_after_loading(self._head)
        elif self._multiplies:
            packed = layer.get_parameter("weight_packed").data
            scale = layer.get_parameter("weight_scale").data
            if self.kernel.obstacle is None:
                self._lay_out(packed, scale)
            else:
                self._dequantise(packed, scale)

    def _obstacle(self, K: int, dtype: torch.dtype) -> str | None:
        """Say why our product does not multiply a head here."""
        groups = K // self.group_size if (self.group_size or -1) > 0 else 1
        if dtype is not torch.bfloat16:
            return f"no kernel of {self.num_bits}-bit weights on a CPU in {dtype}"
        return cpu_linear.why_not_packed(K, groups, self.num_bits) or cpu_linear.why_not_here()

    def _lay_out(self, packed: torch.Tensor, scale: torch.Tensor) -> None:
        """Keep the codes as our product reads them, and give it a known answer."""
        starts = range(0, len(packed), _ROWS_AT_ONCE)
        parts = (packed[start : start + _ROWS_AT_ONCE] for start in starts)
        codes = torch.cat([signed_codes(part, self.num_bits).to(torch.int8) for part in parts])
        weight, scales, _ = cpu_linear.pack(codes, scale, None, self.num_bits)
        self._head.register_buffer("weight", weight, persistent=False)
        self._head.register_buffer("scale", scales, persistent=False)
        self._rows, self._isa = len(codes), int(cpu_linear.best_isa())
        known_answer.check(
            type(self).__name__,
            f"W{self.num_bits}A16",
            (codes.shape[0], codes.shape[1]),
            _TOKENS,
            lambda x: self._multiply(x, None),
            lambda rows: dequantised_rows(packed[rows], scale[rows], self.num_bits),
            known_answer.plain_block(codes.shape[1]),
            scale.dtype,
            packed.device,
        )

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight, scale = self._head.get_buffer("weight"), self._head.get_buffer("scale")
        rows = x.reshape(-1, x.shape[-1])
        y = cpu_linear.multiply(rows, weight, scale, None, bias, self._rows, self._isa)
        return y.view(*x.shape[:-1], self._rows)

    def _dequantise(self, packed: torch.Tensor, scale: torch.Tensor) -> None:
        dense = torch.empty(len(packed), self.pack_factor * packed.shape[1], dtype=scale.dtype)
        for start in range(0, len(packed), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            dense[rows] = dequantised_rows(packed[rows], scale[rows], self.num_bits)
        self._head.weight = torch.nn.Parameter(dense, requires_grad=False)
        self._dense.process_weights_after_loading(self._head)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Look rows up; ids of any shape, the result has K more."""
        if not current_platform.is_cpu():
            looked_up: torch.Tensor = super().embedding(layer, input_)
            return looked_up
        ids = input_.reshape(-1)
        scale = layer.get_parameter("weight_scale")[ids]
        packed = layer.get_parameter("weight_packed")[ids]
        rows = dequantised_rows(packed, scale, self.num_bits)
        return rows.to(scale.dtype).reshape(*input_.shape, -1)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply by the table; x is [..., K], the result [..., V]."""
        if self._scheme is not None:
            y: torch.Tensor = self._scheme.apply_weights(self._head, x, bias)
            return y
        if self.kernel.obstacle is None:
            return self._multiply(x, bias)
        dense: torch.Tensor = self._dense.apply(self._head, x, bias)
        return dense


def _are_tied() -> bool:
    """Say whether the model that is being built multiplies by its embeddings."""
    config = get_current_vllm_config().model_config.hf_config.get_text_config()
    return bool(getattr(config, "tie_word_embeddings", False))


def _has_no_kernel(bits: int) -> bool:
    return bool(current_platform.is_cpu()) and bits != 4


def install() -> None:
    """Make vLLM take our method for quantised embeddings, and for heads it has no kernel for."""
    if compressed_tensors.CompressedTensorsEmbeddingWNA16Int is TautTokenTableMethod:
        return
    compressed_tensors.CompressedTensorsEmbeddingWNA16Int = TautTokenTableMethod
    config = compressed_tensors.CompressedTensorsConfig
    config.get_quant_method = _with_heads(config.get_quant_method)
    ParallelLMHead.tie_weights = _with_tables(ParallelLMHead.tie_weights)


def _with_heads(stock: Any) -> Any:
    @functools.wraps(stock)
    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        method = stock(self, layer, prefix)
        scheme: Any = getattr(layer, "scheme", None)
        is_packed = isinstance(scheme, CompressedTensorsWNA16) and scheme.symmetric
        if not (isinstance(layer, ParallelLMHead) and is_packed and _has_no_kernel(_bits(scheme))):
            return method
        del layer.scheme
        weights = QuantizationArgs(
            num_bits=_bits(scheme),
            strategy=scheme.strategy,
            group_size=None if scheme.group_size == -1 else scheme.group_size,
        )
        return TautTokenTableMethod(weights, multiplies=True)

    return get_quant_method


def _bits(scheme: Any) -> int:
    return 32 // int(scheme.pack_factor)


def _with_tables(stock: Any) -> Any:
    @functools.wraps(stock)
    def tie_weights(self: Any, embed_tokens: torch.nn.Module) -> Any:
        if isinstance(getattr(embed_tokens, "quant_method", None), TautTokenTableMethod):
            return embed_tokens  # which multiplies, too
        return stock(self, embed_tokens)

    return tie_weights
