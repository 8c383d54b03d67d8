"""W8A8 layers in vLLM: the choice by tokens, the record of it, and the kernels vLLM holds."""

from __future__ import annotations

import importlib.util
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from taut_bench.testing.scaled_mm import ScaledMmCase, make_scaled_mm_case
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm.lookup import Bucket
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch.tile_tables import Table
from taut_kernels.vllm_plugin import compat, scaled_mm_op, selection

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
GPU = "card 9"
TILE = ScaledMmTile("ring", 16, 64, 128, 4, 3)
MIXED = tuple((limit, (Bucket(limit, TILE, wins=limit != 64),) * 2) for limit in (16, 64, None))
LOST_ALONE = tuple(
    (limit, (replace(alone, wins=False), in_layer)) for limit, (alone, in_layer) in MIXED
)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card on which 64×128 was measured for both types, and 48×128 lost for int8."""
    buckets = {
        ("w8a8_gemm", 64, 128): MIXED,
        ("fp8_gemm", 64, 128): MIXED,
        ("w8a8_gemm", 48, 128): LOST_ALONE,
    }
    table = Table(GPU, buckets)
    monkeypatch.setattr(tiles_scaled_mm, "tables", lambda: {GPU: table})
    tiles_scaled_mm.buckets.cache_clear()
    yield
    tiles_scaled_mm.buckets.cache_clear()


def test_in_a_layer_of_ours_its_figures_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (torch.int8, GPU, 48, 128, "prefer")
    assert scaled_mm_op.why_not_at_all(*asked) == scaled_mm_op.why_partly(*asked) is not None
    monkeypatch.setattr(scaled_mm_op.SURROUNDINGS, "in_layer", True)
    assert scaled_mm_op.why_not_at_all(*asked) is None
    assert scaled_mm_op.why_partly(*asked) == scaled_mm_op.why_partly(
        torch.int8, GPU, 64, 128, "prefer"
    )


def _operands(case: ScaledMmCase, always: bool) -> tuple[Any, ...]:
    head = (case.x, case.weight.t(), case.x_scale, case.weight_scale)
    return (*head, case.azp_adj, case.azp, case.bias, case.arrivals, case.out_dtype, always)


@pytest.mark.parametrize("op", ["w8a8_gemm", "fp8_gemm"])
def test_op_on_a_cpu_is_the_specification(op: str) -> None:
    case = make_scaled_mm_case(op, 3, 64, 128, with_bias=True)
    operands = _operands(case, always=False)
    assert torch.equal(torch.ops.taut.scaled_mm_by_tokens(*operands), case.reference())
    # opcheck's schema test multiplies its inputs, which torch does not do in e4m3.
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"][op == "fp8_gemm" :]
    torch.library.opcheck(torch.ops.taut.scaled_mm_by_tokens.default, operands, test_utils=checks)


@pytest.mark.parametrize(
    ("M", "always", "expected"),
    [
        (1, False, "ours"),
        (16, False, "ours"),
        (17, False, "cutlass"),
        (64, False, "cutlass"),
        (65, False, "ours"),
        (64, True, "ours"),
    ],
)
@pytest.mark.parametrize("op", ["w8a8_gemm", "fp8_gemm"])
def test_the_measured_table_chooses_the_kernel(
    op: str, M: int, always: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(scaled_mm_op.launcher, "gpu_name", lambda device: GPU)
    monkeypatch.setattr(scaled_mm_op, "launch", lambda *a: called.append("ours"))
    monkeypatch.setattr(scaled_mm_op, "_cutlass", lambda *a: called.append("cutlass"))
    scaled_mm_op._dispatch(*_operands(make_scaled_mm_case(op, M, 64, 128), always))
    assert called == [expected]


def test_cutlass_gets_zero_points_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fake = types.SimpleNamespace(
        cutlass_scaled_mm=lambda *a: calls.append(("plain", len(a))),
        cutlass_scaled_mm_azp=lambda *a: calls.append(("azp", len(a))),
    )
    monkeypatch.setattr(scaled_mm_op.torch.ops, "_C", fake)
    for zero_points in ("none", "static", "token"):
        case = make_scaled_mm_case("w8a8_gemm", 2, 64, 128, zero_points=zero_points)
        y = scaled_mm_op._cutlass(*_operands(case, False)[:7], case.out_dtype)
        assert y.shape == (2, 64)
    assert calls == [("plain", 6), ("azp", 8), ("azp", 8)]


def test_reasons_name_the_numbers_of_tokens_and_the_way_out() -> None:
    int8, fp8 = torch.int8, torch.float8_e4m3fn
    at_all, partly = scaled_mm_op.why_not_at_all, scaled_mm_op.why_partly
    assert at_all(int8, GPU, 64, 128, "prefer") is None
    assert partly(int8, GPU, 64, 128, "prefer") == "slower than vLLM's at 17–64 tokens"
    assert partly(int8, GPU, 64, 128, "require") is None
    assert at_all(int8, GPU, 48, 128, "prefer") == "slower than vLLM's at 1– tokens"
    assert at_all(int8, GPU, 48, 128, "require") is None
    assert at_all(fp8, GPU, 48, 128, "prefer") == "48×128 not measured on card 9"
    assert at_all(fp8, "other", 64, 128, "prefer") == "not measured on other"
    assert "multiple of 16, got 72" in str(at_all(fp8, GPU, 64, 72, "require"))
    assert "output features must be a multiple of 16" in str(at_all(int8, GPU, 72, 128, "require"))
    assert "at most 65535" in str(at_all(int8, GPU, 64, 65536, "require"))


def test_warm_up_reaches_every_bucket() -> None:
    assert scaled_mm_op.warm_up_tokens(torch.int8, GPU, 64, 128) == (16, 64, 65)
    assert scaled_mm_op.warm_up_tokens(torch.int8, "other", 64, 128) == (16, 32, 64, 128, 129)


def _selection_module() -> Any:
    return types.SimpleNamespace(
        PlatformEnum=types.SimpleNamespace(CUDA="cuda"),
        _POSSIBLE_INT8_KERNELS={"cuda": [int]},
        _POSSIBLE_FP8_KERNELS={"cuda": [float]},
        _LINEAR_BACKEND_KERNEL_MAP={"triton": set()},
    )


def test_insert_is_first_and_idempotent() -> None:
    module = _selection_module()
    for _ in range(2):
        compat.insert_scaled_mm_first(str, module, "INT8")
        compat.insert_scaled_mm_first(bytes, module, "FP8")
    assert {"cuda": [str, int]} == module._POSSIBLE_INT8_KERNELS
    assert {"cuda": [bytes, float]} == module._POSSIBLE_FP8_KERNELS
    assert {"triton": {str, bytes}} == module._LINEAR_BACKEND_KERNEL_MAP


@pytest.mark.parametrize("missing", ["_POSSIBLE_FP8_KERNELS", "_LINEAR_BACKEND_KERNEL_MAP"])
def test_insert_names_a_vllm_that_changed(missing: str) -> None:
    module = _selection_module()
    delattr(module, missing)
    with pytest.raises(compat.IncompatibleVllmError, match=missing):
        compat.insert_scaled_mm_first(str, module, "FP8")


class _Recorded:
    def __init__(self, reason: str | None) -> None:
        self._reason = reason

    def taut_record(self) -> tuple[str, str | None]:
        return "TautFP8", self._reason


def _model(**holders: Any) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, holder in holders.items():
        layer = torch.nn.Linear(2, 2)
        layer.scheme = holder
        model.add_module(name, layer)
    return model


def test_audit_takes_the_kernel_s_own_record_wherever_vllm_keeps_it() -> None:
    model = _model(
        a=types.SimpleNamespace(fp8_linear=_Recorded(None)),
        b=types.SimpleNamespace(kernel=_Recorded("slower at 17–64 tokens")),
        c=types.SimpleNamespace(kernel=object()),
    )
    refuse = {"object": "not on this card"}.get
    choices = list(selection.audit(model, str, lambda kernel: refuse(type(kernel).__name__)))
    assert [(c.layer, c.kernel, c.reason) for c in choices] == [
        ("a", "TautFP8", None),
        ("b", "TautFP8", "slower at 17–64 tokens"),
        ("c", "object", "not on this card; vLLM object"),
    ]
    selection.refuse_unless_ours(choices)


KERNELS = """
import types
import torch
from vllm.model_executor.kernels import linear as L
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape, kFp8DynamicTokenSym, kFp8StaticChannelSym, kFp8Dynamic128Sym)
from taut_bench import testing
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.vllm_plugin import scaled_mm
from taut_bench.testing.scaled_mm import make_scaled_mm_case
from vllm.plugins import load_general_plugins
load_general_plugins()
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
cuda = L.PlatformEnum.CUDA
assert L._POSSIBLE_INT8_KERNELS[cuda][0].__name__ == "TautInt8ScaledMMLinearKernel"
assert L._POSSIBLE_FP8_KERNELS[cuda][0].__name__ == "TautFP8ScaledMMLinearKernel"
assert "cpu" in scaled_mm.why_not_here(90)
Int8, FP8 = scaled_mm.TautInt8ScaledMMLinearKernel, scaled_mm.TautFP8ScaledMMLinearKernel
assert Int8.is_supported(90) == (False, "no taut 8-bit kernel for cpu")

