"""Forms compiled ahead of time are what launches ask for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from triton.runtime.jit import JITFunction

from taut_bench.instruments import aot, recorder
from taut_bench.instruments.forms import rowwise, training
from taut_bench.instruments.recorder import KernelCall, variants_of
from taut_kernels.activation.swiglu_kernel import swiglu_kernel
from taut_kernels.launch import launcher
from taut_kernels.norm import rms_norm_launch
from taut_kernels.norm.rms_norm_kernel import rms_norm_kernel
from taut_kernels.rope.train_kernel import rope_train_kernel
from taut_kernels.rowwise.tiles import FusedTile


def _call(N: int, *, residual: bool = False, tokens: int = 3) -> KernelCall:
    tile = FusedTile(1, 4096, 8)
    x = torch.empty(tokens, N, dtype=torch.bfloat16, device="meta")
    operands = (x, None, x if residual else None, 1e-5, x, None)
    return KernelCall(
        "norm",
        rms_norm_kernel,
        tile,
        lambda: rms_norm_launch.launch(tile, "same", *operands),
    )


def test_a_launch_says_types_constants_alignments_and_options() -> None:
    ampere, hopper = variants_of(_call(4096))
    assert (ampere.target, hopper.target) == recorder.BOTH
    assert hopper.pointers == {"x_ptr": "bf16", "y_ptr": "bf16"}
    assert hopper.constants["N"] == 4096
    assert hopper.constants["weight_ptr"] is None
    assert hopper.signature["epsilon"] == "fp32"
    assert hopper.options["num_warps"] == 8
    assert hopper.options["enable_fp_fusion"] is False
    assert hopper.attributes["stride_xm"] == [["tt.divisibility", 16]]
    (_, odd) = variants_of(_call(1000))
    assert "stride_xm" not in odd.attributes
    # No residual: its stride is 0, which 16 divides.
    assert "stride_rm" in odd.attributes


def test_a_launch_is_recorded_again_and_leaves_nothing_behind() -> None:
    before = launcher.Form.__call__, JITFunction.run, launcher.capability
    first, second = list(variants_of(_call(4096))), list(variants_of(_call(4096)))
    assert first == second
    assert (launcher.Form.__call__, JITFunction.run, launcher.capability) == before


def test_a_call_that_launches_something_else_is_refused() -> None:
    call = _call(4096)
    with pytest.raises(RuntimeError, match="launched 0 forms of row_quant_kernel on sm_80"):
        list(variants_of(KernelCall("norm", rowwise.row_quant_kernel, None, call.run)))
    with pytest.raises(RuntimeError, match="launched 2 forms of rms_norm_kernel on sm_80"):
        both = [_call(4096).run, _call(8192).run]
        run = lambda: [one() for one in both]  # noqa: E731
        list(variants_of(KernelCall("norms", rms_norm_kernel, None, run)))


def test_forms_have_the_options_their_launches_have() -> None:
    """Contraction is off, as the references round; descriptions apart from launches had lost it."""
    found = [
        v for v in training.kernel_variants() if v.kernel in (rope_train_kernel, swiglu_kernel)
    ]
    assert {v.kernel for v in found} == {rope_train_kernel, swiglu_kernel}
    assert all(v.options["enable_fp_fusion"] is False for v in found)


def test_recording_every_form_wants_no_card_and_no_vllm() -> None:
    check = (
        "import sys, torch\nfrom taut_bench.instruments import aot\n"
        "assert len(list(aot.every_variant())) > 1000\n"
        "assert 'vllm' not in sys.modules and not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", check], check=True)


def test_no_two_forms_of_a_label_and_tile_differ() -> None:
    found: dict[tuple[object, ...], int] = {}
    for variant in aot.every_variant():
        key = (variant.label, variant.tile, variant.target)
        found[key] = found.get(key, 0) + 1
    assert [key for key, count in found.items() if count > 1] == []
