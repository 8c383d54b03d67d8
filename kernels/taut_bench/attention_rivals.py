"""Attention, ours and published, each on the same operands.

Beside ours FlashAttention 3, vLLM's Triton kernel, FlashInfer's two decodes, and torch's SDPA.
FlashAttention 3 is the build inside vLLM (forward only). With an fp8 cache it takes fp8 queries and
nothing else: they are quantised beforehand, outside the clock. Its scheduler metadata, which vLLM
makes once a step for all layers, are made outside the clock as well. vLLM's Triton kernel gets the
buffers its backend allocates. What is not installed raises `UnavailableError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from taut_bench.attention_cases import DIM, PAGE, Cached, Gradients, Prompt
from taut_bench.fused_rivals import UnavailableError, imported
from taut_kernels.attention.prefill import op as prefill

Forward = Callable[[], Tensor]
"""Returns o, [1, T, Hq, D]."""
Step = Callable[[], tuple[Tensor, Gradients]]
"""Forward and backward: returns o and the gradients of q, k and v."""
Decode = Callable[[], Tensor]
"""Returns o, [B, Hq, D]."""
_SCALE = DIM**-0.5
_WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer's own examples give a decode."""
_SEGMENTS = 16
_LEAST_PROGRAMS = 128
"""What vLLM's Triton backend splits contexts into, and up to how many programs it does."""


def _flash_attention() -> Any:
    module = imported("vllm.vllm_flash_attn")
    if not module.is_fa_version_supported(3):
        raise UnavailableError(f"FA3: {module.fa_version_unsupported_reason(3)}")
    return module


def _bounds(count: int, tokens: int, device: torch.device) -> Tensor:
    return torch.arange(count + 1, dtype=torch.int32, device=device) * tokens


def taut_forward(prompt: Prompt) -> Forward:
    """Run our op."""
    count = prompt.q.shape[1]
    settings = prefill.Settings(None, None, count, count, True, 0, _SCALE)
    return lambda: torch.ops.taut.attention(prompt.q, prompt.k, prompt.v, *settings)[0]


def fa3_forward(prompt: Prompt) -> Forward:
    """Run FlashAttention 3 as vLLM does for a prompt."""
    flash, tokens = _flash_attention(), prompt.q.shape[1]
    bounds = _bounds(1, tokens, prompt.q.device)
    q, k, v = (x[0].contiguous() for x in (prompt.q, prompt.k, prompt.v))

    def call() -> Tensor:
        out: Tensor = flash.flash_attn_varlen_func(
            q, k, v, tokens, bounds, tokens, cu_seqlens_k=bounds, softmax_scale=_SCALE,
            causal=True, fa_version=3,
        )  # fmt: skip
        return out[None]

    return call