# Whether a card is asked at all under `prefer`: its own tables, or those of its twin.
here = scaled_mm.current_platform
unknown = "not measured against vLLM's kernels on NVIDIA X; TAUT_KERNELS=require runs it"
for gpu, reason in ((H200, None), (H100, None), ("NVIDIA X", unknown)):
    scaled_mm.current_platform = types.SimpleNamespace(
        is_cuda=lambda: True, get_device_capability=lambda: None, get_device_name=lambda: gpu)
    assert scaled_mm.why_not_here(90) == reason, gpu
scaled_mm.current_platform = here

# From here on as on a Hopper card; the op runs its specification, our quantisers stand for vLLM's.
scaled_mm.why_not_here = lambda capability: None
platform = scaled_mm.current_platform
platform.get_device_name = lambda: "NVIDIA X"

def int8_quant(x, scale, azp, symmetric):
    if scale is None:
        low, high = x.float().aminmax(dim=1, keepdim=True)
        s = x.float().abs().amax(1, keepdim=True) / 127 if symmetric else (high - low) / 255
        z = None if symmetric else (-128 - low / s).round().to(torch.int32)
    else:
        s, z = scale, azp
    shifted = (x.float() / s).round() + (0 if z is None else z)
    return shifted.clamp(-128, 127).to(torch.int8), s, z

