"""Run by test_fused_backward.py and its neighbours with TRITON_INTERPRET=1: jit kernels on the CPU.

In its own process, since Triton reads the variable when it is imported. Only fp16 and fp32: bf16
arithmetic is silently garbage there.
"""

import sys
from unittest import mock

import torch

from taut_bench import testing
from taut_kernels.activation import silu_mul, silu_mul_launch, swiglu_launch
from taut_kernels.launch import launcher
from taut_kernels.loss import softmax
from taut_kernels.norm import layer_norm, rms_norm_launch, rms_norm_train
from taut_kernels.norm import train_launch as norm_launch
from taut_kernels.rope import rope_launch
from taut_kernels.rope import train as rope_train
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.rowwise.training_tiles import TrainingTile

DTYPES = (torch.float16, torch.float32)
EPSILON = 1e-5


def draw(M, N, dtype, seed=0, pad=0):
    generator = torch.Generator().manual_seed(seed + M + N)
    return torch.randn(M, N + pad, generator=generator).to(dtype)[:, :N]


def double(*tensors):
    return tuple(None if tensor is None else tensor.double() for tensor in tensors)


def within(actual, gold, reference):
    for one, two, three in zip(actual, gold, reference, strict=True):
        testing.assert_within_budget(one, two, three)


# M, N, tile, backward tile: several short rows a program, one column, whole rows in steps, a
# partial last step, exponentials computed twice, rows that are read twice.
SOFTMAXES = [
    (5, 100, TrainingTile(4, 128, 1), TrainingTile(2, 128, 1)),
    (9, 1, TrainingTile(4, 8, 1), TrainingTile(4, 8, 1)),
    (3, 1000, TrainingTile(1, 256, 4), TrainingTile(1, 256, 4)),
    (2, 4096, TrainingTile(1, 1024, 4, again=True), TrainingTile(1, 4096, 8)),
    (3, 1000, TrainingTile(1, 256, 4, stages=2), TrainingTile(1, 256, 4, stages=2)),
    (2, 50257, None, None),
]


def softmax_shapes():
    for dtype in DTYPES:
        for M, N, tile, backward in SOFTMAXES:
            x, dy = draw(M, N, dtype, pad=3) * 4, draw(M, N, dtype, 1, pad=5)
            y, gold = softmax.launch(x, tile), softmax.softmax_ref(x.double())
            testing.assert_within_budget(y, gold, softmax.softmax_ref(x))
            dx = softmax.launch_backward(dy, y, backward)
            gold = softmax.softmax_backward_ref(*double(dy, y))
            testing.assert_within_budget(dx, gold, softmax.softmax_backward_ref(dy, y))
    return len(DTYPES) * len(SOFTMAXES)


def softmax_extreme_values():
    infinity, nan = float("inf"), float("nan")
    largest = torch.finfo(torch.float32).max
    rows = {
        "no value": [-infinity] * 40,
        "an infinity": [1.0, infinity] + [0.0] * 38,
        "a NaN": [nan] + [0.0] * 39,
        "some of none": [-infinity, 2.0, 1.0] + [-infinity] * 37,
        "the largest": [largest, -largest] + [largest] * 38,
        "far below zero": [-largest] * 40,
        "one": [1e4] + [-1e4] * 39,
    }
    x = torch.tensor(list(rows.values()))
    expected = torch.softmax(x, dim=1)
    tiles = (TrainingTile(2, 64, 1), TrainingTile(1, 16, 1), TrainingTile(1, 16, 1, stages=2))
    for tile in (*tiles, TrainingTile(1, 16, 1, again=True)):
        y = softmax.launch(x, tile)
        assert torch.equal(y.isnan(), expected.isnan()), (tile, y, expected)
        assert torch.allclose(y, expected, rtol=1e-5, atol=1e-30, equal_nan=True), tile
    return len(rows)


