"""Run by test_rms_norm.py and its neighbours with TRITON_INTERPRET=1: jit kernels on CPU tensors.

In its own process, since Triton reads the variable when it is imported. Only fp16 and fp32 (bf16
arithmetic is silently garbage there), and fp8 outputs as fp32 that torch rounds afterwards: the
interpreter's own conversion to fp8 loses carries.
"""

import sys
from unittest import mock

import torch

from taut_bench import testing
from taut_kernels.activation import silu_mul, silu_mul_launch
from taut_kernels.launch import launcher
from taut_kernels.norm import rms_norm, rms_norm_launch
from taut_kernels.rope import op as rope
from taut_kernels.rope import rope_launch
from taut_kernels.rowwise import quantize, row_quant
from taut_kernels.rowwise.tiles import FusedTile

DTYPES = (torch.float16, torch.float32)
OUTS = ("same", "fp8", "int8", "static_fp8")
EPSILON = 1e-5
# M, N, tile: short rows, several a program; one step; a partial last step; rows beyond M; a long
# row, which is read again by each pass.
NORMS = [
    (3, 100, FusedTile(4, 128, 1)),
    (9, 1, FusedTile(4, 8, 1)),
    (5, 1000, FusedTile(1, 256, 4)),
    (2, 5120, FusedTile(1, 1024, 4)),
    (1, 4096, FusedTile(1, 4096, 8)),
    (2, 40000, FusedTile(1, 8192, 16)),
]
ACTIVATIONS = [
    (3, 100, FusedTile(1, 128, 1)),
    (5, 1024, FusedTile(1, 256, 4)),
    (5, 1000, FusedTile(2, 256, 4)),
    (2, 40000, FusedTile(1, 8192, 16)),
]
QUANTISATIONS = [
    (3, 100, FusedTile(4, 128, 1)),
    (9, 1, FusedTile(4, 8, 1)),
    (5, 1000, FusedTile(1, 256, 4)),
    (6, 5120, FusedTile(2, 1024, 4)),
    (1, 4096, FusedTile(1, 4096, 8)),
    (2, 28672, FusedTile(1, 8192, 32)),
    (2, 40000, FusedTile(1, 8192, 16)),
]
FORMS = [(1.0, 0.0, None), (1.702, 1.0, 7.0), (1.5, 0.5, None)]
# T, Hq, Hk, D, R, tile
ROTATIONS = [
    (3, 4, 2, 64, 64, FusedTile(1, 4, 1)),
    (5, 7, 1, 96, 40, FusedTile(2, 4, 2)),
    (9, 8, 0, 128, 128, FusedTile(4, 16, 1)),
    (1, 32, 8, 128, 64, FusedTile(2, 8, 2)),
    (7, 5, 0, 40, 36, FusedTile(4, 4, 1)),
]


def empty(shape, *, dtype, device):
    """The poison of taut_bench.testing, with fp32 in the place of fp8."""
    wide = torch.float32 if dtype is row_quant.FP8 else dtype
    return testing._empty_nan(shape, dtype=wide, device=device)


def check_quantised(q, scales, reference, reference_scales):
    """Equal up to one step of the format, and equal almost everywhere."""
    rtol = 2 * torch.finfo(torch.float16).eps
    assert torch.allclose(scales, reference_scales, rtol=rtol), (scales, reference_scales)
    dtype = reference.dtype
    q, reference = q.to(dtype).float(), reference.float()
    step = 1.0 if dtype is row_quant.INT8 else 0.126 * reference.abs().clamp(min=2.0**-6)
    assert ((q - reference).abs() <= step).all()
    assert (q != reference).float().mean().item() <= 0.01


def norm_operands(M, N, dtype, with_weight, with_residual, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N + 7, generator=generator).to(dtype)[:, :N]
    weight = (torch.rand(N, generator=generator) + 0.5).to(dtype) if with_weight else None
    residual = torch.randn(M, N, generator=generator).to(dtype) if with_residual else None
    return x, weight, residual