def _unified(
    q: Tensor,
    queries: int,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lens: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> Callable[[], Tensor]:
    """Bind vLLM's Triton kernel to q [B · queries, Hq, D] over a paged cache."""
    run = imported("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    heads, sequences, heads_k = q.shape[1], table.shape[0], k_cache.shape[2]
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    threshold = _LEAST_PROGRAMS // heads_k
    parts = (threshold, heads, _SEGMENTS)
    options: dict[str, Any] = {
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": torch.empty(*parts, DIM, device=q.device),
        "softmax_segm_max": torch.empty(parts, device=q.device),
        "softmax_segm_expsum": torch.empty(parts, device=q.device),
        "k_descale": None,
        "v_descale": None,
    }
    if scales is not None:
        shape = (sequences, heads_k)
        options |= {"k_descale": scales[0].expand(shape), "v_descale": scales[1].expand(shape)}
        if "kv_quant_mode" in inspect.signature(run).parameters:
            modes = imported("vllm.v1.kv_cache_interface").KVQuantMode
            options["kv_quant_mode"] = modes.FP8_PER_TENSOR
    bounds, longest = _bounds(sequences, queries, q.device), table.shape[1] * k_cache.shape[1]

    def call() -> Tensor:
        run(
            q=q, k=k_cache, v=v_cache, out=out, cu_seqlens_q=bounds, max_seqlen_q=queries,
            seqused_k=lens, max_seqlen_k=longest, softmax_scale=_SCALE, causal=True,
            window_size=(-1, -1), block_table=table, softcap=0, q_descale=None, **options,
        )  # fmt: skip
        return out

    return call


def vllm_triton_forward(prompt: Prompt) -> Forward:
    """Run vLLM's Triton kernel, which knows paged caches only: the prompt's keys are its pages."""
    tokens = prompt.q.shape[1]
    pages = tokens // PAGE
    k, v = (x[0].reshape(pages, PAGE, x.shape[2], DIM) for x in (prompt.k, prompt.v))
    table = torch.arange(pages, dtype=torch.int32, device=prompt.q.device)[None]
    lens = torch.full((1,), tokens, dtype=torch.int32, device=prompt.q.device)
    call = _unified(prompt.q[0].contiguous(), tokens, k, v, table, lens, None)
    return lambda: call()[None]


@contextmanager
def _backend(name: str) -> Iterator[None]:
    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}[name]
    with sdpa_kernel(chosen):
        yield


def _sdpa(backend: str) -> Callable[[Prompt], Forward]:
    def prepare(prompt: Prompt) -> Forward:
        q, k, v = (x.transpose(1, 2) for x in (prompt.q, prompt.k, prompt.v))

        def call() -> Tensor:
            with _backend(backend):
                o = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=_SCALE, enable_gqa=True
                )
            return o.transpose(1, 2)

        return call

    return prepare


def _step(forward: Callable[[Prompt], Forward]) -> Callable[[Prompt], Step]:
    """Turn a forward pass that autograd knows into a step with gradients."""

    def prepare(prompt: Prompt) -> Step:
        q, k, v = (x.detach().requires_grad_() for x in (prompt.q, prompt.k, prompt.v))
        run = forward(Prompt(q, k, v, prompt.do))

        def call() -> tuple[Tensor, Gradients]:
            o = run()
            dq, dk, dv = torch.autograd.grad(o, (q, k, v), prompt.do)
            return o, (dq, dk, dv)

        return call

    return prepare


def fa3_step(prompt: Prompt) -> Step:
    """Refuse: what vLLM ships has no backward pass."""
    del prompt
    raise UnavailableError("FA3: vLLM's build is forward only")


def taut_decode(cached: Cached) -> Decode:
    """Run our op, as a caller with a workspace does."""
    op, settings = torch.ops.taut.paged_decode, cached.settings()
    return lambda: op(cached.q, cached.k_cache, cached.v_cache, *settings)[:, 0]


def fa3_decode(cached: Cached) -> Decode:
    """Run FlashAttention 3 over the paged cache."""
    flash = _flash_attention()
    eight_bit = cached.k_cache.dtype == torch.float8_e4m3fn
    if not eight_bit and cached.k_cache.dtype != torch.bfloat16:
        raise UnavailableError("FA3: knows no int8 cache")
    sequences, _, heads, _ = cached.q.shape
    heads_k = cached.k_cache.shape[2]
    q, descale = cached.q[:, 0].contiguous(), {}
    if eight_bit and cached.k_scale is not None and cached.v_scale is not None:
        q_scale = (q.float().abs().max() / torch.finfo(torch.float8_e4m3fn).max).view(1)
        q = (q.float() / q_scale).to(torch.float8_e4m3fn)
        scales = (("q", q_scale), ("k", cached.k_scale), ("v", cached.v_scale))
        descale = {
            f"{name}_descale": scale.expand(sequences, heads_k).contiguous()
            for name, scale in scales
        }
    bounds = _bounds(sequences, 1, q.device)
    metadata = flash.get_scheduler_metadata(
        batch_size=sequences, max_seqlen_q=1, max_seqlen_k=cached.context, num_heads_q=heads,
        num_heads_kv=heads_k, headdim=DIM, cache_seqlens=cached.context_lens, qkv_dtype=q.dtype,
        cu_seqlens_q=bounds, page_size=PAGE, causal=True,
    )  # fmt: skip
    out = torch.empty(sequences, heads, DIM, dtype=torch.bfloat16, device=q.device)

    def call() -> Tensor:
        flash.flash_attn_varlen_func(
            q, cached.k_cache, cached.v_cache, 1, bounds, cached.context,
            seqused_k=cached.context_lens, softmax_scale=_SCALE, causal=True,
            block_table=cached.block_table, out=out, scheduler_metadata=metadata, fa_version=3,
            **descale,
        )  # fmt: skip
        return out

    return call


