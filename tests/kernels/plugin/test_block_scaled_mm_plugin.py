"""FP8 layers with blocks of weights in vLLM: the choice by tokens, its record, vLLM's kernel."""

from __future__ import annotations

import importlib.util
import types
from typing import Any

import pytest
import torch

from taut_bench.testing.scaled_mm import ScaledMmCase, make_scaled_mm_case
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import verdict as measured_scaled_mm
from taut_kernels.gemm.scaled_mm.lookup import Bucket
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch.tile_tables import Table
from taut_kernels.vllm_plugin import block_scaled_mm_op as op

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
GPU = "card 9"
TILE = ScaledMmTile("pairs", 16, 64, 256, 4, 4)
BUCKETS = tuple((limit, (Bucket(limit, TILE, wins=False),) * 2) for limit in (16, 64, None))


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card on which 64×256 won at 1 and 16 tokens, and 64×384 nowhere."""
    products = {("fp8_block", 64, 256): BUCKETS, ("fp8_block", 64, 384): BUCKETS}
    table = Table(GPU, products)
    ratios = {
        ("fp8_block", 64, 256): ({1: 1.2, 16: 1.0, 64: 0.9, 128: 0.8}, {}),
        ("fp8_block", 64, 384): ({1: 0.9}, {}),
    }
    monkeypatch.setattr(tiles_scaled_mm, "tables", lambda: {GPU: table})
    judged = Table(GPU, ratios)
    monkeypatch.setattr(measured_scaled_mm, "tables", lambda: {GPU: judged})
    for cached in (tiles_scaled_mm.buckets, tiles_scaled_mm._by_limit):
        cached.cache_clear()
    yield
    for cached in (tiles_scaled_mm.buckets, tiles_scaled_mm._by_limit):
        cached.cache_clear()


def _operands(case: ScaledMmCase, always: bool, rest: str = op.DEEP_GEMM) -> tuple[Any, ...]:
    head = (case.x, case.weight, case.x_scale, case.weight_scale)
    return (*head, case.arrivals, case.out_dtype, always, rest)


def case_of(M: int, N: int = 64, K: int = 256) -> ScaledMmCase:
    return make_scaled_mm_case("fp8_gemm", M, N, K, scaling="block")


def test_op_on_a_cpu_is_the_specification() -> None:
    case = case_of(3)
    operands = _operands(case, always=False)
    assert torch.equal(torch.ops.taut.fp8_block_by_tokens(*operands), case.reference())
    # opcheck's schema test multiplies its inputs, which torch does not do in e4m3.
    checks = ["test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(torch.ops.taut.fp8_block_by_tokens.default, operands, test_utils=checks)


@pytest.mark.parametrize(
    ("M", "always", "expected"),
    [
        (1, False, "ours"),
        (16, False, "ours"),
        (17, False, "vLLM"),
        (65, False, "vLLM"),
        (17, True, "ours"),
        (65, True, "ours"),
    ],
)
def test_verdicts_behind_the_quantisation_choose_the_kernel(
    M: int, always: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(op.launcher, "gpu_name", lambda device: GPU)
    monkeypatch.setattr(op, "launch_block", lambda *a: called.append("ours"))
    monkeypatch.setattr(op, "_vllm", lambda *a: called.append("vLLM"))
    op._dispatch(*_operands(case_of(M), always))
    assert called == [expected]


def test_vllm_s_kernel_gets_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    fakes = {
        "_C": types.SimpleNamespace(cutlass_scaled_mm=lambda *a: calls.append(("CUTLASS", *a))),
        "vllm": types.SimpleNamespace(fp8_gemm_nt_op=lambda *a: calls.append(("DeepGEMM", *a))),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(op.torch.ops, name, fake, raising=False)
    case = case_of(5)
    head = (case.x, case.weight, case.x_scale, case.weight_scale, torch.bfloat16)
    for rest in op.RESTS:
        assert op._vllm(rest, *head).shape == (5, 64)
    plain, powers_of_two, cutlass = calls
    assert (plain[0], plain[-1], powers_of_two[-1]) == ("DeepGEMM", False, True)
    assert cutlass[0] == "CUTLASS"
    assert cutlass[3].shape == (256, 64)
    assert cutlass[5].shape == case.weight_scale.t().shape


def test_reasons_name_the_numbers_of_tokens() -> None:
    assert op.why_not_at_all(GPU, 64, 256, "prefer") is None
    partly = "not measured to be as fast as vLLM's at 17– tokens"
    assert op.why_partly(GPU, 64, 256, "prefer") == partly
    assert op.why_partly(GPU, 64, 256, "require") is None
    nowhere = "not measured to be as fast as vLLM's at 1– tokens"
    assert op.why_not_at_all(GPU, 64, 384, "prefer") == nowhere
    assert op.why_not_at_all(GPU, 64, 384, "require") is None
    assert op.why_not_at_all(GPU, 48, 256, "prefer") == "48×256 not measured on card 9"
    assert "multiple of 16, got 72" in str(op.why_not_at_all(GPU, 64, 72, "require"))
    assert "multiple of 16, got 72" in str(op.why_not_at_all(GPU, 72, 256, "require"))


def test_warm_up_reaches_every_bucket_of_ours() -> None:
    assert op.warm_up_tokens(GPU, 64, 256, True) == (16, 64, 65)
    assert op.warm_up_tokens(GPU, 64, 256, False) == (16,)


KERNEL = """
import dataclasses, os, types
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as L
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape, kFp8Dynamic128Sym, kFp8DynamicTokenSym, kFp8Static128BlockSym)
from vllm.plugins import load_general_plugins
load_general_plugins()
from taut_kernels.vllm_plugin import block_scaled_mm, scaled_mm
Ours = block_scaled_mm.TautFp8BlockScaledMMLinearKernel
cuda, cpu = L.PlatformEnum.CUDA, L.PlatformEnum.CPU
assert L._POSSIBLE_FP8_BLOCK_KERNELS[cuda][0] is Ours
assert Ours.is_supported(90) == (False, "no taut 8-bit kernel for cpu")
config = L.FP8ScaledMMLinearLayerConfig(
    weight_quant_key=kFp8Static128BlockSym, activation_quant_key=kFp8Dynamic128Sym,
    weight_shape=(192, 256), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16)