def check_norm(x, weight, residual, tile, out):
    gold_residual = None if residual is None else residual.double()
    gold_weight = None if weight is None else weight.double()
    gold = rms_norm.rms_norm_ref(x.double(), gold_weight, gold_residual, EPSILON)
    ours, theirs = (None if residual is None else residual.clone() for _ in range(2))
    device = x.device
    dtype = {"same": x.dtype, "int8": torch.int8}.get(out, row_quant.FP8)
    y = empty(x.shape, dtype=dtype, device=device)
    if out == "same":
        rms_norm_launch.launch(tile, out, x, weight, ours, EPSILON, y, None)
        reference = rms_norm.rms_norm_ref(x, weight, theirs, EPSILON)
        testing.assert_within_budget(y, gold, reference)
    elif out == "static_fp8":
        scale = torch.tensor([0.02])
        rms_norm_launch.launch(tile, out, x, weight, ours, EPSILON, y, scale)
        reference = rms_norm.rms_norm_static_quant_ref(x, weight, theirs, EPSILON, scale)
        check_quantised(y, scale, reference, scale)
    else:
        scales = empty((x.shape[0], 1), dtype=torch.float32, device=device)
        rms_norm_launch.launch(tile, out, x, weight, ours, EPSILON, y, scales)
        check_quantised(y, scales, *rms_norm.rms_norm_quant_ref(x, weight, theirs, EPSILON, dtype))
    if residual is not None:
        assert torch.equal(ours, theirs)
        assert testing.max_error(ours, gold_residual) <= 1e-3 * gold_residual.abs().max().item()


def norm_shapes():
    count = 0
    for dtype in DTYPES:
        for M, N, tile in NORMS:
            for out in OUTS:
                for with_residual in (False, True):
                    operands = norm_operands(M, N, dtype, out != "int8", with_residual)
                    check_norm(*operands, tile, out)
                    count += 1
    return count


def norm_of_another_weight_type():
    x, weight, residual = norm_operands(3, 200, torch.float16, True, True)
    check_norm(x, weight.float(), residual, FusedTile(1, 128, 4), "same")
    return 1


def norm_adversarial_values():
    base, weight, _ = norm_operands(4, 256, torch.float16, True, False)
    tile = FusedTile(1, 128, 4)
    tiny = torch.finfo(torch.float16).smallest_normal / 4
    edits = (
        lambda x: x.zero_(),
        lambda x: x.fill_(-0.0),
        lambda x: x.fill_(tiny),
        lambda x: x[:, 5].fill_(30000.0),
        lambda x: x.fill_(60000.0),
    )
    for edit in edits:
        edit(x := base.clone())
        for out in OUTS:
            check_norm(x, weight, None, tile, out)
    return len(edits)


def norm_keeps_other_rows_from_an_infinity():
    x, weight, _ = norm_operands(4, 256, torch.float16, True, False)
    x = x.contiguous()
    x[1, 7] = float("inf")
    x[2, 9] = float("nan")
    for out in ("fp8", "int8"):
        y = empty(x.shape, dtype=torch.float32 if out == "fp8" else torch.int8, device=x.device)
        scales = empty((4, 1), dtype=torch.float32, device=x.device)
        rms_norm_launch.launch(FusedTile(4, 64, 4), out, x, weight, None, EPSILON, y, scales)
        reference, reference_scales = rms_norm.rms_norm_quant_ref(
            x, weight, None, EPSILON, row_quant.FP8 if out == "fp8" else row_quant.INT8
        )
        for row in (0, 3):
            check_quantised(
                y[row : row + 1],
                scales[row : row + 1],
                reference[row : row + 1],
                reference_scales[row : row + 1],
            )
    return 2


