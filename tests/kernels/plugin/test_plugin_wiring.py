"""The plugin's parts; vLLM itself only in subprocesses, without starting an engine."""

from __future__ import annotations

import importlib.util
import json
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from taut_kernels import vllm_plugin
from taut_kernels.gemm.w4a16 import verdict as measured_w4a16
from taut_kernels.gemm.w4a16.weight_format import WeightFormat
from taut_kernels.vllm_plugin import compat, selection, selfcheck

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


# --- imports -------------------------------------------------------------------------------------


def test_importing_the_package_touches_no_device_and_no_vllm(run_python: Any) -> None:
    code = (
        "import sys, taut_kernels, taut_kernels.vllm_plugin\n"
        "assert not {'vllm', 'torch', 'triton'} & set(sys.modules)\n"
        "import taut_kernels.gemm.w4a16.op, taut_kernels.gemm.w4a16.cpu, torch\n"
        "import taut_bench.testing, taut_bench.instruments.aot\n"
        "import taut_kernels.vllm_plugin.selfcheck\n"
        "assert 'vllm' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    process = run_python("-c", code)
    assert process.returncode == 0, process.stderr


def test_transformers_finds_no_kernels_package_of_ours(run_python: Any) -> None:
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    assert "taut" not in run_python("-c", code).stdout


# --- modes and cache key -------------------------------------------------------------------------


def test_mode_defaults_to_prefer_and_refuses_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAUT_KERNELS", raising=False)
    assert vllm_plugin.requested_mode() == "prefer"
    monkeypatch.setenv("TAUT_KERNELS", "")
    assert vllm_plugin.requested_mode() == "prefer"
    monkeypatch.setenv("TAUT_KERNELS", "always")
    with pytest.raises(ValueError, match="prefer, require, off, got 'always'"):
        vllm_plugin.register()


def test_cache_key_follows_mode_and_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAUT_KERNELS", "require")
    key = vllm_plugin.cache_key()
    assert key == vllm_plugin.cache_key()
    monkeypatch.setenv("TAUT_KERNELS", "off")
    other = vllm_plugin.cache_key()
    assert key.split("-")[0] == "require"
    assert other.split("-") == ["off", key.split("-")[1]]
    package = tmp_path / "package"
    (package / "vllm_plugin").mkdir(parents=True)
    (package / "vllm_plugin" / "__init__.py").write_text("")
    (package / "tiles.json").write_text("{}")
    (package / "op.cpp").write_text("")
    monkeypatch.setattr(vllm_plugin, "__file__", str(package / "vllm_plugin" / "__init__.py"))
    before = vllm_plugin.cache_key()
    for name in ("tiles.json", "op.cpp"):
        (package / name).write_text("{ }")
        after = vllm_plugin.cache_key()
        assert after != before, name
        before = after


# --- self-check ----------------------------------------------------------------------------------


def test_ready_where_the_plugin_is_installed() -> None:
    assert selfcheck.why_not_ready(None) is None
    assert selfcheck.why_not_ready("other,taut") is None


@pytest.mark.parametrize("value", ["nope", "", " taut", "tauter"])
def test_not_ready_where_vllm_plugins_excludes_it(value: str) -> None:
    assert f"VLLM_PLUGINS={value!r} excludes 'taut'" in str(selfcheck.why_not_ready(value))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "install taut"),
        ([EntryPoint("x", selfcheck.TARGET, selfcheck.GROUP)], "install taut"),
        ([EntryPoint("taut", "elsewhere:register", selfcheck.GROUP)], "reinstall taut"),
    ],
)
def test_not_ready_without_our_entry_point(
    found: list[EntryPoint], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "entry_points", lambda *, group: found)
    assert message in str(selfcheck.why_not_ready(None))


