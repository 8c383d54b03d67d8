"""vLLM's FlashAttention backend with `taut::paged_decode` where a batch is a plain decode.

The subclasses change who computes and nothing of what is computed: same cache, same metadata, same
output tensor. A batch in which every sequence has one new token runs on ours, in CUDA graphs too;
prefills, mixed batches, several tokens a sequence, and layers that ours does not cover
(:mod:`.decode_attention`) run on vLLM's own code. A layer of ours also
writes its new keys and values by `taut::cache_write`, of all batches. Imports vLLM.

Queries over an fp8 cache: FlashAttention 3 wants them in fp8, too, and has the layer quantise them;
ours takes them as they are. So a layer of ours leaves them in 16 bits, and what falls through is
quantised here, as the layer would have done.
"""

from __future__ import annotations

import logging
import time
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from taut_kernels.attention.cache_write import op as cache_write
from taut_kernels.attention.decode import op as decode
from taut_kernels.vllm_plugin import (
    compat,
    decode_attention,
    known_ops,
    warm_up_decode,
)
from taut_kernels.vllm_plugin.mode import requested_mode

_logger = logging.getLogger(__name__)


class TautAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's backend by the name of :data:`decode_attention.BACKEND`."""

    @staticmethod
    def get_name() -> str:
        """Return the name vLLM knows the backend by."""
        return decode_attention.BACKEND

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Refuse scales a head: queries would have to be quantised by them here."""
        return False

    @staticmethod
    def get_impl_cls() -> type[TautAttentionImpl]:
        """Return what a layer holds."""
        return TautAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TautAttentionMetadataBuilder]:
        """Return what makes a batch's metadata."""
        return TautAttentionMetadataBuilder


class TautAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """FlashAttention's builder; gets the layers of its group ready when the cache is laid out."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Refuse graphs of mixed batches: one captured with a token a sequence is ours alone."""
        theirs = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        uniform = AttentionCGSupport.UNIFORM_BATCH
        return uniform if theirs == AttentionCGSupport.ALWAYS else theirs

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [getattr(layers.get(name), "impl", None) for name in layer_names]
        loaded = [getattr(impl, "why_not_ours", None) for impl in impls]
        sequences = _most_sequences(vllm_config)
        page_size, dtype = kv_cache_spec.block_size, vllm_config.model_config.dtype
        for impl in impls:
            if isinstance(impl, TautAttentionImpl):
                impl.prepare(page_size, dtype, sequences, device)
        found = [getattr(impl, "why_not_ours", None) for impl in impls]
        for reason in sorted({reason for reason in found if reason is not None}):
            _logger.info("decode attention not ours: %s", reason)
        if found != loaded:
            decode_attention.correct_record()
        self._all_ours = all(getattr(impl, "why_not_ours", "") is None for impl in impls)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build a batch's metadata, without FlashAttention's schedule where nobody reads it."""
        # The first batch also fixes the window the schedule is for: that one is vLLM's.
        known = getattr(self, "aot_sliding_window", None) is not None
        alone = self._all_ours and known and common_attn_metadata.max_query_len == 1
        return super().build(common_prefix_len, common_attn_metadata, fast_build or alone)


class TautAttentionImpl(FlashAttentionImpl):  # type: ignore[misc]
    """An attention layer's computation.

    Attributes:
        why_not_ours: why its decodes run on vLLM's kernel, None where they run on ours.
        why_not_written: why vLLM writes its cache all the same, known from the first such call on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        facts, gpu = _facts_of(self), decode_attention.card()
        self.why_not_ours = decode_attention.why_not_layer(facts, gpu, requested_mode())
        self.why_not_written: str | None = None
        self._arrivals: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._eight_bit = decode_attention.ELEMENT_BYTES.get(facts.kv_cache_dtype) == 1
        # What vLLM would let the layer do, and here is done for what falls through.
        self._quantises_queries = False
        theirs: bool = self.supports_quant_query_input  # type: ignore[has-type]
        if self.why_not_ours is None and self._eight_bit:
            self._quantises_queries, self.supports_quant_query_input = theirs, False
        if self.why_not_ours is None:
            self._ask_ahead()

    def _ask_ahead(self) -> None:
        """Have decodes compiled while weights are read, for the cache as it is configured.

        One that is laid out otherwise is compiled for when it is there.
        """
        config = get_current_vllm_config_or_none()
        page_size = getattr(getattr(config, "cache_config", None), "block_size", None)
        if page_size is None or current_platform.is_cpu():
            return
        form = self._form(page_size, config.model_config.dtype)
        warm_up_decode.ask_decode(form, _most_sequences(config), torch.device("cuda"))

    def _form(self, page_size: int, dtype: torch.dtype) -> warm_up_decode.DecodeForm:
        return warm_up_decode.DecodeForm(
            self.num_heads, self.num_kv_heads, self.head_size, page_size, self._window(), dtype,
            torch.float8_e4m3fn if self._eight_bit else dtype,
        )  # fmt: skip

    def prepare(
        self, page_size: int, dtype: torch.dtype, sequences: int, device: torch.device
    ) -> None:
        """Compile what decodes may need and get the counters, before anything is captured.

        Args:
            page_size: keys of a page of the cache.
            dtype: of queries, and of the cache if it has 16 bits.
            sequences: most of a batch.
            device: of the cache.
        """
        named = {"float16": torch.float16, "bfloat16": torch.bfloat16}
        if named.get(self.kv_cache_dtype, dtype) != dtype:
            self.why_not_ours = f"{dtype} queries over a cache of {self.kv_cache_dtype}"
        if page_size < 16 or page_size & (page_size - 1):
            self.why_not_ours = f"pages of {page_size} keys"
        self._arrivals = None  # of a cache that was laid out before, for profiling
        if self.why_not_ours is not None:
            return
        self._dtype = dtype
        self._arrivals = decode_attention.shared_arrivals(sequences * self.num_heads, device)
        if device.type == "cpu":
            return
        form = self._form(page_size, dtype)
        start = time.perf_counter()
        if count := warm_up_decode.compile_decode(form, sequences, device):
            known_ops.check_attention(form, device)
            seconds = time.perf_counter() - start
            _logger.info("decode attention: %d forms ready in %.1f s", count, seconds)

    def _window(self) -> int:
        """Return how many keys a query sees, 0 for all."""
        before: int = self.sliding_window[0]
        return before + 1 if before >= 0 else 0

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write new keys and values into the cache; vLLM asks no layer that shares another's.

        Args:
            layer: of vLLM; has the scales of an fp8 cache.
            key: [tokens, Hk, D], as many as slots or more.
            value: likewise.
            kv_cache: [pages, Hk, page size, 2D], any strides.
            slot_mapping: [tokens] int64, below 0 where nothing is to be written.
        """
        if not self._writes(key, value, kv_cache, slot_mapping):
            self._say_not_written(key, value, kv_cache, slot_mapping)
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        scales: Any = (None, None)
        if self._eight_bit:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            scales = (layer._k_scale, layer._v_scale)
        caches = compat.keys_and_values(kv_cache, self.head_size)
        cache_write.write(key, value, *caches, slot_mapping, *scales)

    def _writes(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> bool:
        """Say whether new keys and values are as a layer of ours was prepared for."""
        ours = self._arrivals is not None  # prepared, and of ours
        return (
            ours
            and key.dtype is value.dtype
            and key.dtype is self._dtype
            and (self._eight_bit or kv_cache.dtype is key.dtype)
            and slot_mapping.dtype is torch.int64
            and key.stride(-1) == 1
            and value.stride(-1) == 1
        )

    def _say_not_written(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        # Of layers that are not ours the record says it already.
        if self._arrivals is not None and self.why_not_written is None:
            operands = (key, value, kv_cache, slot_mapping)
            reason = decode_attention.why_not_written(*operands, self._dtype)
            self.why_not_written = reason
            decode_attention.say_not_written(reason)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache, which holds the new keys and values already.

        Args:
            layer: of vLLM; has the scales of an fp8 cache.
            query: [tokens, Hq, D].
            key: [tokens, Hk, D]; here for vLLM's code only.
            value: likewise.
            kv_cache: [pages, Hk, page size, 2D], any strides.
            attn_metadata: of the batch; None in a profiling run.
            output: [tokens, Hq, D] to write to.
            output_scale: no kernel quantises its output: vLLM's code refuses it.
            output_block_scale: likewise.
        """
        ours = (
            self._arrivals is not None
            and attn_metadata is not None
            and output_scale is None
            and output_block_scale is None
            and decode_attention.is_plain_decode(attn_metadata, self.sliding_window)
        )
        if ours:
            return self._decode(layer, query, kv_cache, attn_metadata, output)
        operands = (key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if self._quantises_queries and attn_metadata is not None:
            query = compat.quantised_queries(query, cast("torch.Tensor", layer._q_scale))
        # FlashAttention's code asks the flag whether it gets fp8 queries and their scale.
        left_alone, self.supports_quant_query_input = (
            self.supports_quant_query_input,
            self.supports_quant_query_input or self._quantises_queries,
        )
        try:
            result: Tensor = super().forward(layer, query, *operands)
        finally:
            self.supports_quant_query_input = left_alone
        return result

    def _decode(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
    ) -> Tensor:
        tokens = attn_metadata.num_actual_tokens
        q, o = query, output
        if output.shape[0] != tokens:  # slices cost the host more than they look
            q, o = query[:tokens], output[:tokens]
        scales: Any = (None, None)
        if self._eight_bit:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            scales = (layer._k_scale, layer._v_scale)
        table, lens, longest = (
            attn_metadata.block_table, attn_metadata.seq_lens, attn_metadata.max_seq_len,
        )  # fmt: skip
        settings = decode.Settings(
            table, lens, scales[0], scales[1], self._arrivals, longest, self._window(), self.scale
        )
        caches = compat.keys_and_values(kv_cache, self.head_size)
        decode.decode_into(o.unsqueeze(1), q.unsqueeze(1), *caches, settings)
        return output


def _most_sequences(config: Any) -> int:
    captured = config.compilation_config.max_cudagraph_capture_size or 0
    most: int = max(config.scheduler_config.max_num_seqs, captured)
    return most


def _facts_of(impl: Any) -> decode_attention.LayerFacts:
    extras = {
        "ALiBi": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        "a soft cap": bool(impl.logits_soft_cap),
    }
    config = get_current_vllm_config_or_none()
    parallel, model = (getattr(config, f"{name}_config", None) for name in ("parallel", "model"))
    return decode_attention.LayerFacts(
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        kv_cache_dtype=impl.kv_cache_dtype,
        decoder=impl.attn_type == AttentionType.DECODER,
        extras=tuple(name for name, there in extras.items() if there),
        context_parallel=impl.total_cp_world_size > 1,
        batch_invariant=impl.batch_invariant_enabled,
        two_streams=bool(getattr(parallel, "use_ubatching", False)),
        sleeps=bool(getattr(model, "enable_sleep_mode", False)),
    )