def backward_of(op, operands, tile=None):
    dy, dt, x, weight, mean, rstd = operands
    dtype = x.dtype if weight is None else weight.dtype
    wanted = None if weight is None else dtype
    wants = (wanted, wanted if op is layer_norm else None)
    return norm_launch.backward(dy, dt, x, weight, mean, rstd, wants, tile)


def reference_of(op, operands):
    dy, dt, x, weight, mean, rstd = operands
    has_weight = weight is not None
    if op is layer_norm:
        arguments = (dy, x, weight, mean, rstd, has_weight, has_weight)
        return layer_norm.layer_norm_backward_ref(*arguments)
    return rms_norm_train.rms_norm_backward_ref(dy, dt, x, weight, rstd, has_weight)


# M, N, forward tile, backward tile: None is the rule's; beyond LIMIT columns in two walks.
NORMS = [
    (7, 100, FusedTile(4, 128, 1), TrainingTile(2, 128, 1, per_sm=1)),
    (9, 1, FusedTile(4, 8, 1), TrainingTile(4, 8, 1, per_sm=2)),
    (5, 1000, FusedTile(1, 256, 4), TrainingTile(1, 1024, 4, stages=2, per_sm=1)),
    (5, 1000, FusedTile(1, 1024, 4), TrainingTile(1, 256, 4, per_sm=1, again=True)),
    (5, 600, None, TrainingTile(1, 256, 4, per_sm=1, again=True)),
    (3, 4096, None, None),
    (3, 5000, None, None),
]
LIMIT = 4096


@mock.patch.object(norm_launch, "RESIDENT_LIMIT", LIMIT)
@mock.patch.object(training_tiles, "LAYER_NORM_BACKWARD_LIMIT", LIMIT)
def norm_shapes():
    count = 0
    for op in (layer_norm, rms_norm_train):
        for dtype in DTYPES:
            for M, N, tile, backward in NORMS:
                for with_weight in (True, False):
                    check_norm(op, dtype, M, N, tile, backward, with_weight)
                    count += 1
    return count


def check_norm(op, dtype, M, N, tile, backward, with_weight):
    centred = op is layer_norm
    x, dy, dt = draw(M, N, dtype, pad=3) + 0.5, draw(M, N, dtype, 1, 5), draw(M, N, dtype, 2)
    weight, bias = (draw(1, N, dtype, seed)[0] + 1 if with_weight else None for seed in (3, 4))
    residual = None if centred or not with_weight else draw(M, N, dtype, 5)
    y, total, mean, rstd = norm_launch.forward(
        x, residual, weight, bias if centred else None, EPSILON, centred=centred, tile=tile
    )
    if centred:
        reference = layer_norm.layer_norm_ref(x, weight, bias, EPSILON)
        gold = layer_norm.layer_norm_ref(*double(x, weight, bias), EPSILON)
        within((y, mean, rstd), gold, reference)
    else:
        arguments = (x, weight, residual)
        reference = rms_norm_train.rms_norm_train_ref(*arguments, EPSILON)
        gold = rms_norm_train.rms_norm_train_ref(*double(*arguments), EPSILON)
        within((y, rstd), gold[::2], reference[::2])
        if residual is not None:
            assert torch.equal(total, reference[1])
            x = total
    operands = (dy, None if centred or residual is None else dt, x, weight, mean, rstd)
    found = [one for one in backward_of(op, operands, backward) if one is not None]
    reference = [one for one in reference_of(op, operands) if one.numel()]
    gold = [one for one in reference_of(op, double(*operands)) if one.numel()]
    within(found, gold, reference)


def norms_of_other_parameter_types():
    x, dy = draw(5, 200, torch.float16), draw(5, 200, torch.float16, 1)
    weight = draw(1, 200, torch.float32, 2)[0]
    for op, centred in ((layer_norm, True), (rms_norm_train, False)):
        bias = weight if centred else None
        y, _, mean, rstd = norm_launch.forward(x, None, weight, bias, EPSILON, centred=centred)
        assert y.dtype is torch.float16
        operands = (dy, None, x, weight, mean, rstd)
        gradients = backward_of(op, operands)
        assert gradients[1].dtype is torch.float32
        references = reference_of(op, operands)
        gold = reference_of(op, double(*operands))
        for found, wanted, reference in zip(gradients, gold, references, strict=False):
            testing.assert_within_budget(found, wanted, reference)
    return 2


