"""Run by test_cache_write.py with TRITON_INTERPRET=1: the jit kernel on CPU tensors, fp16.

In its own process, since Triton reads the variable when it is imported.
"""

import itertools
import sys

import torch

from taut_kernels.attention.cache_write import op as cw
from taut_kernels.attention.cache_write.kernel import e4m3_codes

FP8 = torch.float8_e4m3fn
# An eighth of a model, Llama's, no powers of two, more heads than a program takes, wide heads.
SHAPES = ((1, 128, 16), (8, 128, 32), (3, 80, 48), (20, 96, 16), (5, 256, 64), (2, 16, 1))


def drawn(tokens, heads, dim, page, dtype, slots, *, layout="vllm", scales=None):
    """Return the op's arguments: rows cut out of a projection, a cache that is no number."""
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, (heads + 3) * 2 * dim, generator=generator).half()
    k = rows[:, 2 * dim : (heads + 2) * dim].unflatten(1, (heads, dim))
    v = rows[:, -heads * dim :].unflatten(1, (heads, dim))
    if layout == "apart":
        v = v.transpose(0, 1).contiguous().transpose(0, 1)
    pages = max(slots) // page + 2
    whole = torch.uint8 if dtype == FP8 else torch.int16
    if layout == "apart":
        caches = [torch.full((pages, page, heads, dim + 8), -1).to(whole)[..., :dim]]
        caches += [torch.full((page, heads, pages, dim), -1).to(whole).permute(2, 0, 1, 3)]
    else:
        both = torch.full((pages, heads, page, 2 * dim), -1).to(whole).transpose(1, 2)
        caches = [both[..., :dim], both[..., dim:]]
    caches = [cache.view(dtype) for cache in caches]
    found = [None, None]
    if scales:
        found = [torch.rand(scales, generator=generator) + 0.1 for _ in range(2)]
    return [k, v, *caches, torch.tensor(slots), *found]


def whole(cache):
    return cache.view(torch.uint8 if cache.dtype == FP8 else torch.int16).clone()


def check(arguments):
    """The kernel leaves the bits of the reference, everywhere."""
    before = [whole(cache) for cache in arguments[2:4]]
    cw.launch(*arguments)
    found = [whole(cache) for cache in arguments[2:4]]
    for cache, old in zip(arguments[2:4], before, strict=True):
        cache.view(old.dtype).copy_(old)
    cw.cache_write_ref(*arguments)
    for cache, mine, old in zip(arguments[2:4], found, before, strict=True):
        assert torch.equal(mine, whole(cache))
        written = arguments[4] >= 0
        assert torch.equal(mine, old) == (not written.any())
    return 1


def slots_of(tokens, page, generator):
    return torch.randperm(3 * tokens + 2 * page, generator=generator)[:tokens].tolist()


def shapes():
    count, generator = 0, torch.Generator().manual_seed(1)
    for (heads, dim, page), dtype in itertools.product(SHAPES, (torch.float16, FP8)):
        for tokens, padding in ((1, 0), (5, 3)):
            slots = slots_of(tokens, page, generator)
            slots[tokens // 2] = -1 if tokens > 1 else slots[0]
            scales = (1, heads)[count % 2] if dtype == FP8 else None
            layout = ("vllm", "apart")[tokens > 1]
            arguments = drawn(
                tokens + padding, heads, dim, page, dtype, slots, layout=layout, scales=scales
            )
            count += check(arguments)
    return count


def padding():
    """Nothing but padding, rows behind the slots that are no numbers, no scales, no tokens."""
    count = check(drawn(3, 2, 64, 16, torch.float16, [-1, -1, -(2**40)]))
    arguments = drawn(6, 2, 64, 16, FP8, [5, -1, 0])
    for rows in arguments[:2]:
        rows[3:] = float("nan")
    count += check(arguments)
    nothing = drawn(4, 2, 64, 16, torch.float16, [-1])
    nothing[4] = nothing[4][:0]
    return count + check(nothing)


def large_slots():
    """Slots beyond 2**31 and 2**33: pages without memory of their own lie on top of each other."""
    k, v = torch.randn(2, 2, 1, 16).half().unbind()
    cache = torch.zeros(2, 16, 1, 16).half()
    pages = [each.as_strided((2**30, 16, 1, 16), (0, 16, 16, 1)) for each in cache]
    slots = torch.tensor([(2**30 - 1) * 16 + 3, 2**33 + 9])
    cw.launch(k, v, *pages, slots, None, None)
    assert torch.equal(cache[0, [3, 9]], k)
    assert torch.equal(cache[1, [3, 9]], v)
    assert cache.count_nonzero() == 4 * 16
    return 1


def codes():
    """Every fp16 and bf16, and drawn fp32 with their neighbours, against torch's conversion."""
    import triton
    import triton.language as tl

    @triton.jit
    def convert(x_ptr, out_ptr, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, e4m3_codes(tl.load(x_ptr + offs)))

    patterns = torch.arange(65536).to(torch.int16)
    drawn_bits = torch.randint(-(2**31), 2**31, (65536,)).to(torch.int32).view(torch.float32)
    ties = torch.arange(-256, 256).float()[:, None] / 16 * 2.0 ** torch.arange(-12, 10)
    ties = ties.flatten()[: 65536 // 8]
    ties = torch.cat([ties, ties.nextafter(torch.tensor(1e9)), ties.nextafter(torch.tensor(-1e9))])
    sets = [patterns.view(torch.float16).float(), patterns.view(torch.bfloat16).float()]
    for x in (*sets, drawn_bits, ties):
        out = torch.zeros(x.numel(), dtype=torch.uint8)
        block = 8192
        x = torch.nn.functional.pad(x, (0, -x.numel() % block))
        out = torch.zeros(x.numel(), dtype=torch.uint8)
        convert[(x.numel() // block,)](x, out, block)
        wanted = x.clamp(-448, 448).to(FP8).view(torch.uint8)
        wanted[x.isnan()] = 0x7F
        assert torch.equal(out, wanted)
    return 4


def main(names):
    torch.set_num_threads(2)
    for name in names:
        print(name, globals()[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