def vllm_triton_decode(cached: Cached) -> Decode:
    """Run vLLM's Triton kernel over the paged cache."""
    if cached.k_cache.dtype == torch.int8:
        raise UnavailableError("vLLM Triton: int8 caches have a scale a token and head, ours none")
    scales = None
    if cached.k_scale is not None and cached.v_scale is not None:
        scales = (cached.k_scale, cached.v_scale)
    caches = (cached.k_cache, cached.v_cache, cached.block_table, cached.context_lens)
    return _unified(cached.q[:, 0].contiguous(), 1, *caches, scales)


def _flashinfer(cached: Cached) -> tuple[Any, Tensor, tuple[Tensor, Tensor], tuple[float, float]]:
    """Return FlashInfer's decode, and queries [B, Hq, D], caches and their scales for it."""
    if cached.k_cache.dtype == torch.int8:
        raise UnavailableError("FlashInfer: knows no int8 cache")
    module = imported("flashinfer.decode")
    scales = (1.0, 1.0)
    if cached.k_scale is not None and cached.v_scale is not None:
        scales = (cached.k_scale.item(), cached.v_scale.item())
    return module, cached.q[:, 0].contiguous(), (cached.k_cache, cached.v_cache), scales


def flashinfer_decode(cached: Cached) -> Decode:
    """Run FlashInfer's paged decode on tensor cores; what it plans once a step is made before."""
    module, q, caches, scales = _flashinfer(cached)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    sequences, pages = cached.block_table.shape
    wrapper.plan(
        _bounds(sequences, pages, q.device), cached.block_table.flatten(),
        torch.full((sequences,), PAGE, dtype=torch.int32, device=q.device), q.shape[1],
        caches[0].shape[2], DIM, PAGE, sm_scale=_SCALE, q_data_type=q.dtype,
        kv_data_type=caches[0].dtype,
    )  # fmt: skip
    out = torch.empty_like(q)
    k_scale, v_scale = scales

    def call() -> Tensor:
        found: Tensor = wrapper.run(q, caches, k_scale=k_scale, v_scale=v_scale, out=out)
        return found

    return call


def xqa_decode(cached: Cached) -> Decode:
    """Run FlashInfer's XQA over the paged cache."""
    module, q, caches, scales = _flashinfer(cached)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    lens, out = cached.context_lens.to(torch.uint32), torch.empty_like(q)
    k_scale, v_scale = scales

    def call() -> Tensor:
        found: Tensor = module.xqa_batch_decode_with_kv_cache(
            q, caches, workspace, cached.block_table, lens, cached.context,
            bmm1_scale=_SCALE * k_scale, bmm2_scale=v_scale, out=out,
        )  # fmt: skip
        return found

    return call


FORWARD: dict[str, Callable[[Prompt], Forward]] = {
    "taut": taut_forward,
    "FA3": fa3_forward,
    "vLLM Triton": vllm_triton_forward,
    "SDPA flash": _sdpa("flash"),
    "SDPA cuDNN": _sdpa("cuDNN"),
}
STEP: dict[str, Callable[[Prompt], Step]] = {
    "taut": _step(taut_forward),
    "FA3": fa3_step,
    "SDPA flash": _step(_sdpa("flash")),
    "SDPA cuDNN": _step(_sdpa("cuDNN")),
}
DECODE: dict[str, Callable[[Cached], Decode]] = {
    "taut": taut_decode,
    "FA3": fa3_decode,
    "vLLM Triton": vllm_triton_decode,
    "FlashInfer": flashinfer_decode,
    "XQA": xqa_decode,
}