def norm_adversarial_values():
    """Statistics of rows that are hard: constant, huge, tiny, far from zero, an outlier."""
    base = draw(4, 256, torch.float32)
    edits = (
        lambda x: x.zero_(),
        lambda x: x.fill_(3.0),
        lambda x: x.mul_(1e18),
        lambda x: x.mul_(1e-20),
        lambda x: x.add_(4096.0),
        lambda x: x[:, 7].fill_(1e6),
    )
    tile = TrainingTile(1, 64, 4, per_sm=1)
    dy = draw(4, 256, torch.float32, 1)
    for op, centred in ((layer_norm, True), (rms_norm_train, False)):
        for edit in edits:
            edit(x := base.clone())
            y, _, mean, rstd = norm_launch.forward(x, None, None, None, EPSILON, centred=centred)
            forward = (
                (lambda x: layer_norm.layer_norm_ref(x, None, None, EPSILON)[0])
                if centred
                else (lambda x: rms_norm_train.rms_norm_train_ref(x, None, None, EPSILON)[0])
            )
            testing.assert_within_budget(y, forward(x.double()), forward(x))
            operands = (dy, None, x, None, mean, rstd)
            dx = backward_of(op, operands, tile)[0]
            gold, reference = reference_of(op, double(*operands))[0], reference_of(op, operands)[0]
            testing.assert_within_budget(dx, gold, reference)
    return 2 * len(edits)


def norm_gradients_are_the_same_bits_every_time():
    x, dy = draw(37, 300, torch.float16), draw(37, 300, torch.float16, 1)
    weight = draw(1, 300, torch.float16, 2)[0]
    _, _, mean, rstd = norm_launch.forward(x, None, weight, weight, EPSILON, centred=True)
    operands = (dy, None, x, weight, mean, rstd)
    first = backward_of(layer_norm, operands)
    for _ in range(2):
        for one, two in zip(first, backward_of(layer_norm, operands), strict=True):
            assert torch.equal(one, two)
    return 3


def training_forward_has_the_bits_of_serving():
    tile = FusedTile(1, 128, 4)
    x, residual = draw(5, 500, torch.float16), draw(5, 500, torch.float16, 1)
    weight = draw(1, 500, torch.float16, 2)[0]
    for other in (None, residual):
        y, total, _, _ = norm_launch.forward(
            x, other, weight, None, EPSILON, centred=False, tile=tile
        )
        served, updated = torch.empty_like(y), None if other is None else other.clone()
        rms_norm_launch.launch(tile, "same", x, weight, updated, EPSILON, served, None)
        assert torch.equal(y, served)
        assert other is None or torch.equal(total, updated)
    gate, up = draw(5, 500, torch.float16, 3), draw(5, 500, torch.float16, 4)
    for form in FORMS:
        y = swiglu_launch.launch(gate, up, *form)
        served = torch.empty_like(y)
        silu_mul_launch.launch(tile, "same", torch.cat((gate, up), 1), *form, False, served, None)
        assert torch.equal(y, served)
    q, k, positions, cache = heads(9, 4, 2, 64, 64, torch.float16)
    turned = rope_train.launch(positions, q, k, cache, True, False)
    rope_launch.launch(FusedTile(1, 4, 1), positions, q, k, cache, True)
    assert torch.equal(turned[0], q)
    assert torch.equal(turned[1], k)
    return 2 + len(FORMS) + 1