def test_not_ready_where_the_op_computes_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from taut_kernels.gemm.w4a16 import cpu as w4a16_cpu
    from taut_kernels.gemm.w4a16 import op as w4a16

    def wrong(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((2, 32), 191.0, dtype=x.dtype)

    monkeypatch.setattr(w4a16, "w4a16_gemm", wrong)
    monkeypatch.setattr(w4a16_cpu, "w4a16_gemm_cpu", wrong)
    assert "wrong answer" in str(selfcheck.why_not_ready(None))


# --- both API shapes -----------------------------------------------------------------------------


class _Kernel026:
    """The shape of vLLM 0.26's MPLinearKernel: a 4-tuple with g_idx."""

    def _get_weight_params(self, layer: Any) -> tuple[Any, Any, Any, Any]:
        return layer.w, layer.s, layer.z, layer.g_idx


class _Kernel032:
    """The shape of vLLM 0.32's MPLinearKernel: a 3-tuple."""

    def _get_weight_params(self, layer: Any) -> tuple[Any, Any, Any]:
        return layer.w, layer.s, layer.z


@pytest.mark.parametrize("kernel", [_Kernel026(), _Kernel032()])
def test_weight_params_from_both_tuple_shapes(kernel: Any) -> None:
    layer: Any = types.SimpleNamespace(w="w", s="s", z="z", g_idx="g")
    assert compat.kernel_weight_params(kernel, layer) == ("w", "s", "z")


def test_act_order_is_read_where_the_field_exists() -> None:
    assert compat.has_act_order(types.SimpleNamespace(has_g_idx=True))
    assert not compat.has_act_order(types.SimpleNamespace(has_g_idx=False))
    assert not compat.has_act_order(types.SimpleNamespace())


def _selection_module() -> Any:
    platforms = types.SimpleNamespace(CUDA="cuda", CPU="cpu")
    return types.SimpleNamespace(
        PlatformEnum=platforms,
        _POSSIBLE_KERNELS={"cuda": [int], "cpu": [float]},
        _LINEAR_BACKEND_KERNEL_MAP={"triton": set()},
    )


def test_insert_first_is_first_and_idempotent() -> None:
    module = _selection_module()
    held = module._POSSIBLE_KERNELS["cuda"]
    for _ in range(3):
        compat.insert_first(str, module)
    assert held == [str, int]
    assert {"cuda": [str, int], "cpu": [str, float]} == module._POSSIBLE_KERNELS
    assert {"triton": {str}} == module._LINEAR_BACKEND_KERNEL_MAP


@pytest.mark.parametrize("missing", ["_POSSIBLE_KERNELS", "_LINEAR_BACKEND_KERNEL_MAP"])
def test_insert_first_names_a_vllm_that_changed(missing: str) -> None:
    module = _selection_module()
    delattr(module, missing)
    with pytest.raises(compat.IncompatibleVllmError, match=missing):
        compat.insert_first(str, module)


def test_after_model_load_calls_back_once_however_often_installed() -> None:
    class Loader:
        def load_model(self, size: int) -> Any:
            return torch.nn.Linear(size, size)

    seen: list[torch.nn.Module] = []
    for _ in range(3):
        compat.after_model_load(Loader, seen.append)
    model = Loader().load_model(size=3)
    assert seen == [model]
    with pytest.raises(compat.IncompatibleVllmError, match="load_model"):
        compat.after_model_load(object, seen.append)


# --- audit ---------------------------------------------------------------------------------------


class TautW4A16LinearKernel:
    config: ClassVar[Any] = types.SimpleNamespace(weight_type="uint4b8")


class OtherKernel:
    def __init__(self, weight_type: str) -> None:
        self.config = types.SimpleNamespace(weight_type=weight_type)


class Int8Kernel:
    """No MPLinearLayerConfig: a scaled-mm kernel."""


class Scheme:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel


def _model(**kernels: Any) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, kernel in kernels.items():
        layer = torch.nn.Linear(2, 2)
        layer.scheme = Scheme(kernel)  # type: ignore[assignment]
        model.add_module(name, layer)
    model.add_module("norm", torch.nn.LayerNorm(2))
    return model


def _audit(model: torch.nn.Module, reason: str | None = None) -> list[selection.LayerChoice]:
    return list(selection.audit(model, lambda config: reason))


def test_audit_names_each_layer_kernel_and_reason() -> None:
    model = _model(a=TautW4A16LinearKernel(), b=OtherKernel("uint4"), c=Int8Kernel())
    choices = {choice.layer: choice for choice in _audit(model, "too odd")}
    assert set(choices) == {"a", "b", "c"}
    assert choices["a"].reason is None
    assert choices["b"].reason == "too odd; vLLM OtherKernel"
    assert choices["b"].in_scope
    assert choices["c"].reason == "no taut kernel for Scheme yet; vLLM Int8Kernel"
    assert not choices["c"].in_scope
    assert "another kernel" in str(_audit(model)[1].reason)


def test_a_layer_of_a_method_without_kernels_is_named_and_refused() -> None:
    class AutoAWQLinearMethod:
        quant_config = types.SimpleNamespace(quant_type="uint4")

    model = _model(a=TautW4A16LinearKernel())
    for name in ("b", "experts"):
        layer = torch.nn.Module()
        layer.quant_method = AutoAWQLinearMethod()  # type: ignore[assignment]
        model.add_module(name, layer)
    model.b.output_size_per_partition = 48  # type: ignore[assignment, union-attr]
    model.b.input_size_per_partition = 64  # type: ignore[assignment, union-attr]
    found = _audit(model)
    assert [(choice.layer, choice.shape, choice.in_scope) for choice in found] == [
        ("a", None, True),
        ("b", "48x64", True),
    ]
    with pytest.raises(selection.KernelsNotUsedError, match="b: vLLM AutoAWQLinearMethod chooses"):
        selection.conclude(found, "require")


def test_summary_counts_kernels_and_reasons() -> None:
    model = _model(a=OtherKernel("uint4"), b=OtherKernel("uint4"), c=TautW4A16LinearKernel())
    assert selection.summary(_audit(model, "too odd")) == (
        "OtherKernel ×2, TautW4A16LinearKernel ×1; not ours: too odd; vLLM OtherKernel (×2)"
    )
    assert selection.summary([]) == "no quantised linear layer"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_model(a=TautW4A16LinearKernel(), b=OtherKernel("uint4b8")), "b: odd; vLLM OtherKernel"),
        (_model(a=Int8Kernel()), "no layer runs on a taut kernel"),
        (_model(), "no layer runs on a taut kernel"),
    ],
)
def test_require_refuses(model: torch.nn.Module, message: str) -> None:
    with pytest.raises(selection.KernelsNotUsedError, match=message):
        selection.conclude(_audit(model, "odd"), "require")
    selection.conclude(_audit(model, "odd"), "prefer")


