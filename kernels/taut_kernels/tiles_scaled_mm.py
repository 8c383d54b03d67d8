"""How the 8-bit products are cut up for one shape: measured tables and the rule behind them.

A table is ``tiles/scaled_mm-<card>.json``::

    {"gpu": "<torch.cuda.get_device_name>", "source": "<command, date, versions>",
     "rows": [{"op": "w8a8_gemm" | "fp8_gemm" | "fp8_block", "N": …, "K": …,
               "max_m": … | null, "tile": {…}, "M": [tokens measured, …], "us": [µs per call, …],
               "vllm_us": [the µs of the kernel vLLM runs there, …],
               "rival_us": [the best rival's µs, …]}, …]}

Rows of one product are buckets of M: ``max_m`` is inclusive and rises, null in the last one.
``tile`` holds exactly the fields of :class:`ScaledMmTile`. A product no table of the card names
takes :func:`rule`. The rivals' figures are of the same run, 0 where none ran. Where ours is slower
than vLLM's in a bucket, or its kernel was not tried on a card yet (:data:`SERVED`), the plugin
leaves that bucket to vLLM (:func:`why_not_preferred`). A card that takes these tiles from another
has verdicts of its own (:mod:`taut_kernels.measured_scaled_mm`).

A row may also have ``"layer": {"prefetch": lines or null, "M": […], "us": […], "vllm_us": […]}``:
µs of a whole decoder layer's step with ours and with vLLM's in this product, where all other
kernels are ours and start early (:mod:`taut_kernels.bench.decode_chain`), and how ours does
(null: late). It decides in such a layer alone (``in_layer``): behind others' kernels an early start
can lose. There rings of other products start early by the same pattern (:func:`early_in_layer`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from taut_kernels import _early_start, _tile_tables, measured_scaled_mm

_ROW_FIELDS = {"op", "N", "K", "max_m", "tile", "M", "us", "vllm_us", "rival_us"}
_LAYER_FIELDS = {"prefetch", "M", "us", "vllm_us"}
OPS = ("w8a8_gemm", "fp8_gemm", "fp8_block")
BLOCKS = "blocks"
"""The kernel for block-wise FP8 alone, and many tokens."""
PAIRS = "pairs"
"""The kernel of few tokens that takes two blocks of K a step."""
KERNELS = ("ring", "hopper", "turns", "few", PAIRS, BLOCKS)
_MOST_STAGES = {
    "hopper": {(128, 128): 16, (128, 256): 16, (128, 160): 5, (128, 192): 5},
    "turns": {(128, 128): 6, (64, 256): 5, (128, 160): 5, (64, 160): 6, (64, 192): 6},
    BLOCKS: {(256, 128): 4, (128, 128): 6, (128, 64): 8, (128, 32): 10, (64, 128): 8},
}
"""By kernel, and tokens and features of a tile: 226 KB hold blocks of results, too."""
FEW_RING_BYTES = 222 * 1024
"""What ``few`` and ``pairs`` leave of 227 KB to their rings."""
SERVED = ("ring", "few", "hopper", "turns", PAIRS, BLOCKS)
"""Kernels that calls in vLLM may take: right on a card through the launcher that layers call,
within CUDA graphs, too. A new one is left out until then."""
BLOCK_GROUP = 128
"""K indices and output features a block-wise FP8 scale covers."""
_JUDGED_APART = ("fp8_block",)
"""Ops whose figures beside vLLM's kernels are none of the tuner's, on any card."""
_BLOCK_STEPS = {"ring": 128, PAIRS: 256, BLOCKS: 128}
"""Of kernels for block-wise FP8: K indices a step, one or two blocks."""
MULTIPROCESSORS = 132
"""Of the cards the rule knows."""
_PREFETCH = 2
"""Lines of 128 bytes of each row, in every early start that won in a layer."""


@dataclass(frozen=True, slots=True)
class ScaledMmTile:
    """One way to cut the work.

    Args:
        kernel: ``ring`` (`cp.async` ring, weights as the row operand); ``pairs`` (likewise, two
            blocks of 128 along K a step, sm_90 only); or, with a warp of its own
            for TMA, sm_90 only: ``few`` (weights as the row operand) or, persistent, ``hopper``
            (two groups of warps share a tile) or ``turns`` (each has tiles of its own, and they
            multiply in turn); for block-wise FP8 alone, persistent, ``blocks``.
        block_m: tokens of a tile, a power of two ≥ 16; with ``hopper`` 128, with ``few`` 64 or 128,
            with ``pairs`` 16, 32 or 64, with ``blocks`` 64, 128 or 256.
        block_n: output features of a tile, a power of two ≥ 16; with ``hopper`` 128, 160, 192 or
            256, with ``few`` 64 (one group of warps), 128 or 256 (two), with ``pairs`` 64, 128 or
            256. With ``turns`` tiles are 128×128, 128×160, 64×160, 64×192, or 64×256 (FP8 only);
            with ``blocks`` 256×128, 128×128, 128×64, 128×32 or 64×128.
        block_k: K indices a step, a power of two ≥ 32; 128 where TMA feeds, or 256 with ``few``;
            256 with ``pairs``.
        num_warps: 4, 8 or 16 (1 and 2 leave `wgmma` unused); 4, those of a group, but for ``ring``.
        num_stages: steps in flight, ≥ 1.
        split_k: programs along K, 1..32, ``ring``, ``blocks`` of up to 128 tokens and 64 features
            or more, and ``few`` and ``pairs`` with 64 features, only; only up to
            :func:`most_shared_tokens`.
        group_m: token tiles of a group, ``hopper``, ``turns`` and ``blocks`` only.
        early: start before the kernel in front has ended (programmatic dependent launch), ``ring``
            on sm_90 and ``pairs`` only.
        prefetch: lines of 128 bytes of each row asked for until it has, 0 or a power of two.

    Raises:
        ValueError: a field is out of its range.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    group_m: int = 1
    early: bool = False
    prefetch: int = 0

    def __str__(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        ring = f"{self.kernel} {size}/{self.num_warps}w/{self.num_stages}s"
        if self.kernel in _MOST_STAGES:
            return f"{ring}/g{self.group_m}" + (f"/k{self.split_k}" if self.split_k > 1 else "")
        return f"{ring}/k{self.split_k}" + (f"/e{self.prefetch}" if self.early else "")

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {KERNELS}, got {self.kernel!r}")
        for field, least in (("block_m", 16), ("block_n", 16), ("block_k", 32)):
            value = getattr(self, field)
            # What TMA feeds has its own list.
            free = field == "block_n" and self.kernel != "ring"
            if value < least or (value & (value - 1) and not free):
                raise ValueError(f"{field} must be a power of two of at least {least}, got {value}")
        if self.num_warps not in (4, 8, 16):
            raise ValueError(f"num_warps must be 4, 8 or 16, got {self.num_warps}")
        for field, limit in (("num_stages", 16), ("split_k", 32), ("group_m", 64)):
            if not 1 <= getattr(self, field) <= limit:
                raise ValueError(f"{field} must lie in 1..{limit}, got {getattr(self, field)}")
        self._check_options_of_one_kernel()

    def _check_options_of_one_kernel(self) -> None:
        if not 0 <= self.prefetch <= 32 or self.prefetch & (self.prefetch - 1):
            raise ValueError(f"prefetch must be 0 or a power of two up to 32, got {self.prefetch}")
        if self.early and self.kernel not in ("ring", PAIRS):
            raise ValueError("early needs kernel ring or pairs")
        if self.prefetch and (not self.early or self.block_k % 128):
            raise ValueError("prefetch needs early and block_k of at least 128")
        if self.kernel == "few":
            self._check_few()
        if self.kernel == PAIRS:
            self._check_pairs()
        if self.kernel in _MOST_STAGES:
            self._check_persistent()

    def _check_persistent(self) -> None:
        most = _MOST_STAGES[self.kernel].get((self.block_m, self.block_n))
        if most is None:
            sizes = " or ".join(f"{m}×{n}" for m, n in _MOST_STAGES[self.kernel])
            raise ValueError(f"kernel {self.kernel} needs block_m × block_n {sizes}")
        if (self.block_k, self.num_warps) != (128, 4):
            raise ValueError(f"kernel {self.kernel} needs block_k 128 and num_warps 4")
        if self.split_k > 1 and not most_shared_tokens(self):
            tile = f"{self.block_m}×{self.block_n}"
            raise ValueError(f"kernel {self.kernel} of {tile} needs split_k 1, got {self.split_k}")
        if self.num_stages < 2:
            raise ValueError(f"kernel {self.kernel} needs num_stages of at least 2, got 1")
        if self.num_stages > most:
            size = f"{self.block_m}×{self.block_n}"
            raise ValueError(
                f"kernel {self.kernel} has room for {most} stages of {size}, got {self.num_stages}"
            )

    def _check_few(self) -> None:
        if self.block_m not in (64, 128) or self.block_n not in (64, 128, 256):
            raise ValueError(
                f"kernel few needs block_m 64 or 128 and block_n 64, 128 or 256, "
                f"got {self.block_m}×{self.block_n}"
            )
        if self.block_k not in (128, 256) or (self.num_warps, self.group_m) != (4, 1):
            raise ValueError("kernel few needs block_k 128 or 256, num_warps 4 and group_m 1")
        self._check_ring()

    def _check_pairs(self) -> None:
        if self.block_m > 64 or self.block_n not in (64, 128, 256) or self.block_k != 256:
            size = f"{self.block_m}×{self.block_n}×{self.block_k}"
            raise ValueError(
                "kernel pairs needs block_m of at most 64, block_n 64, 128 or 256 and block_k 256, "
                f"got {size}"
            )
        if (self.num_warps, self.group_m) != (4, 1):
            raise ValueError("kernel pairs needs num_warps 4 and group_m 1")
        self._check_ring()

    def _check_ring(self) -> None:
        if self.split_k > 1 and self.block_n != 64:
            raise ValueError(
                f"kernel {self.kernel} splits K with block_n 64 only, got {self.block_n}"
            )
        if self.num_stages < 2:
            raise ValueError(f"kernel {self.kernel} needs num_stages of at least 2, got 1")
        most = FEW_RING_BYTES // ((self.block_m + self.block_n) * self.block_k)
        if self.num_stages > most:
            size = f"{self.block_m}×{self.block_n}×{self.block_k}"
            raise ValueError(
                f"kernel {self.kernel} has room for {most} stages of {size}, got {self.num_stages}"
            )


def tiles_of_parts() -> list[ScaledMmTile]:
    """Return the tiles whose features are two powers of two: for what leaves a wave half empty."""
    return [
        ScaledMmTile(kernel, block_m, block_n, 128, 4, stages, group_m=16)
        for kernel, sizes in _MOST_STAGES.items()
        for (block_m, block_n), stages in sizes.items()
        if block_n & (block_n - 1)
    ]


def tiles_of_few() -> list[ScaledMmTile]:
    """Return the tiles of kernel ``few``: those that won somewhere."""
    return [
        ScaledMmTile("few", 128, 64, 256, 4, 4, 2),
        ScaledMmTile("few", 128, 64, 256, 4, 4),
        ScaledMmTile("few", 128, 64, 128, 4, 9),
        ScaledMmTile("few", 64, 64, 256, 4, 6),
        ScaledMmTile("few", 128, 128, 128, 4, 6),
        ScaledMmTile("few", 128, 256, 128, 4, 4),
    ]


def tiles_of_blocks() -> list[ScaledMmTile]:
    """Return the tiles of kernel ``blocks``, in groups of several token tiles.

    Those of 64 tokens with all the stages there is room for, and with half of them: then two
    programs share a multiprocessor.
    """
    return [
        ScaledMmTile(BLOCKS, block_m, block_n, BLOCK_GROUP, 4, stages, group_m=group_m)
        for (block_m, block_n), most in _MOST_STAGES[BLOCKS].items()
        for stages in ((most, most // 2) if block_m == 64 else (most,))
        for group_m in ((8, 16) if block_n == BLOCK_GROUP <= block_m else (8,))
    ]


def tiles_of_pairs() -> list[ScaledMmTile]:
    """Return a tile of kernel ``pairs`` for each number of tokens and features it has."""
    narrow = [ScaledMmTile(PAIRS, block_m, 64, 256, 4, 4) for block_m in (16, 32, 64)]
    sizes = ((16, 128), (32, 128), (64, 128), (16, 256), (32, 256), (64, 256))
    return narrow + [ScaledMmTile(PAIRS, *size, 256, 4, 2) for size in sizes]


def most_shared_tokens(tile: ScaledMmTile) -> int:
    """Return the most tokens whose tiles programs may share: what a layer's ``arrivals`` count.

    Those of one tile; with ``blocks``, whose groups of 64 tokens arrive apart, twice the features
    of a tile: there are two counters for 64 features. 0 where a tile's programs share none.
    """
    if tile.kernel not in _MOST_STAGES:
        return tile.block_m
    if tile.kernel != BLOCKS or tile.block_m > BLOCK_GROUP:
        return 0
    return 2 * tile.block_n if 2 * tile.block_n >= tile.block_m else 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tile for up to ``max_m`` tokens (None: any number) and whether `prefer` takes it.

    ``measured`` are the numbers of tokens that chose it.
    """

    max_m: int | None
    tile: ScaledMmTile
    wins: bool
    measured: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScaledMmTable:
    """The measured buckets of one card, by (op, N, K).

    Attributes:
        gpu: the card's name.
        buckets: behind anybody's kernels.
        in_layer: of the same limits, between kernels of ours that start early.
    """

    gpu: str
    buckets: dict[tuple[str, int, int], tuple[Bucket, ...]]
    in_layer: dict[tuple[str, int, int], tuple[Bucket, ...]]


def why_not_for(tile: ScaledMmTile, op: str, N: int) -> str | None:
    """Say why a tile cannot run a product; None where it can.

    Args:
        tile: how to cut the work.
        op: one of :data:`OPS`.
        N: output features.
    """
    if op == "fp8_block" and tile.block_k != _BLOCK_STEPS.get(tile.kernel):
        return (
            f"fp8_block needs kernel ring or blocks, block_k 128, or pairs, block_k 256, got {tile}"
        )
    if op == "fp8_block" and tile.block_n > BLOCK_GROUP:
        return f"fp8_block needs block_n of at most 128, one block of weights, got {tile}"
    if op == "fp8_block" and tile.kernel == PAIRS and tile.block_m * tile.block_n > 64 * 64:
        return f"fp8_block has no room for the sums of {tile}"
    if op != "fp8_block" and tile.kernel == BLOCKS:
        return f"kernel {tile.kernel} is for fp8_block alone, got {op}"
    if tile.kernel == BLOCKS and tile.split_k > 1 and 0 < N % BLOCK_GROUP <= 64:
        return (
            f"kernel {tile.kernel} splits K only where the last tile has over 64 features, got {N}"
        )
    if tile.kernel != "ring" and N % 8:
        return f"kernel {tile.kernel} needs N % 8 == 0 (16-byte rows), got {N}"
    if (tile.kernel, tile.block_n, op) == ("turns", 256, "w8a8_gemm"):
        return "kernel turns has tiles of 256 features for FP8 only"
    return None


def _is_faster(figures: dict[str, Any]) -> bool:
    times = zip(figures["us"], figures["vllm_us"], strict=True)
    return all(ours <= theirs for ours, theirs in times)


def _bucket(max_m: int | None, tile: ScaledMmTile, figures: dict[str, Any]) -> Bucket:
    wins = _is_faster(figures) and tile.kernel in SERVED
    return Bucket(max_m, tile, wins, tuple(figures["M"]))


def early_in_layer(tile: ScaledMmTile, op: str, N: int, K: int, max_m: int | None) -> ScaledMmTile:
    """Return what becomes of a tile between kernels that start early, where nobody timed it there.

    As for Llama-3-8B's four products: early up to 64 tokens, but where few tokens meet more
    programs of a ring than multiprocessors (H200), or up to 32 long K in ``pairs`` (H100).

    Args:
        tile: as timed alone.
        op: one of :data:`OPS`.
        N: output features.
        K: input features.
        max_m: most tokens of its bucket.
    """
    if op == "fp8_block" or tile.kernel not in ("ring", PAIRS) or tile.block_k % 128:
        return tile
    if max_m is None or max_m > _early_start.EARLY_TOKENS:
        return tile
    many = -(-N // tile.block_n) * tile.split_k > MULTIPROCESSORS
    of_ring, of_pairs = max_m <= 16 and many, max_m <= 32 and K >= _LONG_K
    late = of_pairs if tile.kernel == PAIRS else of_ring
    return tile if late else replace(tile, early=True, prefetch=_PREFETCH)


def _bucket_in_layer(row: dict[str, Any], tile: ScaledMmTile, where: str) -> Bucket:
    if "layer" not in row:
        early = early_in_layer(tile, row["op"], row["N"], row["K"], row["max_m"])
        return _bucket(row["max_m"], early, row)
    layer = row["layer"]
    lengths = {len(layer.get(key, ())) for key in ("M", "us", "vllm_us")}
    if set(layer) != _LAYER_FIELDS or len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"{where}: layer needs {sorted(_LAYER_FIELDS)}, of one length, at least 1")
    if layer["prefetch"] is not None:
        tile = replace(tile, early=True, prefetch=layer["prefetch"])
    return _bucket(row["max_m"], tile, layer)


def _parse_row(row: dict[str, Any], where: str) -> tuple[tuple[str, int, int], Bucket, Bucket]:
    if set(row) - {"layer"} != _ROW_FIELDS or row["op"] not in OPS:
        raise ValueError(f"{where}: a row needs exactly {sorted(_ROW_FIELDS)}, op one of {OPS}")
    if not row["M"] or len({len(row[key]) for key in ("M", "us", "vllm_us", "rival_us")}) > 1:
        raise ValueError(f"{where}: M and the figures must be of one length, at least 1")
    tile = ScaledMmTile(**row["tile"])
    most = most_shared_tokens(tile)
    if tile.split_k > 1 and (row["max_m"] is None or row["max_m"] > most):
        raise ValueError(f"{where}: split_k needs max_m ≤ {most}, got {tile} at {row['max_m']}")
    if reason := why_not_for(tile, row["op"], row["N"]):
        raise ValueError(f"{where}: {reason}")
    bucket = _bucket(row["max_m"], tile, row)
    return (row["op"], row["N"], row["K"]), bucket, _bucket_in_layer(row, tile, where)


def parse(text: str, where: str) -> ScaledMmTable:
    """Read a table.

    Args:
        text: JSON in the form of the module's docstring.
        where: file name, for errors.

    Returns:
        The table.

    Raises:
        ValueError: an unknown key, a tile out of range, or buckets out of order; names ``where``.
    """
    gpu, listed = _tile_tables.rows_of(text, where)
    found: dict[tuple[str, int, int], list[Bucket]] = {}
    layers: dict[tuple[str, int, int], list[Bucket]] = {}
    for row in listed:
        key, bucket, in_layer = _parse_row(row, where)
        found.setdefault(key, []).append(bucket)
        layers.setdefault(key, []).append(in_layer)
    for (op, N, K), buckets in found.items():
        limits = [bucket.max_m for bucket in buckets]
        bounded = [limit for limit in limits[:-1] if limit is not None]
        if limits[-1] is not None or len(bounded) != len(limits) - 1:
            raise ValueError(f"{where}: {op} N={N} K={K}: only the last bucket has max_m null")
        if sorted(set(bounded)) != bounded:
            raise ValueError(f"{where}: {op} N={N} K={K}: max_m must rise from bucket to bucket")
    alone, within = ({key: tuple(rows) for key, rows in some.items()} for some in (found, layers))
    return ScaledMmTable(gpu, alone, within)


@cache
def tables() -> dict[str, ScaledMmTable]:
    """Load every card's table, once a process."""
    return _tile_tables.load_all("scaled_mm", parse)


def waves_us(tile: ScaledMmTile, N: int, K: int, M: int) -> float:
    """Estimate a call of a kernel that TMA feeds, without its start and its last stores.

    Whole waves of tiles, each as long as its products (128 × 128 × 128 take 0.356 µs on an H200) or
    its bytes (64 a clock from L2) take, whichever is longer.

    Args:
        tile: ``kernel`` hopper or turns.
        N: output features.
        K: input features.
        M: tokens.
    """
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    products = 0.356 * tile.block_m * tile.block_n / 128**2
    loads = (tile.block_m + tile.block_n) * 128 / 112e3
    return -(-tiles // MULTIPROCESSORS) * -(-K // 128) * max(products, loads)


_RULE_TOKENS = (16, 32, 64, 128)
_TMA_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_RULE_SHARED_BYTES = 160 * 1024
"""For a ring: what a multiprocessor of sm_80 has, less what the driver keeps."""
FED_BY_TMA = (
    ScaledMmTile("hopper", 128, 256, 128, 4, 4, group_m=8),
    ScaledMmTile("hopper", 128, 128, 128, 4, 6, group_m=8),
    ScaledMmTile("turns", 128, 128, 128, 4, 6, group_m=8),
    ScaledMmTile("turns", 64, 256, 128, 4, 5, group_m=16),
    ScaledMmTile("hopper", 128, 160, 128, 4, 5, group_m=8),
    ScaledMmTile("hopper", 128, 192, 128, 4, 5, group_m=8),
    ScaledMmTile("turns", 64, 160, 128, 4, 6, group_m=16),
    ScaledMmTile("turns", 64, 192, 128, 4, 6, group_m=16),
)
"""Of equal promise the first. ``turns`` of 128 × 160 loses to ``hopper`` on most shapes. Groups are
of 1024 tokens: on an H100 ``turns`` of 128 × 128 takes up to a third longer in groups of 2048."""
_MANY_TOKENS = 2048
"""Beyond which groups of 512 tokens are faster on an H100, and no slower on an H200."""
_LONG_K = 8192
"""From which on tiles fed by TMA beat FP8's rings of 64 × 128 up to 256 tokens; int8's always."""
_SPLIT_PROGRAMS = 88
"""Of ``pairs``: programs beyond which another along K costs more than it brings (H100)."""
_SHORT_WAVE = 0.55
"""A wave of kernel ``blocks`` with 128 tokens a tile beside one with 256 (H100, 2026-11-25)."""
_BESIDE_US = 3.0
"""What each wave but the last costs beside its products where groups do not take turns."""
_CUT = 128
"""Tokens of a part of a wide bucket."""
_LEAST_CUT, _MOST_CUT = 1024, 4096
"""Least limit of a bucket that is cut, and most tokens one without a limit is cut for."""
_FIRST_CUT = 512
"""Least limit of a part that gets another tile."""
_CLEARLY = 0.88
"""What another tile may take of the measured one's time; the estimate errs by less."""


def rule(op: str, N: int, K: int, M: int, *, tma: bool = False) -> ScaledMmTile:
    """Choose a tile for a shape nobody measured, as the measured tables suggest.

    Args:
        op: one of :data:`OPS`.
        N: output features.
        K: input features.
        M: tokens, ≥ 1.
        tma: the card runs the kernels that TMA feeds.

    Returns:
        The tile.
    """
    fed = tma and N % 8 == 0
    if op == "fp8_block":
        return _rule_of_blocks(N, K, M, fed)
    if M <= 64:
        return _rule_of_few_pairs(N, M) if fed else _rule_of_few(N, K, M)
    narrow = -(-N // 64) <= MULTIPROCESSORS
    if M <= 128 and narrow:
        if K >= 2 * N and -(-N // 64) * 2 <= MULTIPROCESSORS:
            return ScaledMmTile("ring", 128, 64, 128, 4, 6, 2)
        return ScaledMmTile("ring", 64, 64, 128, 4, 6)
    if M <= 512 and -(-N // 64) * -(-M // 64) <= MULTIPROCESSORS:
        return ScaledMmTile("ring", 64, 64, 128, 4, 6)
    short = K < _LONG_K and op == "fp8_gemm"
    if M <= 256 and (short or not fed) and -(-N // 128) * -(-M // 64) <= MULTIPROCESSORS:
        return ScaledMmTile("ring", 64, 128, 128, 8, 5)
    if fed:
        return _rule_of_waves(op, N, K, M)
    return ScaledMmTile("ring", 128, 128, 128, 8, 4)


def _rule_of_blocks(N: int, K: int, M: int, fed: bool) -> ScaledMmTile:
    """Choose a tile of block-wise FP8; of a ring with K split while two programs have room."""
    if fed and M <= BLOCK_GROUP and (tile := _rule_of_few_blocks(N, K, M)):
        return tile
    if fed and M >= 64:
        return _rule_of_many_blocks(N, M)
    block_m = next((tokens for tokens in _RULE_TOKENS if tokens >= M), 128)
    block_n, num_warps = (128, 8) if block_m == 128 else (64, 4)
    split, most = 1, 8 if block_m <= 64 else 1  # the last program adds its tiles in registers
    while block_m >= M and split < most and -(-N // block_n) * split <= MULTIPROCESSORS:
        if 4 * BLOCK_GROUP * split > K:
            break
        split *= 2
    return ScaledMmTile("ring", block_m, block_n, BLOCK_GROUP, num_warps, 4, split)


def _rule_of_few_blocks(N: int, K: int, M: int) -> ScaledMmTile | None:
    """Choose kernel ``pairs`` up to 64 tokens; beyond it or ``blocks`` of 64 tokens, or None.

    As measured on Llama-3-8B's products, on an H200 where ``pairs`` fit one wave, else on an H100
    (2026-11-26).
    """
    narrow, wide = -(-N // 64), -(-N // BLOCK_GROUP)
    halves, long = 2 * narrow <= MULTIPROCESSORS, K >= _LONG_K
    if M <= 64 and narrow <= MULTIPROCESSORS:
        block_m = next(tokens for tokens in _RULE_TOKENS if tokens >= M)
        split = 2 if halves and (M > 32 or (M > 16 and long)) else 1
        stages = 8 if halves and split == 1 else 6
        return ScaledMmTile(PAIRS, block_m, 64, 256, 4, stages, split)
    if M <= 64:
        tile = _rule_of_few_pairs(N, M)
        able = why_not_for(tile, "fp8_block", N) is None
        return tile if able else replace(tile, block_n=64, num_stages=3)
    if halves and not long:
        return ScaledMmTile(PAIRS, 64, 64, 256, 4, 6)
    tiles = wide * -(-M // 64)
    if tiles <= MULTIPROCESSORS:
        whole = ScaledMmTile(BLOCKS, 64, 128, BLOCK_GROUP, 4, 8, group_m=8)
        shared = replace(whole, split_k=2)
        fits = 2 * tiles <= MULTIPROCESSORS and why_not_for(shared, "fp8_block", N) is None
        return shared if fits else whole
    return None


def _rule_of_many_blocks(N: int, M: int) -> ScaledMmTile:
    """Choose a tile of ``blocks`` with two groups: most programs of one wave, or shortest waves.

    A wave of 128 tokens a tile takes more than half as long as one of 256 (:data:`_SHORT_WAVE`).
    """

    def tiles(tile: ScaledMmTile) -> int:
        return -(-N // tile.block_n) * -(-M // tile.block_m)

    def time(tile: ScaledMmTile) -> float:
        waves = -(-tiles(tile) // MULTIPROCESSORS)
        return waves * (_SHORT_WAVE if tile.block_m == BLOCK_GROUP else 1.0)

    shared = [tile for tile in tiles_of_blocks() if tile.block_m >= BLOCK_GROUP]
    at_once = [tile for tile in shared if tiles(tile) <= MULTIPROCESSORS]
    if at_once:
        return max(at_once, key=tiles)
    return min((tile for tile in shared if tile.block_n == BLOCK_GROUP), key=time)


def _rule_of_few_pairs(N: int, M: int) -> ScaledMmTile:
    """Choose a tile of ``pairs`` for at most 64 tokens: one wave of 64 features, or of 128.

    With more features short rings, several of which a multiprocessor holds. As measured on 20
    products on an H100 (2026-11-26), where it is the best tile tried, or within 2 % of it, in 158
    of 160 cells.
    """
    block_m = next(tokens for tokens in _RULE_TOKENS if tokens >= M)
    narrow, wide = -(-N // 64), -(-N // 128)
    if narrow <= MULTIPROCESSORS:
        split = max(1, min(4, _SPLIT_PROGRAMS // narrow))
        deep = split == 1 and block_m <= 32 and 2 * narrow <= MULTIPROCESSORS
        stages = 8 if deep else 6
        return ScaledMmTile(PAIRS, block_m, 64, 256, 4, stages, split)
    if wide <= MULTIPROCESSORS:
        return ScaledMmTile(PAIRS, block_m, 128, 256, 4, 4)
    return ScaledMmTile(PAIRS, block_m, 64, 256, 4, 3 if block_m == 64 else 4)


def _rule_of_few(N: int, K: int, M: int) -> ScaledMmTile:
    """Choose a ring for at most 64 tokens: deep where a multiprocessor holds one program.

    Where two tiles of half the tokens fill a wave and K is short, these; else K is split as far as
    every program still has a multiprocessor of its own.
    """
    block_m = next(tokens for tokens in _RULE_TOKENS if tokens >= M)
    fill = 2 * -(-N // 64) / MULTIPROCESSORS
    if M > 16 and 2 / 3 < fill <= 1 and K < _LONG_K:
        return ScaledMmTile("ring", block_m // 2, 64, 256, 4, 6)
    if -(-N // 64) > MULTIPROCESSORS:
        held = -(-N // 128 // MULTIPROCESSORS)
        stage = (block_m + 128) * 128
        stages = max(3, min(8 if held == 1 else 4, _RULE_SHARED_BYTES // held // stage))
        return ScaledMmTile("ring", block_m, 128, 128, 4 if block_m == 16 else 8, stages)
    block_k, stages = (128, 8) if block_m == 64 else (256, 6)
    split = 1
    while 2 * split * -(-N // 64) <= MULTIPROCESSORS and 4 * block_k * split <= K and split < 8:
        split *= 2
    return ScaledMmTile("ring", block_m, 64, block_k, 4, stages, split)


def _promised_us(tile: ScaledMmTile, N: int, K: int, M: int) -> float:
    """Estimate a call as :func:`waves_us` does, and what lies between its waves."""
    waves = -(-(-(-M // tile.block_m) * -(-N // tile.block_n)) // MULTIPROCESSORS)
    beside = _BESIDE_US * (waves - 1) if tile.kernel == "hopper" else 0.0
    return waves_us(tile, N, K, M) + beside


def _rule_of_waves(op: str, N: int, K: int, M: int) -> ScaledMmTile:
    """Choose the kernel and tile whose waves promise to be the shortest."""
    able = (tile for tile in FED_BY_TMA if why_not_for(tile, op, N) is None)
    best = min(able, key=lambda tile: _promised_us(tile, N, K, M))
    return replace(best, group_m=best.group_m // 2) if M > _MANY_TOKENS else best


def _between(op: str, N: int, K: int, found: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """Cut wide buckets of tiles fed by TMA where another tile's waves fit better.

    A bucket's tile won at one or two numbers of tokens; between them its waves may be half empty.
    The numbers measured keep it.
    """
    cut: list[Bucket] = []
    first = 1
    for bucket in found:
        last = bucket.max_m or _MOST_CUT
        limits: tuple[int | None, ...] = (bucket.max_m,)
        if bucket.tile.kernel in ("hopper", "turns") and last >= _LEAST_CUT:
            limits = (*range(-(-first // _CUT) * _CUT, last, _CUT), *limits)
        for limit in limits:
            tile = bucket.tile if limit is None else _better(op, N, K, limit, bucket)
            part = replace(bucket, max_m=limit, tile=tile)
            if limit != limits[0] and replace(cut[-1], max_m=limit) == part:
                cut.pop()
            cut.append(part)
        first = last + 1
    return tuple(cut)


def _better(op: str, N: int, K: int, limit: int, bucket: Bucket) -> ScaledMmTile:
    """Return the tile for the last :data:`_CUT` tokens up to a limit of a bucket."""
    if limit < _FIRST_CUT or any(limit - _CUT < M <= limit for M in bucket.measured):
        return bucket.tile
    other = _rule_of_waves(op, N, K, limit)
    clearly = _promised_us(other, N, K, limit) < _CLEARLY * _promised_us(bucket.tile, N, K, limit)
    return other if clearly else bucket.tile


@cache
def buckets(
    op: str, gpu: str | None, N: int, K: int, *, in_layer: bool = False
) -> tuple[Bucket, ...]:
    """Return the buckets of one product on one card; those of :func:`rule` where none is measured.

    Args:
        op: one of :data:`OPS`.
        gpu: card name, None outside CUDA.
        N: output features.
        K: input features.
        in_layer: between kernels of ours that start early.
    """
    table = _tile_tables.of_card(tables(), gpu)
    if measured := _measured(table, op, gpu, N, K, in_layer=in_layer):
        return _between(op, N, K, measured)
    # A card that runs them has them in its table.
    tma = table is not None and any(
        bucket.tile.kernel != "ring" for some in table.buckets.values() for bucket in some
    )
    bounded = _TMA_TOKENS if tma else _RULE_TOKENS
    return tuple(
        Bucket(limit, rule(op, N, K, limit or 2 * bounded[-1], tma=tma), wins=False)
        for limit in (*bounded, None)
    )


def tokens_of_buckets(op: str, gpu: str | None, N: int, K: int) -> tuple[int, ...]:
    """Return one number of tokens for each bucket, for compiling every tile before serving starts.

    Args:
        op: one of :data:`OPS`.
        gpu: card name, None outside CUDA.
        N: output features.
        K: input features.
    """
    sizes: list[int] = []
    for bucket in buckets(op, gpu, N, K):
        previous = sizes[-1] if sizes else 0
        sizes.append(previous + 1 if bucket.max_m is None else bucket.max_m)
    return tuple(sizes)


def _measured(
    table: ScaledMmTable | None, op: str, gpu: str | None, N: int, K: int, *, in_layer: bool
) -> tuple[Bucket, ...]:
    """Return a product's measured buckets.

    Those of another card's table, and of an op judged apart, have this card's verdicts from
    :mod:`taut_kernels.measured_scaled_mm`.
    """
    if table is None or (op, N, K) not in table.buckets:
        return ()
    found = (table.in_layer if in_layer else table.buckets)[op, N, K]
    if gpu is None or (table.gpu == gpu and op not in _JUDGED_APART):
        return found
    firsts = (1, *(bucket.max_m + 1 for bucket in found if bucket.max_m is not None))
    return tuple(
        replace(
            bucket,
            wins=bucket.tile.kernel in SERVED
            and measured_scaled_mm.wins(gpu, op, N, K, first, bucket.max_m, in_layer=in_layer),
        )
        for first, bucket in zip(firsts, found, strict=True)
    )


def lookup(op: str, gpu: str | None, N: int, K: int, M: int, *, in_layer: bool = False) -> Bucket:
    """Choose the bucket of one call: the first that holds ``M`` tokens."""
    limits, found = _by_limit(op, gpu, N, K, in_layer=in_layer)
    return found[bisect_left(limits, M)]


@cache
def _by_limit(
    op: str, gpu: str | None, N: int, K: int, *, in_layer: bool
) -> tuple[tuple[int, ...], tuple[Bucket, ...]]:
    """Return a product's buckets behind their limits; the last has none."""
    found = buckets(op, gpu, N, K, in_layer=in_layer)
    return tuple(bucket.max_m for bucket in found if bucket.max_m is not None), found


def why_not_preferred(
    op: str, gpu: str | None, N: int, K: int, *, in_layer: bool = False
) -> str | None:
    """Say in which regimes the plugin leaves a layer to vLLM.

    Args:
        op: one of :data:`OPS`.
        gpu: card name.
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        in_layer: between kernels of ours that start early.

    Returns:
        A reason, or None where ours is the faster kernel for every number of tokens.
    """
    table = _tile_tables.of_card(tables(), gpu)
    if table is None:
        return f"not measured on {gpu}"
    own = table.gpu == gpu and op not in _JUDGED_APART
    judged = own or (op, N, K) in measured_scaled_mm.products(gpu)
    if (op, N, K) not in table.buckets or not judged:
        return f"{N}×{K} not measured on {gpu}"
    losing: list[list[int | None]] = []
    previous: int | None = 0
    measured = _measured(table, op, gpu, N, K, in_layer=in_layer)
    tried = all(bucket.tile.kernel in SERVED for bucket in measured)
    for bucket in measured:
        if not bucket.wins and losing and losing[-1][1] == previous:
            losing[-1][1] = bucket.max_m
        elif not bucket.wins:
            losing.append([(previous or 0) + 1, bucket.max_m])
        previous = bucket.max_m
    ranges = ", ".join(f"{first}–{'' if last is None else last}" for first, last in losing)
    why = "slower than vLLM's" if tried else "slower than vLLM's, or not tried in it,"
    if tried and not own:
        why = "not measured to be as fast as vLLM's"
    return f"{why} at {ranges} tokens" if losing else None