FORMS = [(1.0, 0.0, None), (1.702, 1.0, 1.5), (1.5, 0.5, None)]
# M, N, tile
ACTIVATIONS = [
    (5, 100, TrainingTile(2, 128, 1)),
    (3, 1000, TrainingTile(1, 256, 4)),
    (3, 512, None),
    (4, 1, TrainingTile(2, 8, 1)),
]


def activation_shapes():
    count = 0
    for dtype in DTYPES:
        for M, N, tile in ACTIVATIONS:
            check_silu(dtype, M, N, tile)
            for form in FORMS:
                check_swiglu(dtype, M, N, form, tile)
                count += 1
    return count


def check_silu(dtype, M, N, tile):
    x, dy = draw(M, N, dtype, pad=3) * 3, draw(M, N, dtype, 1, 5)
    y = swiglu_launch.launch(x, None, 1.0, 0.0, None, tile)
    gold = swiglu_launch.silu_ref(x.double())
    testing.assert_within_budget(y, gold, swiglu_launch.silu_ref(x))
    dx = launcher.empty(x.shape, dtype=dtype, device=x.device)
    swiglu_launch.launch_backward(dy, x, None, dx, None, (1.0, 0.0, None), tile=tile)
    gold = swiglu_launch.silu_backward_ref(*double(dy, x))
    testing.assert_within_budget(dx, gold, swiglu_launch.silu_backward_ref(dy, x))


def check_swiglu(dtype, M, N, form, tile):
    x, dy = draw(M, 2 * N, dtype, pad=2) * 2, draw(M, N, dtype, 1, 5)
    gate, up = swiglu_launch.halves(x, False)
    y = swiglu_launch.launch(gate, up, *form, tile)
    gold = swiglu_launch.swiglu_ref(*double(gate, up), *form)
    testing.assert_within_budget(y, gold, swiglu_launch.swiglu_ref(gate, up, *form))
    found = swiglu_launch.launch_swiglu_backward(dy, gate, up, *form)
    gold = swiglu_launch.swiglu_backward_ref(*double(dy, gate, up), *form)
    within(found, gold, swiglu_launch.swiglu_backward_ref(dy, gate, up, *form))
    for interleaved in (False, True):
        y = swiglu_launch.launch_packed(x, *form, interleaved)
        reference = silu_mul.silu_mul_ref(x, *form, interleaved)
        gold = silu_mul.silu_mul_ref(x.double(), *form, interleaved)
        testing.assert_within_budget(y, gold, reference)
        arguments = (*form, interleaved)
        dx = swiglu_launch.launch_swiglu_packed_backward(dy, x, *arguments)
        reference = swiglu_launch.swiglu_packed_backward_ref(dy, x, *arguments)
        gold = swiglu_launch.swiglu_packed_backward_ref(*double(dy, x), *arguments)
        testing.assert_within_budget(dx, gold, reference)


def activation_extreme_values():
    """Large magnitudes saturate; what the clamp changed, its edge excepted, has no gradient."""
    x = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 88.0, 1e30, 7.0, 7.5]])
    ones = torch.ones_like(x)
    dx = torch.empty_like(x)
    swiglu_launch.launch_backward(ones, x, None, dx, None, (1.0, 0.0, None))
    assert torch.allclose(dx, torch.tensor([[0.0, 0, 0.5, 0.5, 1, 1, 1.0054, 1.0036]]), atol=1e-3)
    d_gate, d_up = swiglu_launch.launch_swiglu_backward(ones, x, x, 1.702, 1.0, 7.0)
    gold = swiglu_launch.swiglu_backward_ref(*double(ones, x, x), 1.702, 1.0, 7.0)
    assert torch.allclose(d_gate.double(), gold[0], atol=1e-4)
    assert torch.allclose(d_up.double(), gold[1], atol=1e-4)
    assert (d_gate[0, 5], d_gate[0, 7], d_up[0, 0], d_up[0, 7]) == (0, 0, 0, 0)
    assert d_gate[0, 6] != 0
    assert d_up[0, 6] != 0
    return 8