class Rest(L.CutlassFp8BlockScaledMMKernel):
    '''Stands for vLLM's kernel: its quantiser on a CPU, its product the specification.'''
    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None
    def apply_block_scaled_mm(self, A, B, As, Bs):
        from taut_kernels.gemm.scaled_mm.op_fp8 import fp8_gemm_ref
        return fp8_gemm_ref(A, B, As, Bs, None, None, torch.bfloat16)

here = block_scaled_mm.current_platform
here.get_device_name = lambda: "NVIDIA X"
scaled_mm.why_not_here = block_scaled_mm.why_not_here = lambda capability: None
class Stranger(Rest):
    pass

with set_current_vllm_config(VllmConfig()):
    L._POSSIBLE_FP8_BLOCK_KERNELS[cpu][:] = []
    assert "vLLM has no kernel for the other" in Ours.can_implement(config)[1]
    L._POSSIBLE_FP8_BLOCK_KERNELS[cpu][:] = [Ours, Stranger]
    assert Ours.can_implement(config) == (False, "not measured against Stranger, vLLM's choice")
    L._POSSIBLE_FP8_BLOCK_KERNELS[cpu][:] = [Ours, Rest, Stranger]
    block_scaled_mm.CutlassFp8BlockScaledMMKernel = Rest
    assert Ours.can_implement(config) == (True, None)
    tokens = dataclasses.replace(config, activation_quant_key=kFp8DynamicTokenSym)
    assert "activation scales must be of (1, 128)" in Ours.can_implement(tokens)[1]
    wide = dataclasses.replace(config, out_dtype=torch.float32)
    assert "float32" in Ours.can_implement(wide)[1]
    kernel = Ours(config)
    assert kernel.rest == "CUTLASS" and type(kernel.fallback) is Rest
    other = block_scaled_mm.why_not_chosen(Rest(config))

generator = torch.Generator().manual_seed(0)
frozen = dict(requires_grad=False)

def layer_of(N=192, K=256):
    layer = torch.nn.Module()
    values = torch.randn(N, K, generator=generator)
    layer.weight = torch.nn.Parameter(values.to(torch.float8_e4m3fn), **frozen)
    scale = torch.rand(-(-N // 128), K // 128, generator=generator) + 0.5
    layer.weight_scale_inv = torch.nn.Parameter(scale, **frozen)
    layer.input_scale, layer.weight_block_size = None, [128, 128]
    return layer

layer = layer_of()
wide = layer.weight_scale_inv.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
exact_weight = layer.weight.float() * wide
x = torch.randn(2, 3, 256, generator=generator).to(torch.bfloat16)
bias = torch.randn(192, generator=generator).bfloat16()
exact = torch.nn.functional.linear(x.float(), exact_weight, bias.float())
records = {}
for mode in ("require", "prefer"):
    os.environ["TAUT_KERNELS"] = mode
    layer = layer if mode == "require" else layer_of()
    kernel.process_weights_after_loading(layer)
    records[mode] = kernel.taut_record()
    if mode == "require":
        y = kernel.apply_weights(layer, x, bias)
        assert y.shape == (2, 3, 192) and y.dtype == torch.bfloat16
        error = (y.float() - exact).abs().max() / exact.abs().max()
        assert error < 0.05, error
assert records["require"] == ("TautFp8BlockScaledMMLinearKernel", None)
assert records["prefer"] == ("Rest", "not measured on NVIDIA X; vLLM Rest"), records
assert kernel.apply_weights(layer, x, bias).shape == (2, 3, 192)
here.get_device_name = lambda: "NVIDIA H100 80GB HBM3"
measured = layer_of(4096, 4096)
kernel.process_weights_after_loading(measured)
assert kernel.taut_record() == (
    "TautFp8BlockScaledMMLinearKernel+Rest",
    "not measured to be as fast as vLLM's at 65– tokens; vLLM Rest there",
), kernel.taut_record()
asked = []
torch.ops.taut.fp8_block_by_tokens = types.SimpleNamespace(
    default=lambda rows, *a: asked.append(a[-2:]) or torch.zeros(rows.shape[0], 4096))
kernel.apply_weights(measured, torch.zeros(3, 4096, dtype=torch.bfloat16))
assert asked == [(False, "CUTLASS")], asked
odd = layer_of()
odd.weight_scale_inv = torch.nn.Parameter(torch.rand(2, 3), **frozen)
os.environ["TAUT_KERNELS"] = "require"
kernel.process_weights_after_loading(odd)
assert "scales must be fp32 (2, 2)" in kernel.taut_record()[1]
batch = torch.zeros(2, 192, 256).to(torch.float8_e4m3fn)
reason = block_scaled_mm._why_not_laid_out(batch, torch.ones(2, 2, 2))
assert reason == "weights must be one matrix, got (2, 192, 256)"
assert other == "vLLM chose another kernel (disabled or filtered by a flag)", other
assert block_scaled_mm.why_not_chosen(object()) is None
print("RESULT ok")
"""


@needs_vllm
@pytest.mark.vllm
def test_kernel_prepares_and_runs_layers_as_vllm_hands_them(run_with_vllm: Any) -> None:
    process = run_with_vllm("-c", KERNEL)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "RESULT ok" in process.stdout