def test_require_accepts_schemes_out_of_scope_beside_ours() -> None:
    model = _model(a=TautW4A16LinearKernel(), b=Int8Kernel(), c=OtherKernel("uint8b128"))
    selection.conclude(_audit(model, "not 4 bits"), "require")


def test_report_is_written_before_require_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    monkeypatch.setenv("TAUT_KERNELS_REPORT", str(path))
    with pytest.raises(selection.KernelsNotUsedError):
        selection.conclude(_audit(_model(a=OtherKernel("uint4")), "odd"), "require")
    record = json.loads(path.read_text())
    assert record["format"] == 1
    assert record["layers"][0]["reason"] == "odd; vLLM OtherKernel"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kernels.json"]


def test_why_not_ours_depends_on_the_device() -> None:
    ask = selection.why_not_ours
    bf16, fp16 = torch.bfloat16, torch.float16
    assert ask(576, 1536, 64, dtype=bf16, device="cpu") is None
    assert ask(576, 1536, 64, dtype=fp16, device="cuda") is None
    assert "bfloat16" in str(ask(576, 1536, 64, dtype=fp16, device="cpu"))
    assert "got 16" in str(ask(576, 1536, 16, dtype=bf16, device="cuda"))


def test_prefer_takes_only_shapes_of_cards_where_ours_was_measured_or_estimated() -> None:
    def ask(gpu: str | None, mode: str, N: int = 6144) -> str | None:
        return selection.why_not_preferred(gpu, mode, N, 4096)

    assert ask("NVIDIA H200", "prefer") is None
    # Nobody measured it, but 6144 × 4096 and its other neighbours tell of it.
    assert ask("NVIDIA H200", "prefer", 6160) is None
    assert ask("NVIDIA H200", "prefer", 80) == (
        "80×4096 not measured against vLLM's kernels on NVIDIA H200; TAUT_KERNELS=require runs it"
    )
    assert "not measured against vLLM's kernels on card 9" in str(ask("card 9", "prefer"))
    assert ask("card 9", "require") is None
    assert ask(None, "prefer") is None


