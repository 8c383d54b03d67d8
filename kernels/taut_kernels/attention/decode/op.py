"""Attention of a few new tokens over a paged cache: split-KV decode, 16-bit and 8-bit caches.

Maths     o = s_v · Σₙ pₙ vₙ, pₙ = exp(s · s_k · q·kₙ − m) / Σ, over the keys n a query sees: of the
          first `context_lens[b]` of its sequence those up to its own place, with `window` the last
          `window` of these. The T queries of a sequence stand at its last T keys.
Op        `taut::paged_decode` → o
Shapes    q [B, Hq, D] or [B, T, Hq, D], T ≤ 8 (speculative tokens); o likewise, contiguous
          k_cache, v_cache [pages, page size, Hk, D] (what vLLM calls NHD; any strides, but the D
          elements next to each other), page size a power of two ≥ 16
          block_table [B, most pages] int32, context_lens [B] int32 on the device: key n of sequence
          b is row n % page size of page block_table[b, n // page size]. Entries behind the context
          are not read; those before it must be pages of the cache.
          Hq a multiple of Hk; D 64, 96, 128 or 256; q bf16 or fp16; caches as q, e4m3 or int8
          k_scale, v_scale fp32 on the device, one element or [Hk], or None for 1
Numerics  scores, softmax and all sums in fp32; p rounded to the dtype of the values before their
          product. 8-bit elements are exact in fp16, in which their products run; q goes there
          exactly but for elements 2**-15 below their row's largest, and p rounded. Scales multiply
          scores and result, never elements. A query without a key: o 0. A context beyond the
          table's width is cut to it. The same bits from run to run.
Splits    Programs = B · Hk · splits, by sizes the host knows; each sequence is divided on the
          device by its own length, into parts of `min_keys` of the tile at least. The last program
          of a head to finish adds its parts up in order, found by a counter of `arrivals`, which it
          sets back to 0: no second launch, nothing waits for the device, and a captured graph
          follows changing lengths and pages. One part alone is the result; programs without keys
          end at once.
Shares    In a graph, where the host knows no lengths (:func:`decode_into`): each program reads the
          lengths of all sequences and finds its own part, so that the keys of the whole batch, not
          of each sequence, are divided evenly. A sequence's parts, and by roundings its result,
          then depend on the lengths of the others; the same lengths give the same bits.
CPU       the reference, in plain torch: the specification
Limits    sm_80 and later; forward only. Calls that run beside each other (two streams) need
          `arrivals` of their own.
Source    split-KV: the FlashDecoding form of arXiv:2205.14135's online softmax; paged layout:
          arXiv:2309.06180 §4. The code is ours.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import padded_dim
from taut_kernels.attention.cache_arguments import check, check_arrivals, check_scale
from taut_kernels.attention.decode.cut import launch_constants, lengths_read, row_blocks
from taut_kernels.attention.decode.kernel import paged_decode_kernel
from taut_kernels.attention.decode.reference import paged_decode_ref
from taut_kernels.attention.tile import DecodeTile
from taut_kernels.launch import launcher
from taut_kernels.launch.autocast import without_autocast
from taut_kernels.launch.op_registration import register_op

_paged_decode = launcher.Launcher(paged_decode_kernel)
_LOG2_E = 1.4426950408889634
STARTS_NEXT_FROM = 9
"""Fewest sequences of a launch, of those that start early at all, that lets the kernel behind start
while its last programs run (sm_90): only one launched to do so and to wait inside does. With fewer
the next product's programs would take their places unevenly, between those of this kernel."""
EARLY_SEQUENCES = 16
EARLY_KEYS = 4096
"""Most sequences of a launch that starts before the kernel in front has ended, and most keys of one
that is alone: with more its own programs would take their places unevenly."""


def make_arrivals(sequences: int, heads: int, device: torch.device, queries: int = 1) -> Tensor:
    """Allocate what programs count themselves in: int32 zeros, kept as long as the batch lives.

    Args:
        sequences: most of a batch, B.
        heads: query heads, Hq.
        device: of the cache.
        queries: most of a sequence, T.
    """
    return torch.zeros(sequences * heads * queries, dtype=torch.int32, device=device)