scaled_mm._custom_ops.scaled_int8_quant = int8_quant
names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
generator = torch.Generator().manual_seed(0)
x = torch.randn(2, 3, 128, generator=generator).to(torch.bfloat16)
for static in (False, True):
    for symmetric in (False, True):
        layer = torch.nn.Module()
        layer.logical_widths, layer.params_dtype, layer.azp_adj = [64], torch.bfloat16, None
        weight = torch.randint(-127, 128, (64, 128), generator=generator).to(torch.int8)
        frozen = dict(requires_grad=False)
        layer.weight = torch.nn.Parameter(weight, **frozen)
        scale = torch.rand(64, 1, generator=generator) / 1000
        layer.weight_scale = torch.nn.Parameter(scale, **frozen)
        layer.bias = torch.nn.Parameter(torch.randn(64, generator=generator).bfloat16(), **frozen)
        layer.input_scale = layer.input_zero_point = None
        if static:
            layer.input_scale = torch.nn.Parameter(torch.tensor([0.03]), **frozen)
            zero = torch.tensor([7], dtype=torch.int8)
            layer.input_zero_point = None if symmetric else torch.nn.Parameter(zero, **frozen)
        kernel = Int8(L.Int8ScaledMMLinearLayerConfig(
            is_static_input_scheme=static, is_channelwise=True, input_symmetric=symmetric), names)
        import os
        os.environ["TAUT_KERNELS"] = "require"
        kernel.process_weights_after_loading(layer)
        assert kernel.taut_record() == ("TautInt8ScaledMMLinearKernel", None)
        assert layer.weight.shape == (128, 64) and layer.weight.stride() == (1, 128)
        y = kernel.apply_weights(layer, x, layer.bias)
        exact = torch.nn.functional.linear(x.float(), weight.float() * scale, layer.bias.float())
        assert y.shape == (2, 3, 64) and y.dtype == torch.bfloat16
        error = (y.float() - exact).abs().max() / exact.abs().max()
        assert error < 0.03, (static, symmetric, error)
