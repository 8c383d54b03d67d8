"""The Gluon kernel of the norms' backward pass that holds rows in shared memory.

RMSNorm ± residual and LayerNorm; maths are those of
:mod:`.backward_kernel`. A persistent program walks over its rows. Shared
memory holds the row under way and the next: `cp.async` asks for the row after that while the places
of this one are given up chunk by chunk. Each row is read twice from there, for its sums and for its
gradients, so that registers hold little more than the sums of dw and db.

A thread reads only what it copied; a chunk is [THREADS, 8], 16 bytes a thread in 16-bit types.
Gluon is Triton with layouts and shared memory written out. The interpreter does not run it; tests
run its arithmetic on NumPy (:mod:`emulator.rows`), and a GPU the rest.
"""

# ruff: noqa: RUF005, C901 (Triton's front end adds tuples and does not unpack them; a kernel is one
# function: its branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,var-annotated,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from taut_kernels.hopper import copy


@gluon.jit
def _chunk(tensor, chunk: gl.constexpr, row, offs):
    """Return the pointers of a row's chunk; ``tensor`` is pointer and stride."""
    WIDTH: gl.constexpr = offs.shape[0] * offs.shape[1]
    return tensor[0] + row.to(gl.int64) * tensor[1] + chunk * WIDTH + offs


