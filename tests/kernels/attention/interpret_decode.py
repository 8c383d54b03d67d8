"""Run by test_paged_decode.py with TRITON_INTERPRET=1: the jit kernel on CPU tensors, fp16 queries.

In its own process, since Triton reads the variable when it is imported.
"""

import dataclasses
import itertools
import sys

import torch
from emulator.paged import make_case

from taut_bench import testing
from taut_kernels.attention.decode import merge_jit as decode_merge_jit
from taut_kernels.attention.decode import op as decode
from taut_kernels.attention.decode import shares_jit as decode_shares_jit
from taut_kernels.attention.decode import values_jit as decode_values_jit
from taut_kernels.attention.tile import DecodeTile
from taut_kernels.launch import launcher

# Warps × keys: fewer keys a tile than a page of 64 has, and more.
TILES = (DecodeTile(16, 2, 2, 4, 16), DecodeTile(16, 4, 2, 4, 40), DecodeTile(32, 1, 2, 4, 1))
FORMATS = (torch.float16, torch.float8_e4m3fn, torch.int8)
# One key, a page and its neighbours, none, several splits; each sequence another.
CONTEXTS = ([0, 1, 15], [16, 17, 0], [64, 63, 129], [200, 5, 33])


def check(case, tile, splits):
    arrivals = decode.make_arrivals(len(case.context_lens), case.q.shape[2], case.q.device, 8)
    with testing.nan_poison():
        settings = decode.Settings(*case.settings(arrivals))
        found = decode.launch(tile, case.q, case.k_cache, case.v_cache, settings, splits)
    testing.assert_within_budget(found, case.gold(), case.reference())
    assert not arrivals.any(), "arrivals are left as they were"
    return 1


def contexts():
    """Every format with pages below and above a tile, GQA of 1, 4 and 8, heads of 64 and 96."""
    count = 0
    shapes = itertools.cycle(((4, 1, 64), (8, 2, 64), (8, 1, 96), (2, 2, 96)))
    pages = itertools.cycle((16, 64, 32, 128))  # out of step with the tiles
    for lens, dtype in itertools.product(CONTEXTS, FORMATS):
        (heads, heads_k, dim), page = next(shapes), next(pages)
        case = make_case(lens, heads, heads_k, dim, page, dtype, by_head=bool(count % 2))
        count += check(case, TILES[count % 3], (1, 3, 7)[count % 3])
    return count


def queries_and_windows():
    """Speculative tokens, more rows than one program takes, windows."""
    count = 0
    for queries, window, heads in (
        (1, 20, 4), (3, 0, 4), (8, 0, 4), (4, 33, 4), (2, 1, 4), (5, 0, 7), (8, 20, 2)
    ):  # fmt: skip
        dtype = FORMATS[count % 3]
        options = {"queries": queries, "window": window}
        case = make_case([90, 2, 0, 47], heads, 1, 64, 16, dtype, **options)
        count += check(case, TILES[count % 3], 3)
    return count


def wide_heads():
    count = 0
    for dim, dtype in ((128, torch.int8), (128, torch.float8_e4m3fn), (256, torch.float16)):
        case = make_case([70, 19], 4, 2, dim, 32, dtype)
        count += check(case, TILES[0], 2)
    return count


def layouts():
    """Heads before tokens in a page, keys and values in one tensor or unlike each other, gaps."""
    count = 0
    for layout, dtype in itertools.product(("heads first", "interleaved", "gap", "apart"), FORMATS):
        case = make_case([70, 33], 4, 2, 64, 32, dtype, layout=layout)
        count += check(case, TILES[count % 2], 2)
    return count


def large_values():
    """Scores far beyond what exp can hold; queries near the largest of fp16."""
    case = make_case([60], 4, 2, 64, 16, torch.float16)
    case.q *= 60
    case.k_cache *= 60
    count = check(case, TILES[0], 2)
    case = make_case([60], 4, 2, 64, 16, torch.float8_e4m3fn, k_scale=1e-4)
    case.q *= 10000
    return count + check(case, TILES[0], 2)