class Settings(NamedTuple):
    """What a launch is told beside queries and caches, in the order of the op's arguments.

    Attributes:
        block_table: [B, most pages] int32.
        context_lens: [B] int32.
        k_scale: fp32 or None.
        v_scale: likewise.
        arrivals: counters, or None.
        max_context: the longest sequence as far as the host knows; decides the splits.
        window: keys a query sees, 0 for all.
        scale: factor of the scores.
    """

    block_table: Tensor
    context_lens: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    arrivals: Tensor | None
    max_context: int
    window: int
    scale: float


def _words(cache: Tensor, name: str) -> Tensor:
    """Return 8-bit elements in pairs, as one int16 each; 16-bit ones as they are."""
    if cache.element_size() != 1:
        return cache
    # Here and not in the public function: Dynamo cannot trace an offset.
    if cache.storage_offset() % 2:
        raise ValueError(f"{name} must start at an even element: pairs are read as one word")
    return cache.view(torch.int16)


def early_starts(sequences: int, keys: int, device: torch.device) -> tuple[bool, bool]:
    """Say whether a launch lets the kernel behind it start early, and whether it does so itself.

    Args:
        sequences: of the batch.
        keys: the most that a sequence's queries see, as far as the host knows.
        device: of the launch.
    """
    if not launcher.starts_early(sequences, device):
        return False, False
    early = sequences <= EARLY_SEQUENCES and (sequences > 1 or keys <= EARLY_KEYS)
    return sequences >= STARTS_NEXT_FROM, early