@gluon.jit
def _inside(piece, pieces, chunk: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr):
    """Say which pieces of a chunk a row of so many pieces has; of whole chunks, all or none."""
    return piece < (pieces if (chunk + 1) * WIDTH <= N else pieces - chunk * (WIDTH // 8))


@gluon.jit
def _ask(
    tensors, rings, slot, row, M, at, FIRST: gl.constexpr, LAST: gl.constexpr, N: gl.constexpr
):
    """Ask for chunks FIRST to LAST - 1 of a row; what lies outside the tensor becomes 0."""
    piece, offs = at
    WIDTH: gl.constexpr = offs.shape[0] * offs.shape[1]
    CHUNKS: gl.constexpr = (N + WIDTH - 1) // WIDTH
    pieces = gl.where(row < M, N // 8, 0)
    for chunk in gl.static_range(FIRST, LAST):
        mask = _inside(piece, pieces, chunk, N, WIDTH)
        for i in gl.static_range(len(tensors)):
            place = rings[i].index(slot * CHUNKS + chunk)
            copy(place, _chunk(tensors[i], chunk, row, offs), mask=mask, cache_modifier=".cg")


@gluon.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _weight(weights, chunk, HELD: gl.constexpr, L: gl.constexpr):
    """Return a chunk of the weight, from registers or shared memory."""
    weight = weights[chunk] if HELD else weights.index(chunk).load(L)
    return weight.to(gl.float32)


@gluon.jit
def _add_chunk(
    rings, weights, first, chunk, mean, g_sums, gx_sums, HELD: gl.constexpr, L: gl.constexpr
):
    """Take a chunk into the sums of each thread."""
    x = rings[0].index(first + chunk).load(L).to(gl.float32)
    g = rings[1].index(first + chunk).load(L).to(gl.float32)
    if weights is not None:
        g = g * _weight(weights, chunk, HELD, L)
    if mean is None:
        gx_sums += g * x
    else:
        gx_sums += g * (x - mean)
        g_sums += g
    return g_sums, gx_sums


@gluon.jit
def _sums(
    rings, weights, first, mean, THREADS: gl.constexpr, CHUNKS: gl.constexpr, HELD: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """Return a row's Σ g and Σ g · (x − μ); the first is 0 without a mean."""
    g_sums = gl.full((THREADS, 8), 0.0, gl.float32, L)
    gx_sums = gl.full((THREADS, 8), 0.0, gl.float32, L)
    if HELD:
        for chunk in gl.static_range(CHUNKS):
            g_sums, gx_sums = _add_chunk(
                rings, weights, first, chunk, mean, g_sums, gx_sums, HELD, L
            )
    else:
        for chunk in range(CHUNKS):
            g_sums, gx_sums = _add_chunk(
                rings, weights, first, chunk, mean, g_sums, gx_sums, HELD, L
            )
    g_sum, gx_sum = 0.0, 0.0
    if mean is None:
        gx_sum = gl.sum(gl.sum(gx_sums, 1), 0)
    else:
        # Both at once: half of the shuffles' latency, and half of the barriers.
        g_sum, gx_sum = gl.reduce((gl.sum(g_sums, 1), gl.sum(gx_sums, 1)), 0, _add_pairs)
    return g_sum, gx_sum


@gluon.jit
def _weights(weight_ptr, piece, offs, CHUNKS: gl.constexpr, HELD: gl.constexpr, N: gl.constexpr):
    """Load the weight into registers, or ask for it in shared memory; None without one."""
    THREADS: gl.constexpr = offs.shape[0]
    WIDTH: gl.constexpr = 8 * THREADS
    weights = None
    if weight_ptr is not None:
        if HELD:
            weights = ()
            for chunk in gl.static_range(CHUNKS):
                mask = _inside(piece, N // 8, chunk, N, WIDTH)
                weight = gl.load(weight_ptr + chunk * WIDTH + offs, mask=mask, other=0.0)
                weights = weights + (weight,)
        else:
            SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            kind: gl.constexpr = weight_ptr.dtype.element_ty
            weights = gl.allocate_shared_memory(kind, [CHUNKS, THREADS, 8], SHARED)
            for chunk in gl.static_range(CHUNKS):
                mask = _inside(piece, N // 8, chunk, N, WIDTH)
                copy(weights.index(chunk), weight_ptr + chunk * WIDTH + offs, mask=mask)
    return weights


@gluon.jit(do_not_specialize=["M"])
def norm_backward_ring_kernel(
    x_ptr,  # [M, N], what was normalised; rows 16-byte aligned
    dy_ptr,  # [M, N], as x
    added_ptr,  # [M, N], as x, added to dx: the gradient of x + residual; or None
    weight_ptr,  # [N] or None
    mean_ptr,  # [M] fp32, or None (RMSNorm)
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N], contiguous
    dw_ptr,  # [programs, N] fp32, or None
    db_ptr,  # [programs, N] fp32, or None
    M,
    stride_xm,
    stride_dm,
    stride_am,
    N: gl.constexpr,  # a multiple of 8
    LATE: gl.constexpr,  # last chunks of a row that are asked for when the next row begins
    HELD: gl.constexpr,  # the weight in registers, not in shared memory
    WARPS: gl.constexpr,
):
    """Each program owns every G-th row, and sums its part of dw and db in registers."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    THREADS: gl.constexpr = 32 * WARPS
    WIDTH: gl.constexpr = 8 * THREADS
    CHUNKS: gl.constexpr = (N + WIDTH - 1) // WIDTH
    CENTRED: gl.constexpr = mean_ptr is not None
    piece = gl.expand_dims(gl.arange(0, THREADS, gl.SliceLayout(1, L)), 1)
    offs = piece * 8 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, L)), 0)
    at = (piece, offs)
    pid, programs = gl.program_id(0), gl.num_programs(0)

    element: gl.constexpr = x_ptr.dtype.element_ty
    RING: gl.constexpr = [2 * CHUNKS, THREADS, 8]
    tensors = ((x_ptr, stride_xm), (dy_ptr, stride_dm))
    rings = (
        gl.allocate_shared_memory(element, RING, SHARED),
        gl.allocate_shared_memory(element, RING, SHARED),
    )
    if added_ptr is not None:
        tensors = tensors + ((added_ptr, stride_am),)
        rings = rings + (gl.allocate_shared_memory(element, RING, SHARED),)
    weights = _weights(weight_ptr, piece, offs, CHUNKS, HELD, N)
    # A row comes in two groups, early chunks and late ones.
    EARLY: gl.constexpr = CHUNKS - LATE
    _ask(tensors, rings, 0, pid, M, at, 0, EARLY, N)
    async_copy.commit_group()
    _ask(tensors, rings, 0, pid, M, at, EARLY, CHUNKS, N)
    async_copy.commit_group()
    _ask(tensors, rings, 1, pid + programs, M, at, 0, EARLY, N)
    async_copy.commit_group()

    dws = ()
    for _ in gl.static_range(CHUNKS):
        dws = dws + (gl.full((THREADS, 8), 0.0, gl.float32, L),)
    dbs = dws
    slot = gl.to_tensor(0)
    mean, next_mean = None, None
    if CENTRED:
        next_mean = gl.load(mean_ptr + pid)
        mean = next_mean
    for row in range(pid, M, programs):
        # Used after the row's sums; the mean, which they take, is on its way a row earlier.
        rstd = gl.load(rstd_ptr + row)
        if CENTRED:
            mean = next_mean
            next_mean = gl.load(mean_ptr + gl.minimum(row + programs, M - 1))
        async_copy.wait_group(1)
        # Not with the early chunks: LayerNorm 230.8 µs with none late, 210.4 with two of four
        # (docs/findings/norm-backward-ring.md). Rows in shared memory made no difference to that:
        # when a chunk is asked for counts, not how many are on their way. Why is not known.
        _ask(tensors, rings, 1 - slot, row + programs, M, at, EARLY, CHUNKS, N)
        async_copy.commit_group()
        first = slot * CHUNKS
        g_sum, gx_sum = _sums(rings, weights, first, mean, THREADS, CHUNKS, HELD, L)
        gx_mean = gx_sum * rstd / N
        new_dws = ()
        new_dbs = ()
        ahead = row + 2 * programs
        for chunk in gl.static_range(CHUNKS):
            x_hat = rings[0].index(first + chunk).load(L).to(gl.float32)
            if CENTRED:
                x_hat -= mean
            x_hat *= rstd
            dy = rings[1].index(first + chunk).load(L).to(gl.float32)
            new_dws = new_dws + (dws[chunk] + dy * x_hat,)
            if db_ptr is not None:
                new_dbs = new_dbs + (dbs[chunk] + dy,)
            g = dy
            if weight_ptr is not None:
                g = g * _weight(weights, chunk, HELD, L)
            # Differences first: what is nearly 0 (rows of one column) keeps its digits.
            if CENTRED:
                g = g - g_sum / N
            dx = (g - x_hat * gx_mean) * rstd
            if added_ptr is not None:
                dx += rings[2].index(first + chunk).load(L).to(gl.float32)
            to = _chunk((dx_ptr, N), chunk, row, offs)
            mask = _inside(piece, N // 8, chunk, N, WIDTH)
            gl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if chunk < EARLY:
                _ask(tensors, rings, slot, ahead, M, at, chunk, chunk + 1, N)
        async_copy.commit_group()
        if dw_ptr is not None:
            dws = new_dws
        if db_ptr is not None:
            dbs = new_dbs
        slot = 1 - slot
    async_copy.wait_group(0)
    for chunk in gl.static_range(CHUNKS):
        mask = _inside(piece, N // 8, chunk, N, WIDTH)
        if dw_ptr is not None:
            gl.store(_chunk((dw_ptr, N), chunk, pid, offs), dws[chunk], mask=mask)
        if db_ptr is not None:
            gl.store(_chunk((db_ptr, N), chunk, pid, offs), dbs[chunk], mask=mask)