def check_activation(x, form, interleaved, tile, out):
    dtype = {"same": x.dtype, "int8": torch.int8}.get(out, row_quant.FP8)
    y = empty((x.shape[0], x.shape[1] // 2), dtype=dtype, device=x.device)
    if out == "same":
        silu_mul_launch.launch(tile, out, x, *form, interleaved, y, None)
        gold = silu_mul.silu_mul_ref(x.double(), *form, interleaved)
        testing.assert_within_budget(y, gold, silu_mul.silu_mul_ref(x, *form, interleaved))
    elif out == "static_fp8":
        scale = torch.tensor([0.2])
        silu_mul_launch.launch(tile, out, x, *form, interleaved, y, scale)
        reference = silu_mul.silu_mul_static_quant_ref(x, *form, interleaved, scale)
        check_quantised(y, scale, reference, scale)
    else:
        scales = empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        silu_mul_launch.launch(tile, out, x, *form, interleaved, y, scales)
        reference = silu_mul.silu_mul_quant_ref(x, *form, interleaved, dtype)
        check_quantised(y, scales, *reference)


def activation_shapes():
    count = 0
    generator = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        for M, N, tile in ACTIVATIONS:
            x = (torch.randn(M, 2 * N + 7, generator=generator) * 4).to(dtype)[:, : 2 * N]
            for form in FORMS:
                for out in OUTS:
                    check_activation(x, form, form is FORMS[1], tile, out)
                    count += 1
            check_activation(x, FORMS[0], True, tile, "same")
            check_activation(x, FORMS[1], False, tile, "fp8")
            count += 2
    return count


def activation_adversarial_values():
    edits = (
        lambda x: x.zero_(),
        lambda x: x.fill_(-0.0),
        lambda x: x.fill_(-30000.0),
        lambda x: x[:, :64].fill_(-200.0),
        lambda x: x.fill_(torch.finfo(torch.float16).smallest_normal / 4),
    )
    for edit in edits:
        edit(x := torch.ones(3, 256, dtype=torch.float16))
        for out in OUTS:
            check_activation(x, FORMS[1], False, FusedTile(1, 128, 4), out)
            if x.abs().max() < 1000:
                check_activation(x, FORMS[0], True, FusedTile(1, 128, 4), out)
    return len(edits)


def check_rotation_apart(tile, positions, before, after, cache, neox):
    """Poisoned new tensors get every column; what is turned stays as it was."""
    copies = [None if x is None else x.clone() for x in before]
    new = [
        testing._empty_nan((0,) if x is None else x.shape, dtype=before[0].dtype, device="cpu")
        for x in before
    ]
    rope_launch.launch(tile, positions, *before, cache, neox, tuple(new))
    for found, wanted, old, copy in zip(new, after, before, copies, strict=True):
        assert wanted is None or torch.equal(found, wanted)
        assert wanted is None or torch.equal(old, copy)
    with mock.patch.object(launcher, "empty", empty):
        found = rope._launch_rope_apart(positions, *before, cache, neox)
    reference = rope.rope_apart_ref(positions, *before, cache, neox)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


def check_quantisation(x, tile, dtype):
    """Nothing is computed before the quantisation: equal scales and values."""
    q = empty(x.shape, dtype=dtype, device=x.device)
    scales = empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    quantize.launch(tile, row_quant.OUT[dtype], x, q, scales)
    reference, reference_scales = row_quant.quantize_rows_ref(x, dtype)
    assert torch.equal(scales, reference_scales), (scales, reference_scales)
    assert torch.equal(q.to(dtype).float(), reference.float())


def quantisations():
    count = 0
    generator = torch.Generator().manual_seed(2)
    for dtype in DTYPES:
        for M, N, tile in QUANTISATIONS:
            x = (torch.randn(M, N + 7, generator=generator) * 4).to(dtype)[:, :N]
            for quantised in (row_quant.FP8, row_quant.INT8):
                check_quantisation(x, tile, quantised)
                count += 1
    return count


def quantisation_adversarial_values():
    tiny = torch.finfo(torch.float16).smallest_normal
    edits = (
        lambda x: x.zero_(),
        lambda x: x.fill_(-0.0),
        lambda x: x.fill_(tiny / 4),
        lambda x: x.fill_(65504.0),
        lambda x: x[1].fill_(-65504.0),
        lambda x: x[:, ::2].fill_(tiny),
    )
    for edit in edits:
        edit(x := torch.randn(3, 256, generator=torch.Generator().manual_seed(3)).half())
        for quantised in (row_quant.FP8, row_quant.INT8):
            for tile in (FusedTile(1, 128, 4), FusedTile(4, 256, 4)):
                check_quantisation(x, tile, quantised)
    return len(edits)


def rotations():
    count = 0
    for dtype in DTYPES:
        for T, Hq, Hk, D, R, tile in ROTATIONS:
            for neox in (True, False):
                generator = torch.Generator().manual_seed(T)
                qkv = torch.randn(T, (Hq + 2 * Hk) * D + 16, generator=generator).to(dtype)
                angles = torch.rand(50, R // 2, generator=generator) * 6
                cache = torch.cat((angles.cos(), angles.sin()), dim=1)
                cache = cache.to(dtype if neox else torch.float32)
                positions = torch.randint(0, 50, (T,), generator=generator)
                expected = qkv.clone()

                def heads(x, Hq=Hq, Hk=Hk, D=D):
                    q, k = x[:, : Hq * D], x[:, Hq * D : (Hq + Hk) * D]
                    return q.unflatten(1, (-1, D)), k.unflatten(1, (-1, D)) if Hk else None

                rope.rope_ref(positions, *heads(expected), cache, neox)
                check_rotation_apart(tile, positions, heads(qkv), heads(expected), cache, neox)
                rope_launch.launch(tile, positions, *heads(qkv), cache, neox)
                # fp32 in the order of the formula on both sides, one rounding: equal bits, and
                # nothing beside the rotated columns is touched.
                assert torch.equal(qkv, expected)
                count += 1
    return count


def empty_batch():
    for x in (torch.zeros(0, 64, dtype=torch.float16),):
        assert rms_norm._launch_rms_norm(x, None, None, EPSILON).shape == (0, 64)
        assert silu_mul._launch_silu_mul(x, *FORMS[0], False).shape == (0, 32)
        for q, scales in (
            rms_norm._launch_rms_norm_quant(x, None, None, EPSILON, torch.int8),
            quantize._launch_row_quant(x, torch.int8),
        ):
            assert q.shape == (0, 64)
            assert scales.shape == (0, 1)
        rope_launch.launch(
            FusedTile(1, 4, 1),
            torch.zeros(0, dtype=torch.int64),
            x.view(0, 1, 64),
            None,
            torch.zeros(4, 64, dtype=torch.float16),
            True,
        )
    return 1


def launchers_write_every_element():
    """The op's own launchers, whose tiles come from the rule, on poisoned outputs."""
    count = 0
    with mock.patch.object(launcher, "empty", empty):
        for M, N in ((1, 4096), (300, 96), (2, 33000)):
            x, weight, residual = norm_operands(M, N, torch.float16, True, True)
            y = rms_norm._launch_rms_norm(x, weight, residual.clone(), EPSILON)
            reference = rms_norm.rms_norm_ref(x, weight, residual.clone(), EPSILON)
            gold = rms_norm.rms_norm_ref(x.double(), weight.double(), residual.double(), EPSILON)
            testing.assert_within_budget(y, gold, reference)
            for dtype in (row_quant.FP8, row_quant.INT8):
                found = silu_mul._launch_silu_mul_quant(x[:, : N // 2 * 2], *FORMS[0], False, dtype)
                wanted = silu_mul.silu_mul_quant_ref(x[:, : N // 2 * 2], *FORMS[0], False, dtype)
                check_quantised(*found, *wanted)
                q, scales = quantize._launch_row_quant(x, dtype)
                wanted, wanted_scales = row_quant.quantize_rows_ref(x, dtype)
                assert torch.equal(scales, wanted_scales)
                assert torch.equal(q.to(dtype).float(), wanted.float())
            count += 1
    return count


CHECKS = {
    check.__name__: check
    for check in (
        norm_shapes,
        norm_of_another_weight_type,
        norm_adversarial_values,
        norm_keeps_other_rows_from_an_infinity,
        activation_shapes,
        activation_adversarial_values,
        quantisations,
        quantisation_adversarial_values,
        rotations,
        empty_batch,
        launchers_write_every_element,
    )
}


def main(names):
    for name in names:
        sys.stdout.write(f"{name} {CHECKS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
