"""What a group of warps does with its sums of 8-bit products: scales, zero points, bias, the store.

See :mod:`.hopper_kernel`.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

from taut_kernels.hopper import barrier, store_block


@gluon.jit
def vectors(
    pointers, strides, first_m, first_n, M, N,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Load what scales a group's sums: both scales, adjustment, zero points, bias; 0 if absent.

    Those of columns are one or two values a thread; :func:`scaled` spreads them.
    """
    x_scale_ptr, w_scale_ptr, azp_adj_ptr, azp_ptr, bias_ptr = pointers
    LINE: gl.constexpr = gl.BlockedLayout([2 if COLUMNS == 256 else 1], [32], [4], [0])
    offs_m = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    offs_n = first_n + gl.arange(0, COLUMNS, LINE)
    mask_m, mask_n = offs_m < M, offs_n < N
    x_scale = gl.load(x_scale_ptr + offs_m * strides[0], mask=mask_m, other=0.0)
    w_scale = gl.load(w_scale_ptr + offs_n * strides[1], mask=mask_n, other=0.0)
    azp_adj, azp, bias = 0, 0, 0
    if azp_adj_ptr is not None:
        azp_adj = gl.load(azp_adj_ptr + offs_n, mask=mask_n, other=0)
    if azp_ptr is not None:
        azp = gl.load(azp_ptr + offs_m, mask=mask_m, other=0)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + offs_n, mask=mask_n, other=0.0)
    return x_scale, w_scale, azp_adj, azp, bias


@gluon.jit
def _spread(vector, SUMS: gl.constexpr, AXIS: gl.constexpr):
    """Spread one value a row (AXIS 0) or a column over sums; columns' lie a value a thread."""
    if AXIS == 0:
        found = gl.expand_dims(vector, 1)
    else:
        found = gl.expand_dims(gl.convert_layout(vector, gl.SliceLayout(0, SUMS)), 0)
    return found


@gluon.jit
def scaled(acc, pointers, found, SUMS: gl.constexpr, TOKENS: gl.constexpr = 0):
    """Apply zero points, both scales and the bias to sums; the result is fp32.

    TOKENS is the axis of tokens, the other one that of features.
    """
    x_scale, w_scale, azp_adj, azp, bias = found
    FEATURES: gl.constexpr = 1 - TOKENS
    if pointers[2] is not None:
        adjustment = _spread(azp_adj, SUMS, FEATURES)
        if pointers[3] is not None:
            adjustment = adjustment * _spread(azp, SUMS, TOKENS)
        acc = acc - adjustment
    result = acc.to(gl.float32) * _spread(w_scale, SUMS, FEATURES) * _spread(x_scale, SUMS, TOKENS)
    if pointers[4] is not None:
        result += _spread(bias.to(gl.float32), SUMS, FEATURES)
    return result


@gluon.jit
def with_bias(sums, bias_ptr, first_n, N, COLUMNS: gl.constexpr, SUMS: gl.constexpr):
    """Add the bias of some features, if there is one, to sums [rows, COLUMNS] that are scaled."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if bias_ptr is not None:
        offs_n = first_n + gl.arange(0, COLUMNS, LINE)
        bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)
        sums += _spread(bias, SUMS, 1)
    return sums


@gluon.jit
def _halves(values, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the left and the right columns of some rows: registers get other names, no more."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    left, right = gl.split(gl.permute(gl.reshape(values, [ROWS, 2, COLUMNS]), [0, 2, 1]))
    return gl.convert_layout(left, HALF), gl.convert_layout(right, HALF)


@gluon.jit
def _store_part(
    y_desc, y, values, first_m, column,
    PART: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Store the ``PART``-th columns of a group's rows by one of its places in turn."""
    PLACES: gl.constexpr = y.shape[0] // GROUPS
    room = y.index(GROUP * PLACES + PART % PLACES)
    # The place's last block has been read by TMA; all warps have to know.
    tma.store_wait(PLACES - 1)
    barrier()
    room.store(values)
    hopper.fence_async_shared()
    barrier()
    store_block(y_desc, [first_m, column], room)


@gluon.jit
def _store_four(
    y_desc, y, left, right, first_m, first_n,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Store both halves of a group's rows, each in two parts."""
    WIDTH: gl.constexpr = COLUMNS // 4
    first, second = _halves(left, ROWS, WIDTH)
    third, fourth = _halves(right, ROWS, WIDTH)
    _store_part(y_desc, y, first, first_m, first_n, 0, GROUP, GROUPS)
    _store_part(y_desc, y, second, first_m, first_n + WIDTH, 1, GROUP, GROUPS)
    _store_part(y_desc, y, third, first_m, first_n + 2 * WIDTH, 2, GROUP, GROUPS)
    _store_part(y_desc, y, fourth, first_m, first_n + 3 * WIDTH, 3, GROUP, GROUPS)


@gluon.jit
def store(
    y_desc, y, values, first_m, first_n,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, FIRST: gl.constexpr = 0,
    GROUPS: gl.constexpr = 2,
):  # fmt: skip
    """Store a group's rows in one, two or four parts; the last are under way after it.

    A tile's parts are counted from FIRST on. Each of the GROUPS has as many places as divide them,
    so that the next tile's parts find theirs in turn.
    """
    PARTS: gl.constexpr = COLUMNS // y.shape[2]
    if PARTS == 1:
        _store_part(y_desc, y, values, first_m, first_n, FIRST, GROUP, GROUPS)
    else:
        left, right = _halves(values, ROWS, COLUMNS // 2)
        if PARTS == 2:
            _store_part(y_desc, y, left, first_m, first_n, FIRST, GROUP, GROUPS)
            _store_part(y_desc, y, right, first_m, first_n + COLUMNS // 2, FIRST + 1, GROUP, GROUPS)
        else:
            _store_four(y_desc, y, left, right, first_m, first_n, ROWS, COLUMNS, GROUP, GROUPS)