def heads(T, Hq, Hk, D, R, dtype):
    generator = torch.Generator().manual_seed(T + D)
    q = torch.randn(T, Hq + Hk + 1, D + 8, generator=generator).to(dtype)[:, :Hq, :D]
    k = torch.randn(T, Hk, D, generator=generator).to(dtype) if Hk else None
    angles = torch.rand(20, R // 2, generator=generator) * 6.28
    cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    return q, k, torch.randint(0, 20, (T,), generator=generator), cache


ROTATIONS = [(3, 4, 2, 64, 64), (5, 7, 1, 96, 40), (9, 8, 0, 128, 128), (1, 20, 8, 32, 6)]


def rotation_shapes():
    count = 0
    for dtype in DTYPES:
        for T, Hq, Hk, D, R in ROTATIONS:
            q, k, positions, cache = heads(T, Hq, Hk, D, R, dtype)
            for neox in (True, False):
                for inverse in (False, True):
                    found = rope_train.launch(positions, q, k, cache, neox, inverse)
                    arguments = (neox, inverse)
                    reference = rope_train.rope_train_ref(positions, q, k, cache, *arguments)
                    wide = (positions, *double(q, k, cache))
                    within(found, rope_train.rope_train_ref(*wide, *arguments), reference)
                    count += 1
    return count


def empty_batches():
    x = torch.empty(0, 64, dtype=torch.float16)
    weight = torch.ones(64, dtype=torch.float16)
    assert softmax.launch(x).shape == softmax.launch_backward(x, x).shape == (0, 64)
    for op, centred in ((layer_norm, True), (rms_norm_train, False)):
        y, _, mean, rstd = norm_launch.forward(x, None, weight, None, EPSILON, centred=centred)
        dx, dw, _ = backward_of(op, (x, None, x, weight, mean, rstd))
        assert y.shape == dx.shape == (0, 64)
        assert torch.equal(dw, torch.zeros(64, dtype=torch.float16))
    assert swiglu_launch.launch_swiglu_backward(x, x, x, 1.0, 0.0, None)[1].shape == (0, 64)
    q = torch.empty(0, 2, 64, dtype=torch.float16)
    positions, cache = torch.empty(0, dtype=torch.int64), torch.ones(4, 64, dtype=torch.float16)
    assert rope_train.launch(positions, q, q, cache, True, False)[0].shape == (0, 2, 64)
    return 5


def programs_outnumber_rows():
    """A persistent grid never has more programs than pieces: each would write a part."""
    tile = TrainingTile(4, 64, 1, per_sm=32)
    assert training_tiles.programs(tile, 2, torch.device("cpu")) == 2
    x, dy, weight = (draw(M, 64, torch.float32, M) for M in (5, 5, 1))
    _, _, _, rstd = norm_launch.forward(x, None, weight[0], None, EPSILON, centred=False)
    operands = (dy, None, x, weight[0], None, rstd)
    found = backward_of(rms_norm_train, operands, tile)[:2]
    gold, reference = (reference_of(rms_norm_train, o) for o in (double(*operands), operands))
    within(found, gold, reference)
    return 1


def sums_of_two_gradients():
    parts = [draw(140, 100, torch.float32, seed) for seed in range(2)]
    kinds = (torch.float16, torch.float32)
    count = 0
    for one in (kinds[0], None):
        for two in (kinds[1], None):
            found = norm_launch.column_sums(parts, (one, two))
            for sums, part, dtype in zip(found, parts, (one, two), strict=True):
                assert (sums is None) == (dtype is None)
                if sums is not None:
                    gold = part.double().sum(dim=0)
                    testing.assert_within_budget(sums, gold, part.sum(dim=0).to(dtype))
                    count += 1
    assert norm_launch.column_sums([None, parts[1]], kinds)[0] is None
    return count


def main(names):
    with mock.patch.object(launcher, "empty", testing._empty_nan):
        for name in names:
            print(name, globals()[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