def test_prefer_asks_about_the_layers_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[WeightFormat] = []

    def why(gpu: str, N: int, K: int, weights: WeightFormat) -> str | None:
        asked.append(weights)
        return "slow" if weights.group_size == 32 else None

    monkeypatch.setattr(measured_w4a16, "why_not_preferred", why)
    for weights in WeightFormat:
        reason = selection.why_not_preferred("card", "prefer", 64, 128, weights)
        assert (reason == "slow; TAUT_KERNELS=require runs it") == (weights.group_size == 32)
        assert selection.why_not_preferred("card", "require", 64, 128, weights) is None
    assert asked == list(WeightFormat)


# --- the installed vLLM, without starting an engine ----------------------------------------------

REGISTER = """
import json
from vllm.plugins import load_general_plugins
from vllm.model_executor.kernels import linear as L
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
load_general_plugins()
from taut_kernels.vllm_plugin import register
{again}
names = {{k.name: [c.__name__ for c in v] for k, v in L._POSSIBLE_KERNELS.items()}}
hooked = hasattr(BaseModelLoader.load_model, "_taut_callback")
print("RESULT " + json.dumps([names, hooked]))
"""


def _registered(run_with_vllm: Any, env: dict[str, str], again: str = "") -> tuple[Any, bool]:
    process = run_with_vllm("-c", REGISTER.format(again=again), env=env)
    assert process.returncode == 0, process.stderr[-2000:]
    (line,) = (text for text in process.stdout.splitlines() if text.startswith("RESULT "))
    names, hooked = json.loads(line.removeprefix("RESULT "))
    return names, hooked


@needs_vllm
@pytest.mark.vllm
def test_vllm_loads_the_entry_point_and_register_is_idempotent(run_with_vllm: Any) -> None:
    names, hooked = _registered(run_with_vllm, {}, again="register(); register()")
    for platform in ("CUDA", "CPU"):
        assert names[platform][0] == "TautW4A16LinearKernel"
        assert names[platform].count("TautW4A16LinearKernel") == 1
    assert "TautW4A16LinearKernel" not in names["ROCM"]
    assert names["CPU"].count("TautCPUW8A16LinearKernel") == 1
    assert "TautCPUW8A16LinearKernel" not in names["CUDA"]
    assert hooked


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("env", [{"VLLM_PLUGINS": "nope"}, {"TAUT_KERNELS": "off"}])
def test_nothing_is_registered_where_excluded_or_off(
    env: dict[str, str], run_with_vllm: Any
) -> None:
    names, hooked = _registered(run_with_vllm, env)
    assert "TautW4A16LinearKernel" not in str(names)
    assert not hooked


def assert_ok(process: Any) -> None:
    """Ask of a script's process that it ended well and came to its last line."""
    assert process.returncode == 0, process.stderr[-2000:]
    assert "RESULT ok" in process.stdout