os.environ["TAUT_KERNELS"] = "prefer"
layer.weight = torch.nn.Parameter(weight, **frozen)
kernel.process_weights_after_loading(layer)
record = kernel.taut_record()
assert record[0] == "CutlassInt8ScaledMMLinearKernel" and "not measured on NVIDIA X" in record[1]

config = L.FP8ScaledMMLinearLayerConfig(
    weight_quant_key=kFp8StaticChannelSym, activation_quant_key=kFp8DynamicTokenSym,
    weight_shape=(64, 128), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16)
assert FP8.can_implement(config) == (True, None)
import dataclasses
groups = dataclasses.replace(config, activation_quant_key=kFp8Dynamic128Sym)
assert "activation scales of groups" in FP8.can_implement(groups)[1]
assert "float32" in FP8.can_implement(dataclasses.replace(config, out_dtype=torch.float32))[1]
os.environ["TAUT_KERNELS"] = "require"
from vllm.config import VllmConfig, set_current_vllm_config
with set_current_vllm_config(VllmConfig()):
    kernel = FP8(config, ["weight", "weight_scale", "input_scale", "input_scale_ub"])

def fp8_quant(x, scale, upper_bound):
    s = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / s).to(torch.float8_e4m3fn), s

kernel.quant_fp8 = fp8_quant
values = torch.randn(64, 128, generator=generator)
scale = values.abs().amax(1, keepdim=True) / 448
layer = torch.nn.Module()
layer.weight = torch.nn.Parameter((values / scale).to(torch.float8_e4m3fn).t(), **frozen)
layer.weight_scale = torch.nn.Parameter(scale, **frozen)
kernel.process_weights_after_loading(layer)
assert kernel.taut_record() == ("TautFP8ScaledMMLinearKernel", None)
y = kernel.apply_weights(layer, x)
exact = torch.nn.functional.linear(x.float(), values)
error = (y.float() - exact).abs().max() / exact.abs().max()
assert y.shape == (2, 3, 64) and error < 0.1, error
os.environ["TAUT_KERNELS"] = "prefer"
kernel.process_weights_after_loading(layer)
assert "not measured on NVIDIA X" in kernel.taut_record()[1]
print("RESULT ok")
"""


@needs_vllm
@pytest.mark.vllm
def test_kernels_prepare_and_run_layers_as_vllm_hands_them(run_with_vllm: Any) -> None:
    process = run_with_vllm("-c", KERNELS, "compiled")
    assert process.returncode == 0, process.stderr[-2000:]
    assert "RESULT ok" in process.stdout


ON_A_CARD = """
import os
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as L
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym, kFp8StaticChannelSym)
from taut_kernels.vllm_plugin import register, scaled_mm
register()  # by hand: a GPU machine may have the package on its path only, without entry points
generator = torch.Generator("cuda").manual_seed(0)
frozen = dict(requires_grad=False)
N, K = 4096, 4096