def load(q: Tensor, k_cache: Tensor, settings: Settings) -> tuple[int, int, int]:
    """Return programs without splits, the most keys of one, and the device's multiprocessors.

    Args:
        q: [B, T, Hq, D].
        k_cache: keys.
        settings: of the op.
    """
    sequences, queries, heads, _ = q.shape
    blocks, _ = row_blocks(queries * heads // k_cache.shape[2])
    seen = settings.max_context
    if settings.window:
        seen = min(seen, settings.window + queries - 1)
    return sequences * k_cache.shape[2] * blocks, seen, launcher.multiprocessors(q.device)


def tile_of(q: Tensor, k_cache: Tensor, settings: Settings) -> DecodeTile:
    """Return the tile a call takes.

    Args:
        q: [B, T, Hq, D].
        k_cache: keys.
        settings: of the op.
    """
    kind = attention_tiles.load_of(*load(q, k_cache, settings))
    gpu, dim = launcher.gpu_name(q.device), padded_dim(q.shape[3])
    return attention_tiles.decode(gpu, dim, k_cache.element_size(), kind)


def _workspace(
    q: Tensor, parts: int, rows: int, arrivals: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return partial results, their statistics, and counters that are 0."""
    partial = launcher.empty((parts, rows, q.shape[3]), dtype=torch.float32, device=q.device)
    stats = launcher.empty((parts, 2, rows), dtype=torch.float32, device=q.device)
    if arrivals is None:
        arrivals = make_arrivals(q.shape[0], q.shape[2], q.device, q.shape[1])
    return partial, stats, arrivals


def launch(
    tile: DecodeTile,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    settings: Settings,
    splits: int | None = None,
    out: Tensor | None = None,
    shares: int = 0,
) -> Tensor:
    """Run the kernel with a given tile; what the op does, and what tuning and the plugin call.

    Args:
        tile: how to cut the work.
        q: [B, T, Hq, D].
        k_cache: keys.
        v_cache: values.
        settings: of the op.
        splits: programs a sequence and head; by the tile's rule if None.
        out: [B, T, Hq, D] to write to, the D elements of a head next to each other; new if None.
        shares: if not 0, of the keys of the whole batch, each program finding its own on the
            device; at most `MOST_LENGTHS` sequences. Then no ``splits``.

    Returns:
        [B, T, Hq, D].
    """
    o = launcher.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not q.numel():
        return o
    table, contexts, k_scale, v_scale, arrivals, _, window, scale = settings
    sequences, queries, heads, _ = q.shape
    blocks, rows = row_blocks(queries * heads // k_cache.shape[2])
    programs, loaded = k_cache.shape[2] * blocks, load(q, k_cache, settings)
    block_b = lengths_read(sequences) if shares else 0
    if splits is None:
        splits = attention_tiles.decode_splits(tile, *loaded)
    splits = shares or splits
    grid = (programs, shares + sequences, 1) if shares else (programs, splits, sequences)
    divided = splits > 1 or shares > 0
    workspace = _workspace(q, math.prod(grid), rows, arrivals) if divided else (None,) * 3
    keys, values = _words(k_cache, "k_cache"), _words(v_cache, "v_cache")
    strides = (*q.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *o.stride()[:3])
    by_head = tuple(int(each is not None and each.numel() > 1) for each in (k_scale, v_scale))
    starts = early_starts(sequences, loaded[1], q.device)
    call = (queries, heads, window > 0, keys.stride() == values.stride(), block_b, starts)
    numbers = (splits, tile.min_keys, table.shape[1] * k_cache.shape[1], window, table.stride(0))
    _paged_decode(
        (q.dtype, k_cache.dtype, k_cache.shape[1:], *call, divided, k_scale is None,
         v_scale is None, tile.keys, tile.num_warps, tile.num_stages),
        grid,
        (q, keys, values, table, contexts, k_scale, v_scale, o, *workspace),
        (*numbers, *by_head, *strides, scale * _LOG2_E),
        lambda: (
            launch_constants(tile, k_cache, *call),
            tile.options() | launcher.PDL_OPTIONS[starts[1]],
        ),
        strides,
    )  # fmt: skip
    return o


def decode_into(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, settings: Settings
) -> None:
    """Run the op without its checks and into memory of the caller's, who sees to what it allows.

    Tile, splits and shares are of :func:`attention_tiles.bounded_decode`, in a CUDA graph as
    outside.

    Args:
        out: [B, T, Hq, D] as ``q``.
        q: [B, T, Hq, D].
        k_cache: keys.
        v_cache: values.
        settings: of the op.
    """
    if not q.is_cuda:
        out.copy_(paged_decode_ref(q, k_cache, v_cache, *settings))
        return
    gpu, dim = launcher.gpu_name(q.device), padded_dim(q.shape[3])
    tile, splits, shares = attention_tiles.bounded_decode(
        gpu, dim, k_cache.element_size(), *load(q, k_cache, settings), q.shape[0]
    )
    launch(tile, q, k_cache, v_cache, settings, splits, out, shares)


def _launch_paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, *arguments: Any) -> Tensor:
    settings = Settings(*arguments)
    return launch(tile_of(q, k_cache, settings), q, k_cache, v_cache, settings)


def _fake_paged_decode(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


_SCHEMA = (
    "taut::paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor "
    "context_lens, Tensor? k_scale, Tensor? v_scale, Tensor? arrivals, SymInt max_context, int "
    "window, float scale) -> Tensor"
)
register_op(_SCHEMA, without_autocast(paged_decode_ref), _launch_paged_decode, _fake_paged_decode)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    max_context: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Attend to a paged cache that already holds the new tokens' keys and values.

    Args:
        q: [B, Hq, D], or [B, T, Hq, D] with up to 8 tokens a sequence.
        k_cache: [pages, page size, Hk, D] of the dtype of ``q``, float8_e4m3fn or int8.
        v_cache: as ``k_cache``.
        block_table: [B, most pages] int32.
        context_lens: [B] int32, keys of each sequence; 0 gives zeros.
        max_context: the longest of them, as far as the host knows; the table's width if None. It
            decides how many programs share a sequence, not what is computed.
        window: keys a query sees at most, its own place included.
        scale: factor of the scores, 1/√D if None.
        k_scale: fp32, one element or [Hk]: a key is its element times this.
        v_scale: likewise for values.
        arrivals: of :func:`make_arrivals`, kept from call to call; None allocates it anew, which
            costs a launch.

    Returns:
        As ``q``, contiguous.

    Raises:
        ValueError: a shape, dtype, device, layout or option the contract does not allow; names the
            argument.
    """
    batch = q.unsqueeze(1) if q.dim() == 3 else q
    check(batch, k_cache, v_cache, block_table, context_lens)
    check_scale("k_scale", k_scale, k_cache)
    check_scale("v_scale", v_scale, k_cache)
    check_arrivals(arrivals, batch)
    most = block_table.shape[1] * k_cache.shape[1]
    if max_context is not None and not 0 <= max_context <= most:
        raise ValueError(
            f"max_context must lie in 0..{most}, what block_table holds: {max_context}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    if not (0 < scale < math.inf):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    longest = most if max_context is None else max_context
    o: Tensor = torch.ops.taut.paged_decode(
        batch, k_cache, v_cache, block_table, context_lens, k_scale, v_scale, arrivals, longest,
        window or 0, scale,
    )  # fmt: skip
    return o.squeeze(1) if q.dim() == 3 else o