KERNEL = """
import types
import torch
from vllm.scalar_type import scalar_types
from taut_kernels.vllm_plugin import linear
from taut_kernels.vllm_plugin.linear import refusal

def config(**change):
    fields = dict(full_weight_shape=(128, 64), partition_weight_shape=(128, 64), group_size=32,
                  weight_type=scalar_types.uint4b8, act_type=torch.bfloat16, zero_points=False)
    return types.SimpleNamespace(**(fields | change))

assert refusal(config()) is None
assert refusal(config(has_g_idx=False)) is None
assert "g_idx" in refusal(config(has_g_idx=True))
assert "zero_points=True" in refusal(config(zero_points=True))
assert "uint8b128" in refusal(config(weight_type=scalar_types.uint8b128))
assert "out" in refusal(config(out_type=torch.float16))
assert "got 16" in refusal(config(group_size=16))
linear._gpu = lambda: "card"
linear.why_not_preferred = lambda gpu, mode, N, K, weights: f"{gpu} {N} {K} {weights}"
assert refusal(config()) == "card 64 128 g32"
four = config(weight_type=scalar_types.uint4, zero_points=True, group_size=-1)
assert refusal(four) == "card 64 128 g128-zp"
print("RESULT ok")
"""


@needs_vllm
@pytest.mark.vllm
def test_linear_kernel_refuses_what_it_must(run_with_vllm: Any) -> None:
    assert_ok(run_with_vllm("-c", KERNEL))


ON_A_CARD = """
import dataclasses, sys, types
import torch
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.model_executor import parameter
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types
from taut_bench import testing
from taut_kernels.vllm_plugin import linear

device = sys.argv[1]
parameter.get_tensor_model_parallel_rank = lambda: 0
parameter.get_tensor_model_parallel_world_size = lambda: 1
if device == "cpu":
    # Lay out as for a card, and let the op's specification compute.
    linear.current_platform = types.SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: True, get_device_name=lambda: "NVIDIA H200")
    linear.ask = lambda run, alike: None
    linear.TautW4A16LinearKernel._compile_every_tile = lambda *_: None
    linear.TautW4A16LinearKernel._check = lambda *_: None
tokens = (1, 3) if device == "cpu" else (1, 5, 16, 40, 129, 300, 2049)
# vLLM 0.26 asks for it, 0.32 has no such field.
order = {"has_g_idx": False} if "has_g_idx" in MPLinearLayerConfig.__dataclass_fields__ else {}
for asymmetric in (False, True):
    for group in (32, 64, 128, -1):
        N, K = 192, 256
        layer = torch.nn.Module()
        kernel = linear.TautW4A16LinearKernel(
            MPLinearLayerConfig(
                full_weight_shape=(K, N), partition_weight_shape=(K, N), group_size=group,
                weight_type=scalar_types.uint4 if asymmetric else scalar_types.uint4b8,
                act_type=torch.bfloat16, zero_points=asymmetric, **order),
            "weight_packed", "weight_scale", "weight_zero_point")
        whole = testing.make_w4a16_case(
            max(tokens), N, K, group, dtype=torch.bfloat16, asymmetric=asymmetric, device=device)
        keep = dict(weight_loader=lambda *a: None, input_dim=1, output_dim=0)
        packed = dict(packed_factor=8, **keep)
        layer.weight_packed = PackedvLLMParameter(
            data=whole.weight_packed.clone(), packed_dim=1, **packed)
        layer.weight_scale = GroupQuantScaleParameter(data=whole.weight_scale.clone(), **keep)
        if asymmetric:
            layer.weight_zero_point = PackedvLLMParameter(
                data=whole.weight_zero_point.clone(), packed_dim=0, **packed)
        kernel.process_weights_after_loading(layer)
        for M in tokens:
            case = dataclasses.replace(whole, x=whole.x[:M])
            if device == "cpu":
                zero = layer.weight_zero_point if asymmetric else None
                y = torch.ops.taut.w4a16_gemm(
                    case.x, layer.weight_packed, layer.weight_scale, zero, None,
                    layer.taut_arrivals, K if group == -1 else group)
                assert torch.equal(y, torch.ops.taut.w4a16_gemm(*case.operands()))
            else:
                y = kernel.apply_weights(layer, case.x)
            testing.assert_within_budget(y, case.gold(), case.rounded_reference())
            assert not layer.taut_arrivals.any()
print("RESULT ok")
"""