def int8_layer(static, symmetric):
    layer = torch.nn.Module()
    layer.logical_widths, layer.params_dtype, layer.azp_adj = [N], torch.bfloat16, None
    weight = torch.randint(-127, 128, (N, K), generator=generator, device="cuda")
    layer.weight = torch.nn.Parameter(weight.to(torch.int8), **frozen)
    scale = torch.rand(N, 1, generator=generator, device="cuda") / 1000
    layer.weight_scale = torch.nn.Parameter(scale, **frozen)
    bias = torch.randn(N, generator=generator, device="cuda").bfloat16()
    layer.bias = torch.nn.Parameter(bias, **frozen)
    layer.input_scale = layer.input_zero_point = None
    if static:
        layer.input_scale = torch.nn.Parameter(torch.tensor([0.03], device="cuda"), **frozen)
        zero = torch.tensor([7], dtype=torch.int8, device="cuda")
        layer.input_zero_point = None if symmetric else torch.nn.Parameter(zero, **frozen)
    return layer

def compare(kernel, layer, what):
    parent = next(c for c in type(kernel).__mro__ if c.__module__.startswith("vllm."))
    for M in (1, 16, 33, 300):
        x = torch.randn(M, K, generator=generator, device="cuda").bfloat16()
        for bias in (None, layer.bias):
            y = kernel.apply_weights(layer, x, bias)
            other = parent.apply_weights(kernel, layer, x, bias)
            error = (y.float() - other.float()).abs().max() / other.float().abs().max()
            assert error < 2**-6, (what, M, error)
    x = torch.randn(4, K, generator=generator, device="cuda").bfloat16()
    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x, layer.bias), fullgraph=True)
    assert torch.equal(compiled(x), kernel.apply_weights(layer, x, layer.bias)), what
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.apply_weights(layer, x, layer.bias)
    x.copy_(torch.randn(4, K, generator=generator, device="cuda"))
    graph.replay()
    assert torch.equal(y, kernel.apply_weights(layer, x, layer.bias)), what

names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
Int8, FP8 = scaled_mm.TautInt8ScaledMMLinearKernel, scaled_mm.TautFP8ScaledMMLinearKernel
for static in (False, True):
    for symmetric in (False, True):
        layer = int8_layer(static, symmetric)
        config = L.Int8ScaledMMLinearLayerConfig(
            is_static_input_scheme=static, is_channelwise=True, input_symmetric=symmetric)
        kernel = Int8(config, names)
        kernel.process_weights_after_loading(layer)
        assert kernel.taut_record() == ("TautInt8ScaledMMLinearKernel", None)
        compare(kernel, layer, (static, symmetric))
config = L.FP8ScaledMMLinearLayerConfig(
    weight_quant_key=kFp8StaticChannelSym, activation_quant_key=kFp8DynamicTokenSym,
    weight_shape=(N, K), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16)
with set_current_vllm_config(VllmConfig()):
    kernel = L.choose_scaled_mm_linear_kernel(config, L._POSSIBLE_FP8_KERNELS)
    assert kernel is FP8, kernel
    kernel = FP8(config, ["weight", "weight_scale", "input_scale", "input_scale_ub"])
values = torch.randn(N, K, generator=generator, device="cuda")
scale = values.abs().amax(1, keepdim=True) / 448
layer = torch.nn.Module()
layer.weight = torch.nn.Parameter((values / scale).to(torch.float8_e4m3fn).t(), **frozen)
layer.weight_scale = torch.nn.Parameter(scale, **frozen)
layer.bias = torch.nn.Parameter(torch.randn(N, generator=generator, device="cuda").bfloat16())
layer.bias.requires_grad_(False)
kernel.process_weights_after_loading(layer)
assert kernel.taut_record() == ("TautFP8ScaledMMLinearKernel", None)
compare(kernel, layer, "fp8")
print("RESULT ok")
"""


@needs_vllm
@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_kernels_agree_with_the_cutlass_kernels_they_extend(run_python: Any) -> None:
    process = run_python("-c", ON_A_CARD, env={"TAUT_KERNELS": "require"})
    assert process.returncode == 0, process.stderr[-3000:]
    assert "RESULT ok" in process.stdout