def many_splits():
    """More parts than are merged at once, and not a multiple of that; as many as there are keys."""
    count = 0
    for dtype, splits in zip(FORMATS, (19, 23, 37), strict=True):
        case = make_case([600, 31], 4, 1, 64, 16, dtype)
        count += check(case, DecodeTile(16, 1, 2, 4, 1), splits)
    return count


def _left(case, tile, **launch):
    """Run the kernel; return o, and which parts were stored, [programs a split, splits]."""
    arrivals = decode.make_arrivals(len(case.context_lens), case.q.shape[2], case.q.device, 8)
    allocated, empty = [], launcher.empty

    def remembered(*args, **kwargs):
        allocated.append(empty(*args, **kwargs).fill_(float("nan")))
        return allocated[-1]

    launcher.empty = remembered
    try:
        settings = decode.Settings(*case.settings(arrivals))
        found = decode.launch(tile, case.q, case.k_cache, case.v_cache, settings, **launch)
    finally:
        launcher.empty = empty
    assert not arrivals.any(), "arrivals are left as they were"
    return found, (~allocated[2].isnan()).flatten(1).all(1)


def short_among_long():
    """A grid for far longer sequences: parts of `min_keys` and more.

    A sequence of one part leaves nothing to merge; nor does what has no key.
    """
    count = 0
    tile = DecodeTile(16, 2, 2, 4, 64)  # 32 keys a step
    for queries, window in ((1, 0), (1, 150), (3, 0), (3, 150)):
        lens = [queries, 63, 64, 65, 0, 128, 129, 500] if queries == 1 else [3, 64, 65, 0, 311]
        case = make_case(lens, 4, 2, 64, 16, torch.float16, queries=queries, window=window)
        found, stored = _left(case, tile, splits=5)
        parts = stored.view(len(lens), -1, 5).sum(2)
        testing.assert_within_budget(found, case.gold(), case.reference())
        for number, context in enumerate(lens):
            first = max(context - queries + 1 - window, 0) // 32 * 32 if window else 0
            keys = context - first
            chunk = -(-max(-(-keys // 5), 64) // 32) * 32
            used = max(1, -(-keys // chunk))
            assert (parts[number] == (used if used > 1 else 0)).all(), (context, parts[number])
        count += 1
    return count


def _laid_out(lens, tile, shares, most, queries, window):
    """Return how many parts each sequence has, as the kernel must lay them out."""
    block = tile.keys * tile.num_warps
    steps = []
    for context in lens:
        context = min(max(context, 0), most)
        first = max(context - queries + 1 - window, 0) // block * block if window else 0
        steps.append(-(-(context - first) // block))
    part = max(-(-sum(steps) // shares), -(-tile.min_keys // block))
    return [max(1, -(-count // part)) for count in steps]


def check_shares(case, tile, shares):
    """Run a launch in shares twice; the parts of divided sequences are stored, and no others."""
    sequences, queries, _, _ = case.q.shape
    found, stored = _left(case, tile, shares=shares)
    testing.assert_within_budget(found, case.gold(), case.reference())
    assert torch.equal(found, _left(case, tile, shares=shares)[0])
    most = case.block_table.shape[1] * case.k_cache.shape[1]
    lens = case.context_lens.tolist()
    parts = _laid_out(lens, tile, shares, most, queries, case.window)
    assert sum(parts) <= shares + sequences
    divided = sum(count for count in parts if count > 1)
    stored = stored.view(-1, shares + sequences)
    assert (stored.sum(1) == divided).all(), (lens, parts, stored.sum(1))
    return 1


def shares():
    """Parts laid out by the lengths: uneven, equal, none, all 1, one huge; windows, speculation."""
    count = 0
    tiles = (DecodeTile(16, 2, 2, 4, 1), DecodeTile(16, 1, 2, 4, 48), DecodeTile(16, 4, 2, 4, 100))
    vectors = (
        [0],
        [450],
        [1] * 9,
        [0, 0, 0, 900],
        [450, 0, 0, 0, 5],
        [16, 17, 31, 32, 33, 64, 65, 0, 1],
        [200, 200, 200],
        [40, 500, 3, 250, 0, 130, 64],
        [129] * 7 + [0] * 4,
    )
    for number, (lens, many) in enumerate(itertools.product(vectors, (2, 5, 13))):
        tile, dtype = tiles[number % 3], FORMATS[number % 3 if number % 2 else 0]
        # A key head more is one program more for every part: some batches have two.
        heads = (2, 1) if number % 4 else (4, 2)
        case = make_case(lens, *heads, 64, 16, dtype)
        count += check_shares(case, tile, many)
    for queries, window in ((1, 100), (3, 0), (3, 50), (8, 33)):
        lens = [queries, 400, 64, 65, 120, queries, 311]
        case = make_case(lens, 4, 1, 64, 16, torch.float16, queries=queries, window=window)
        count += check_shares(case, tiles[count % 3], 6)
    return count


def shares_of_many():
    """More sequences than the least block of lengths; lengths beyond the table, and below 0."""
    generator = torch.Generator().manual_seed(3)
    lens = (torch.rand(70, generator=generator) ** 6 * 600).int().tolist()
    case = make_case(lens, 1, 1, 64, 16, torch.float16)
    count = check_shares(case, DecodeTile(16, 1, 2, 4, 32), 20)
    case = make_case([320, 40, 160, 16], 2, 1, 64, 16, torch.float16)
    table = case.block_table[:, :20].contiguous()
    case = dataclasses.replace(case, block_table=table)
    case.context_lens.copy_(torch.tensor([2**31 - 1, -(2**31), 160, 0]))
    return count + check_shares(case, DecodeTile(16, 2, 2, 4, 32), 7)


def layouts_of_shares():
    """The schedule alone over thousands of batches: each step of each sequence in one part."""
    import triton
    import triton.language as tl

    @triton.jit
    def lay_out(contexts_ptr, o_ptr, shares, min_keys, most_keys, window, QUERIES: tl.constexpr,
                WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_B: tl.constexpr):  # fmt: skip
        place = tl.program_id(0)
        batch, split, active, context, first, last = decode_shares_jit.find_part(
            contexts_ptr, tl.num_programs(0) - shares, shares, min_keys, most_keys, window, place,
            QUERIES, WINDOW, BLOCK_KEYS, BLOCK_B,
        )  # fmt: skip
        tl.store(o_ptr + place * 6 + 0, batch)
        tl.store(o_ptr + place * 6 + 1, split)
        tl.store(o_ptr + place * 6 + 2, active)
        tl.store(o_ptr + place * 6 + 3, context)
        tl.store(o_ptr + place * 6 + 4, first)
        tl.store(o_ptr + place * 6 + 5, last)

    generator = torch.Generator().manual_seed(5)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).tolist()

    count = 0
    for sequences, block_b in ((1, 64), (2, 64), (7, 64), (63, 64), (64, 64), (65, 256)):
        for kind in range(6):
            most = 131072
            lens = {
                0: [0] * sequences,
                1: [1] * sequences,
                2: [most] * sequences,
                3: [2**31 - 1, *[-1] * (sequences - 1)],
                4: draw(0, 2000, sequences),
                5: [(x + 1) ** 2 // 97 for x in draw(0, 3500, sequences)],
            }[kind]
            (shares,), (least,) = draw(2, 40, 1), draw(1, 1500, 1)
            queries, window = ((1, 0), (4, 0), (4, 300))[count % 3]
            contexts = torch.tensor(lens, dtype=torch.int32)
            out = torch.full((shares + sequences, 6), -7, dtype=torch.int32)
            lay_out[(shares + sequences,)](
                contexts, out, shares, least, most, window, queries, window > 0, 32, block_b
            )
            tile = DecodeTile(16, 2, 1, 1, least)
            parts = _laid_out(lens, tile, shares, most, queries, window)
            working = [row for row in out.tolist() if row[0] >= 0]
            assert len(working) == sum(parts)
            assert working == out.tolist()[: len(working)], "places without work come last"
            for number, context in enumerate(lens):
                mine = [row for row in working if row[0] == number]
                context = min(max(context, 0), most)
                first = max(context - queries + 1 - window, 0) // 32 * 32 if window else 0
                assert [row[1:4] for row in mine] == [
                    [part, parts[number], context] for part in range(parts[number])
                ]
                assert mine[0][4] == first
                assert mine[-1][5] == context
                assert all(a[5] == b[4] for a, b in itertools.pairwise(mine))
                assert all(row[4] % 32 == 0 for row in mine)
                sizes = [row[5] - row[4] for row in mine]
                assert max(sizes) - min(sizes) < 64
                assert len(sizes) == 1 or min(sizes) > 0
            count += 1
    return count


def _merged(partial, stats, active, rows, dim, unroll):
    """Run the merge alone; return [rows, dim]."""
    import triton
    import triton.language as tl

    @triton.jit
    def merge(partial_ptr, stats_ptr, o_ptr, active, D: tl.constexpr, BLOCK_D: tl.constexpr,
              ROWS: tl.constexpr, BLOCK_R: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
        acc, total = decode_merge_jit.merged_splits(
            partial_ptr, stats_ptr, active, D, BLOCK_D, ROWS, BLOCK_R, UNROLL
        )
        decode_merge_jit.store_rows(acc, total, 0.5, o_ptr, 0, ROWS, 0, D, D, BLOCK_D, BLOCK_R,
                                     BLOCK_R)  # fmt: skip

    out = torch.full((rows, dim), float("nan"))
    block_r, block_d = 1 << (rows - 1).bit_length(), 1 << (dim - 1).bit_length()
    merge[(1,)](partial, stats, out, active, dim, block_d, rows, block_r, unroll)
    return out


def merges():
    """One part to many, odd numbers, parts and rows without a key; behind the last, NaN."""
    generator = torch.Generator().manual_seed(1)
    count = 0
    shapes = itertools.cycle(((4, 64, 4), (3, 96, 8), (1, 64, 16), (16, 64, 2), (7, 32, 32)))
    for active in (1, 2, 3, 15, 16, 17, 33, 131, 165):
        rows, dim, unroll = next(shapes)
        partial = torch.full((active + 3, rows, dim), float("nan"))
        stats = torch.full((active + 3, 2, rows), float("nan"))
        partial[:active] = torch.randn(active, rows, dim, generator=generator)
        # As far apart as scores of long contexts are, so that a wrong maximum shows.
        stats[:active, 0] = torch.randn(active, rows, generator=generator) * 100
        stats[:active, 1] = torch.rand(active, rows, generator=generator) + 1
        empty = torch.rand(active, rows, generator=generator) < 0.3
        empty[:, 0] = active % 2 == 0
        partial[:active][empty] = 0
        stats[:active, 0][empty], stats[:active, 1][empty] = float("-inf"), 0
        found = _merged(partial, stats, active, rows, dim, unroll)
        highest = stats[:active, 0].double().amax(0).clamp(min=-1e30)
        weights = (stats[:active, 0].double() - highest).exp2()
        total = (weights * stats[:active, 1]).sum(0)
        gold = (weights[:, :, None] * partial[:active]).sum(0) * 0.5
        gold = gold / total.where(total > 0, 1.0)[:, None]
        assert not found.isnan().any()
        # exp2 of a difference of hundreds has the difference's rounding, 2**-17 of it, at most.
        assert (found - gold).abs().max() <= 1e-4, (active, (found - gold).abs().max())
        assert torch.equal(found, _merged(partial, stats, active, rows, dim, unroll))
        count += 1
    return count


def conversions():
    """Every code of both formats, against torch; NaN, which no cache holds, left out."""
    import triton
    import triton.language as tl

    @triton.jit
    def convert(words_ptr, out_ptr, FORMAT: tl.constexpr):
        offs = tl.arange(0, 256)
        words = tl.load(words_ptr + offs)
        even, odd = decode_values_jit.halves(words, FORMAT, False)
        tl.store(out_ptr + 2 * offs, even)
        tl.store(out_ptr + 2 * offs + 1, odd)

    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack((codes, codes.flip(0)), dim=1).contiguous()
    for dtype, name in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8")):
        out = torch.empty(256, 2, dtype=torch.float16)
        convert[(1,)](pairs.view(torch.int16), out, name)
        wanted = pairs.view(dtype).to(torch.float16)
        real = ~wanted.isnan()
        assert torch.equal(out[real], wanted[real])
    return 2


def main(names):
    torch.set_num_threads(2)
    for name in names:
        print(name, globals()[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