@needs_vllm
@pytest.mark.vllm
def test_a_layer_is_laid_out_for_a_card(run_with_vllm: Any) -> None:
    assert_ok(run_with_vllm("-c", ON_A_CARD, "cpu", env={"TAUT_KERNELS": "require"}))


@needs_vllm
@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_a_layer_is_right_at_every_number_of_tokens(run_python: Any) -> None:
    assert_ok(run_python("-c", ON_A_CARD, "cuda", env={"TAUT_KERNELS": "require"}))


FROM_DISK = """
import dataclasses, sys, types
import torch
from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq
from taut_bench import testing
from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.vllm_plugin import cpu_four_bits, linear, register
register()

form, device, *dtypes = sys.argv[1:]
parameter.get_tensor_model_parallel_rank = lambda: 0
parameter.get_tensor_model_parallel_world_size = lambda: 1
ORDER = {"gptq": range(8), "awq": [0, 2, 4, 6, 1, 3, 5, 7]}[form]  # place i of a word: ORDER[i]

def words(nibbles):
    # [rows, columns] 0..15 -> [rows, columns / 8] int32, along columns
    eights = nibbles.to(torch.int32).view(len(nibbles), -1, 8)[:, :, list(ORDER)]
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=nibbles.device)
    return (eights << shifts).sum(-1, dtype=torch.int32)

def on_disk(case):
    # Scales are fp16 in the file; a case's are exact in it.
    (N, K), G = case.values.shape, case.group_size
    tensors = {"scales": case.weight_scale.t().half()}
    if form == "awq":
        zeros = words((case.zeros + 8).t())
        return tensors | {"qweight": words((case.values + 8).t()), "qzeros": zeros}
    # Symmetric: 8, stored less 1. vLLM (0.26, 0.32) loads no GPTQ with other zeros.
    zeros = torch.full((K // G, N // 8), 0x77777777, dtype=torch.int32)
    order = torch.arange(K, dtype=torch.int32) // G
    return tensors | {"qweight": words(case.values + 8).t(), "qzeros": zeros, "g_idx": order}

def method_of(group):
    asked = {"bits": 4, "group_size": group}
    if form == "awq":
        config = auto_awq.AutoAWQConfig.from_config(asked | {"zero_point": True})
        return auto_awq.AutoAWQMarlinLinearMethod(config)
    config = auto_gptq.AutoGPTQConfig.from_config(asked | {"sym": True, "desc_act": False})
    return auto_gptq.AutoGPTQLinearMethod(config)

def by_op(case, isa):
    (N, K), zero = case.values.shape, case.weight_zero_point
    assert (isa is not None) == (cpu_four_bits.why_ours() is not None)
    if isa is None:
        layout = formats.repack_for_cpu(case.weight_packed, case.weight_scale, zero, K)
        return torch.ops.taut.w4a16_gemm_cpu(case.x, *layout, case.bias, K // len(layout[1]))
    packed = cpu_linear.pack(case.values, case.weight_scale, case.zeros, 4)
    return torch.ops.taut.weight_only_linear_cpu(case.x, *packed, case.bias, N, isa)

def load(case, group):
    method, layer, (N, K) = method_of(group), torch.nn.Module(), case.values.shape
    with torch.device(device):
        method.create_weights(
            layer, K, [N], K, N, case.x.dtype, weight_loader=lambda *arguments: None)
    assert type(method.kernel).__name__ == "TautW4A16LinearKernel"
    for name, tensor in on_disk(case).items():
        if name == "g_idx" and not hasattr(layer, name):
            continue  # vLLM 0.32 has none
        held = getattr(layer, name)
        assert held.shape == tensor.shape and held.dtype.itemsize == tensor.dtype.itemsize, name
        held.data.copy_(tensor)
    layer.bias = None if case.bias is None else torch.nn.Parameter(case.bias, requires_grad=False)
    method.process_weights_after_loading(layer)
    return method, layer

def cases(tokens, dtype):
    for group in (32, 64, 128, -1):
        # Neither is a multiple of what a tile has of it.
        N, K = 208, 384 if group == 128 else 320
        yield group, testing.make_w4a16_case(
            tokens, N, K, group, dtype=getattr(torch, dtype), asymmetric=form == "awq",
            with_bias=group == 128, device=device)

if device == "cpu":
    for ours in (None, "ours"):
        cpu_four_bits.why_ours = lambda ours=ours: ours
        if ours and (reason := cpu_linear.why_not_here()):
            print("SKIPPED", reason)
            continue
        for group, case in cases(3, "bfloat16"):
            method, layer = load(case, group)
            y = method.apply(layer, case.x, layer.bias)
            assert torch.equal(y, by_op(case, method.kernel.isa)), group
            error = testing.max_error(y, case.gold()) / case.gold().abs().max().item()
            assert error < 0.02, error
    cpu_four_bits.why_ours = lambda: None
    # From here on: laid out as for a card, and the op's specification computes.
    linear.current_platform = types.SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: True, get_device_name=lambda: "NVIDIA H200")
    linear.ask = lambda run, alike: None
    linear.TautW4A16LinearKernel._compile_every_tile = lambda *_: None
    linear.TautW4A16LinearKernel._check = lambda *_: None
tokens = (1, 3) if device == "cpu" else (1, 5, 16, 17, 40, 129, 300, 2049)
for dtype in dtypes:
    for group, whole in cases(max(tokens), dtype):
        method, layer = load(whole, group)
        for held, expected in zip((layer.qweight, layer.scales, layer.qzeros),
                                  whole.operands()[1:4], strict=True):
            assert (held is None) == (expected is None)
            assert held is None or torch.equal(held, expected)
        worst = 0.0
        for M in tokens:
            case = dataclasses.replace(whole, x=whole.x[:M])
            if device == "cpu":
                y = torch.ops.taut.w4a16_gemm(
                    case.x, layer.qweight, layer.scales, layer.qzeros, layer.bias,
                    layer.taut_arrivals, case.group_size)
            else:
                y = method.apply(layer, case.x, layer.bias)
            testing.assert_within_budget(y, case.gold(), case.rounded_reference())
            worst = max(worst, testing.max_error(y, case.gold()))
            assert not layer.taut_arrivals.any()
        print(f"{form} {dtype} group {group}: largest error {worst:.2e} of outputs of order 1")
print("RESULT ok")
"""


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_layer_of_another_format_as_vllm_loads_it_is_ours_and_right(
    form: str, run_with_vllm: Any
) -> None:
    arguments = ("-c", FROM_DISK, form, "cpu", "bfloat16", "float16")
    process = run_with_vllm(*arguments, env={"TAUT_KERNELS": "require"})
    assert_ok(process)


@needs_vllm
@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_gpu_a_layer_of_another_format_is_right(form: str, dtype: str, run_python: Any) -> None:
    arguments = ("-c", FROM_DISK, form, "cuda", dtype)
    process = run_python(*arguments, env={"TAUT_KERNELS": "require"}, timeout=550)
    assert_ok(process)
    print(process.stdout[process.stdout.index(form) :])
