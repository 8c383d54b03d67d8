"""The formats of the W4A16 benchmark without a GPU: layers, what rivals are fed, files, options."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_bench import plots, report, shapes, w4a16, w4a16_format, w4a16_rivals
from taut_bench.w4a16_format import DTYPES, Format
from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16.decode_ring_tile import token_tiles
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.op import w4a16_gemm_ref
from taut_kernels.tuner import timing, w4a16_stock
from taut_kernels.tuner.w4a16_layer import Layer, blank_layer, empty_weight, make_layer
from tuning import measured_table, tune_w4a16_decode, tune_w4a16_wgmma, w4a16_known_tiles
from tuning.decode_ring_candidates import decode_ring_candidates

N, K, ROWS = 48, 256, 20
FORMATS = [
    Format(group, zero_points, dtype)
    for group in (32, 64, 128, w4a16_format.CHANNEL)
    for zero_points in (False, True)
    for dtype in DTYPES
]
UINT4, UINT4B8 = "uint4", "uint4b8"
SCALAR_TYPE = types.SimpleNamespace(
    scalar_types=types.SimpleNamespace(uint4=UINT4, uint4b8=UINT4B8)
)
UTILS = "model_executor.layers.quantization.utils"
every_format = pytest.mark.parametrize("given", FORMATS, ids=lambda one: one.name)


def _layer(given: Format) -> Layer:
    dtype = DTYPES[given.dtype]
    return make_layer(
        N, K, given.group_size, ROWS, dtype, zero_points=given.zero_points, device="cpu"
    )


def _group(given: Format) -> int:
    return K if given.group_size == w4a16_format.CHANNEL else given.group_size


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 words along the last side, lowest nibble first."""
    return ((words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 0xF).flatten(-2)


def _give(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Stand these in for vLLM's modules, by the last part of their names."""

    def vllm(*names: str) -> list[Any]:
        return [modules[name.rpartition(".")[2]] for name in names]

    monkeypatch.setattr(w4a16_stock, "vllm_modules", vllm)


# --- layers --------------------------------------------------------------------------------------


@every_format
def test_a_layer_has_its_formats_shapes_and_our_op_agrees_with_its_gold(given: Format) -> None:
    layer, groups = _layer(given), K // _group(given)
    assert layer.group_size == _group(given)
    assert layer.x.dtype is layer.weight_scale.dtype is DTYPES[given.dtype]
    assert layer.weight_packed.shape == (N, K // 8)
    assert layer.weight_scale.shape == (N, groups)
    zero_bytes = 0
    if given.zero_points:
        assert layer.weight_zero_point is not None
        assert layer.weight_zero_point.shape == (N // 8, groups)
        assert layer.weight_zero_point.dtype is torch.int32
        zero_bytes = N * groups // 2
        assert len(layer.stored_zeros().unique()) > 1
    else:
        assert layer.weight_zero_point is None
        assert layer.stored_zeros().eq(8).all()
    assert layer.weight_bytes() == N * K // 2 + 2 * N * groups + zero_bytes
    assert layer.why_wrong(w4a16_stock.taut(layer)(layer.x)) is None
    assert layer.why_wrong(w4a16_rivals.cublas(layer)(layer.x)) is None


@every_format
def test_gold_is_the_formula(given: Format) -> None:
    layer, group = _layer(given), _group(given)
    q = _nibbles(layer.weight_packed).double()
    zeros = layer.stored_zeros().double().repeat_interleave(group, 1)
    weight = (q - zeros) * layer.weight_scale.double().repeat_interleave(group, 1)
    torch.testing.assert_close(layer.gold, layer.x.double() @ weight.t())
    assert 0.3 < layer.gold.std() < 3
    assert layer.budget < 0.1 * layer.gold.abs().max()


def test_the_budget_tells_zero_points_from_none() -> None:
    layer = _layer(Format(32, zero_points=True))
    symmetric = Layer(
        layer.x, layer.weight_packed, layer.weight_scale, 32, layer.checked, layer.gold, 0.0
    )
    assert "above the budget" in str(layer.why_wrong(w4a16_stock.taut(symmetric)(layer.x)))


def test_a_symmetric_layer_is_drawn_as_before_there_were_zero_points() -> None:
    """The order of the draws: words, scales, activations; figures of earlier visits hang on it."""
    one, other = (_layer(Format(64, zeros)) for zeros in (False, True))
    generator = torch.Generator().manual_seed(N + K)
    words = torch.randint(-(2**31), 2**31, (N, K // 8), generator=generator).to(torch.int32)
    scale = (torch.rand(N, K // 64, generator=generator) + 0.5) / (5 * K**0.5)
    x = torch.randn(ROWS, K, generator=generator).to(torch.bfloat16)
    for layer in (one, other):
        assert layer.weight_packed.equal(words)
        assert layer.weight_scale.equal(scale.to(torch.bfloat16))
        assert layer.x.equal(x)


@pytest.mark.parametrize(
    ("size", "group", "dtype", "said"),
    [
        ((48, 320), 128, torch.bfloat16, "group size 128 does not divide the 320 input"),
        ((48, 256), 48, torch.bfloat16, "must be 32, 64, 128 or one group a channel, got 48"),
        ((40, 256), 32, torch.bfloat16, "output features must be a multiple of 16"),
        ((48, 256), 32, torch.float32, "must be float16 or bfloat16"),
    ],
)
def test_a_layer_our_kernels_do_not_take_is_refused(
    size: tuple[int, int], group: int, dtype: torch.dtype, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_layer(*size, group, 4, dtype, device="cpu")


# --- what rivals are fed -------------------------------------------------------------------------


@every_format
def test_marlin_gets_what_its_kernel_class_prepares(
    given: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permutations are vLLM's and left out here, so the product can be formed from the operands."""
    layer, groups = _layer(given), K // _group(given)

    def zero_points(zp: torch.Tensor, size_k: int, size_n: int, num_bits: int) -> torch.Tensor:
        assert (zp.shape, zp.dtype, num_bits) == ((groups, N), torch.int32, 4)
        assert (size_k, size_n) == (groups, N)
        assert zp.is_contiguous()
        return formats._pack_columns(zp)

    def permute_scales(s: torch.Tensor, size_k: int, size_n: int, group: int) -> torch.Tensor:
        assert (s.shape, size_k, size_n, group) == ((groups, N), K, N, given.group_size)
        return s

    def apply(*, input: torch.Tensor, weight: torch.Tensor, **given_too: Any) -> torch.Tensor:
        assert given_too["wtype"] == (UINT4 if given.zero_points else UINT4B8)
        packed = given_too["weight_zp"]
        scale = given_too["weight_scale"].float()
        zeros = _nibbles(packed).float() if packed.numel() else torch.full_like(scale, 8.0)
        q = _nibbles(weight.t()).t().float().unflatten(0, (groups, -1))
        dense = ((q - zeros[:, None]) * scale[:, None]).flatten(0, 1)
        return (input.float() @ dense).to(input.dtype)

    utils = types.SimpleNamespace(
        MARLIN_SUPPORTED_GROUP_SIZES=[-1, 32, 64, 128],
        marlin_make_empty_g_idx=lambda device: torch.empty(0, dtype=torch.int32),
        marlin_make_workspace_new=lambda device: None,
        marlin_permute_scales=permute_scales,
        marlin_zero_points=zero_points,
        apply_gptq_marlin_linear=apply,
    )
    ops = types.SimpleNamespace(gptq_marlin_repack=lambda words, **_: words)
    _give(monkeypatch, _custom_ops=ops, marlin_utils=utils, scalar_type=SCALAR_TYPE)
    assert layer.why_wrong(w4a16_stock.marlin(layer)(layer.x)) is None


def _machete(monkeypatch: pytest.MonkeyPatch, groups: list[int]) -> None:
    """Stand in for vLLM's Machete, with its rule for group sizes and every rounding it might do."""

    def multiply(
        a: torch.Tensor,
        b_q: torch.Tensor,
        b_type: str,
        b_group_scales: torch.Tensor,
        b_group_zeros: torch.Tensor | None,
        b_group_size: int,
    ) -> torch.Tensor:
        assert (b_type == UINT4) == (b_group_zeros is not None)
        group = K if b_group_size == -1 else b_group_size
        q = _nibbles(b_q.t()).t() - (8 if b_type == UINT4B8 else 0)
        weight = q.to(a.dtype) * b_group_scales.repeat_interleave(group, 0)
        if b_group_zeros is not None:
            assert b_group_zeros.is_contiguous()
            assert b_group_zeros.dtype is a.dtype
            weight = weight + b_group_zeros.repeat_interleave(group, 0)
        return (a.float() @ weight.float()).to(a.dtype)

    def prepack(words: torch.Tensor, **kinds: Any) -> torch.Tensor:
        assert words.stride(0) == 1  # the K words next to each other
        return words

    ops = types.SimpleNamespace(machete_prepack_B=prepack, machete_mm=multiply)
    utils = types.SimpleNamespace(query_machete_supported_group_sizes=lambda dtype: groups)
    _give(monkeypatch, _custom_ops=ops, machete_utils=utils, scalar_type=SCALAR_TYPE)


@every_format
def test_machete_gets_what_its_kernel_class_prepares_within_the_budget(
    given: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machete(monkeypatch, [-1, 32, 64, 128])
    layer = _layer(given)
    assert layer.why_wrong(w4a16_stock.machete(layer)(layer.x)) is None


def _humming(given: Format, asked: list[str]) -> dict[str, Any]:
    """Stand in for Humming: weights stay as on disk, so the product can be formed from them."""

    class Layer(torch.nn.Module):
        def __init__(
            self, shape_n: int, shape_k: int, weight_config: Any, torch_dtype: torch.dtype
        ) -> None:
            super().__init__()
            assert (shape_n, shape_k, torch_dtype) == (N, K, DTYPES[given.dtype])
            channel = given.group_size == w4a16_format.CHANNEL
            assert weight_config == {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "type": "int",
                "num_bits": 4,
                "strategy": "channel" if channel else "group",
                "group_size": None if channel else given.group_size,
                "symmetric": not given.zero_points,
            }

        def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
            assert set(tensors) - {"weight_zero_point"} == {"weight_packed", "weight_scale"}
            self.stored = tensors

        def transform(self) -> None:
            names = {"weight_packed": "weight", "weight_zero_point": "zero_point"}
            for name, tensor in self.stored.items():
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                setattr(self, names.get(name, name), parameter)
            self.humming_config = types.SimpleNamespace(to_str=lambda: "config")

    def forward(config: Any, **call: Any) -> torch.Tensor:
        assert config.to_str() == "config"
        assert not call["locks"].any()
        assert call["locks"].dtype is torch.int32
        asked.append(call["tuning_config"])
        scale, packed = call["weight_scale"], call["zero_point"]
        zeros = torch.full_like(scale, 8.0)
        if packed is not None:
            zeros = formats.unpack_zero_point(packed, N) + 8.0
        q = _nibbles(call["weight"]).float().unflatten(1, (scale.shape[1], -1))
        dense = ((q - zeros[..., None]) * scale.float()[..., None]).flatten(1)
        return (call["inputs"].float() @ dense.t()).to(call["inputs"].dtype)

    class Kernel:
        @staticmethod
        def prepare_kernels(config: str, compute: None, tuning: str, device: torch.device) -> None:
            asked.append(f"compiled {tuning}")

    def heuristics(config: Any, M: int, device: torch.device) -> dict[str, int]:
        return {"block": max(16, M)}

    return {
        "humming.layer": types.SimpleNamespace(HummingLayer=Layer),
        "humming.forward": types.SimpleNamespace(humming_forward=forward),
        "humming.kernel.humming": types.SimpleNamespace(HummingKernel=Kernel),
        "humming.tune": types.SimpleNamespace(get_heuristics_config=heuristics),
    }


@every_format
def test_humming_gets_the_disks_layer_and_its_own_choice_for_the_tokens(
    given: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, asked = _layer(given), list[str]()
    modules = _humming(given, asked)
    monkeypatch.setattr(w4a16_stock.importlib, "import_module", modules.__getitem__)
    call = w4a16_stock.humming(layer)
    assert layer.why_wrong(call(layer.x)) is None
    assert layer.why_wrong(call.copy()(layer.x[:2])) is None
    assert asked == ['{"block": 20}', '{"block": 16}']
    asked.clear()
    w4a16_stock.compile_humming(layer, (1, 16, 20))  # the first two want the same kernel
    assert sorted(asked) == ['compiled {"block": 16}', 'compiled {"block": 20}']


def test_humming_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(w4a16_stock.importlib, "import_module", missing)
    with pytest.raises(w4a16_stock.UnavailableError, match=r"^Humming: No module named"):
        w4a16_stock.humming(_layer(Format()))


@every_format
def test_vllms_triton_kernel_gets_the_layout_it_documents(
    given: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module's docstring (0.26 and 0.32): words [K, N/8] along N, scales [K/G, N].

    Zero points are [K/G, N/8], a bias where they are None.
    """
    layer, group = _layer(given), _group(given)
    asked: list[int] = []

    def gemm(
        a: torch.Tensor,
        b_q: torch.Tensor,
        scales: torch.Tensor,
        qzeros: torch.Tensor | None,
        group_size: int,
        zp_bias: int = 8,
    ) -> torch.Tensor:
        assert a.is_contiguous() and b_q.is_contiguous() and scales.is_contiguous()
        asked.append(len(a))
        assert (group_size, scales.shape) == (group, (K // group, N))
        assert (qzeros is not None) == given.zero_points
        zeros: torch.Tensor | int = zp_bias
        if qzeros is not None:
            assert qzeros.shape == (K // group, N // 8)
            assert qzeros.is_contiguous()
            zeros = _nibbles(qzeros).repeat_interleave(group, 0)
        weight = (_nibbles(b_q) - zeros) * scales.repeat_interleave(group, 0).float()
        return (a.float() @ weight).to(a.dtype)

    _give(monkeypatch, triton_w4a16=types.SimpleNamespace(triton_w4a16_gemm=gemm))
    call = w4a16_rivals.PREPARE["vLLM Triton"](layer)
    assert layer.why_wrong(call(layer.x)) is None
    assert layer.why_wrong(call(layer.x[:2])) is None
    assert asked == [ROWS, 2]


@every_format
def test_gemlite_gets_zero_points_as_stored(given: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `pack`: W ~ (Wq - zeros) * scales, both [N, K/G]."""
    layer, group = _layer(given), _group(given)

    class A16Wn:
        def __init__(self, device: str, dtype: torch.dtype) -> None:
            assert dtype is layer.x.dtype

        def from_weights(
            self, W_q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, size: int
        ) -> Callable[[torch.Tensor], torch.Tensor]:
            assert (W_q.dtype, bits, size) == (torch.uint8, 4, group)
            assert zeros.shape == scales.shape == (N, K // group)
            assert zeros.dtype is scales.dtype
            wide = (one.float().repeat_interleave(group, 1) for one in (zeros, scales))
            zero, scale = wide
            return lambda x: (x.float() @ ((W_q.float() - zero) * scale).t()).to(x.dtype)

    helper = types.SimpleNamespace(A16Wn=A16Wn)
    monkeypatch.setattr(w4a16_rivals.importlib, "import_module", lambda name: helper)
    assert layer.why_wrong(w4a16_rivals.gemlite(layer)(layer.x)) is None


def _stand_in(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Give the rivals these for libraries, by the last part of their names."""

    def imported(name: str) -> Any:
        return modules[name.rpartition(".")[2]]

    monkeypatch.setattr(w4a16_rivals.importlib, "import_module", imported)


class Int4:
    """quack's symmetric format: bytes of two codes [N, K/2], scales [N, K/G]."""

    def __init__(self, group: int = 128) -> None:
        self.group = group

    def prepare(self, q: torch.Tensor, sf: Any) -> tuple[torch.Tensor, Any]:
        assert q.dtype is torch.uint8
        assert q.shape == (N, K // 2)
        return q, sf


class Int4Awq(Int4):
    """With zero points [N, K/G] uint8 beside the scales."""

    def prepare(self, q: torch.Tensor, sf: Any) -> tuple[torch.Tensor, Any]:
        scales, zeros = sf
        assert zeros.dtype is torch.uint8
        return q, torch.stack((scales, zeros.to(scales.dtype)))


def _quack_product(
    x: torch.Tensor, blob: torch.Tensor, strip: torch.Tensor, n_out: int, wformat: Int4
) -> torch.Tensor:
    codes = torch.stack((blob & 0xF, blob >> 4), -1).flatten(1).float()
    scale, zero = strip if isinstance(wformat, Int4Awq) else (strip, torch.full_like(strip, 8))
    wide = [one.float().repeat_interleave(wformat.group, 1) for one in (zero, scale)]
    assert n_out == N
    return (x.float() @ ((codes - wide[0]) * wide[1]).t()).to(x.dtype)


@every_format
def test_quack_gets_the_disks_bytes_and_refuses_other_formats(
    given: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    w4a16_rivals._quack_kind.cache_clear()
    _stand_in(
        monkeypatch,
        gemm_w4=types.SimpleNamespace(gemm_w4a16=_quack_product),
        formats=types.SimpleNamespace(Int4=Int4, Int4Awq=Int4Awq),
    )
    layer = _layer(given)
    if given.dtype != "bf16" or (given.zero_points and _group(given) != 128):
        with pytest.raises(w4a16_stock.OtherFormatError, match="quack: "):
            w4a16_rivals.quack(layer)
        return
    assert layer.why_wrong(w4a16_rivals.quack(layer)(layer.x)) is None
    twice = [w4a16_rivals._quack_kind(_group(given), given.zero_points) for _ in range(2)]
    assert twice[0] is twice[1], "it compiles for each object"
    w4a16_rivals._quack_kind.cache_clear()


@every_format
def test_turbomind_gets_awqs_layer_and_measures_a_problem_once(
    given: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes [K, N], scales and zero points [K/G, N]."""
    calls: list[str] = []

    class Linear:
        def get_weight_plan(self, weight_format: int, dtype: torch.dtype) -> int:
            assert dtype is layer.x.dtype
            return weight_format

        def prepare_weight(
            self, weight: torch.Tensor, plan: int, scales: torch.Tensor, zeros: torch.Tensor
        ) -> torch.Tensor:
            assert weight.dtype is zeros.dtype is torch.uint8
            wide = [one.float().repeat_interleave(plan, 0) for one in (zeros, scales)]
            return (weight.float() - wide[0]) * wide[1]

        def tune(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[str, torch.Tensor, None]:
            calls.append("tune")
            return "plan", self(x, weight, "plan")[0], None

        def get_exec_plan(self, x: torch.Tensor, weight: torch.Tensor) -> str:
            calls.append("kept")
            return "plan"

        def __call__(
            self, x: torch.Tensor, weight: torch.Tensor, exec_plan: str
        ) -> tuple[torch.Tensor, None]:
            assert exec_plan == "plan"
            return (x.float() @ weight).to(x.dtype), None

    layer = _layer(given)
    _stand_in(
        monkeypatch,
        linear=types.SimpleNamespace(get_linear=Linear),
        weight_format=types.SimpleNamespace(AWQFormat=lambda block_in: block_in),
    )
    monkeypatch.setattr(w4a16_rivals, "_tuned", set())
    for _ in range(2):
        prepared = w4a16_rivals.turbomind(layer)
        for _ in range(2):
            assert layer.why_wrong(prepared(layer.x)) is None
    assert calls == ["tune", "kept"]


def test_a_format_that_turbomind_has_no_kernel_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear:
        def get_weight_plan(self, **query: Any) -> None:
            raise NotImplementedError("no GEMM family accepts it")

    _stand_in(
        monkeypatch,
        linear=types.SimpleNamespace(get_linear=Linear),
        weight_format=types.SimpleNamespace(AWQFormat=lambda block_in: block_in),
    )
    with pytest.raises(w4a16_stock.OtherFormatError, match="TurboMind: no GEMM family"):
        w4a16_rivals.turbomind(_layer(Format(32)))


@pytest.mark.parametrize("name", ["gemlite", "quack", "TurboMind"])
@pytest.mark.parametrize("error", [ImportError("not here"), OSError("libcublas.so.12: no file")])
def test_a_library_that_cannot_be_loaded_is_told(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported(name: str) -> Any:
        raise error

    monkeypatch.setattr(w4a16_rivals.importlib, "import_module", imported)
    with pytest.raises(w4a16_stock.UnavailableError, match=f": {error}"):
        w4a16_rivals.PREPARE[name](_layer(Format(128)))


def test_a_format_a_rival_does_not_take_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    _machete(monkeypatch, [-1, 64, 128])  # vLLM's rule, 0.26 and 0.32
    zeros = w4a16_stock.Prepared((), lambda x, own: torch.zeros(len(x), N))
    names = ("taut", "Machete", "gemlite")
    monkeypatch.setitem(w4a16_rivals.PREPARE, "gemlite", lambda layer: zeros)
    notes: list[str] = []
    monkeypatch.setattr(timing, "copies_needed", lambda size: 2)
    ready = w4a16._prepared(_layer(Format(32)), names, ROWS, notes)
    assert list(ready) == ["taut"]
    assert len(ready["taut"]) == 2
    assert notes[0] == (
        "Machete on 48×256: no row: group size 32 is none of vLLM's for it, [-1, 64, 128]"
    )
    assert notes[1].startswith("gemlite on 48×256: WRONG, not timed: error ")
    for other in (Format(64), Format(w4a16_format.CHANNEL, zero_points=True, dtype="fp16")):
        notes.clear()
        assert list(w4a16._prepared(_layer(other), names, ROWS, notes)) == ["taut", "Machete"]


# --- tuners --------------------------------------------------------------------------------------

TILE = DecodeTile(1, 1, 1, 4, 4, 1, fence=False)


@every_format
def test_tuners_run_a_tile_on_the_formats_own_operands(
    given: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the specification in place of the kernel: only with its zero points is it right."""

    def launch(tile: object, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        assert tile == TILE
        return w4a16_gemm_ref(x, *operands)

    monkeypatch.setattr(w4a16_launch, "launch", launch)
    layer = _layer(given)
    weights = layer.packed(2)
    assert weights[0].qweight.data_ptr() != weights[1].qweight.data_ptr()
    for module in (tune_w4a16_decode, tune_w4a16_wgmma):
        subject = module._subject(layer, ROWS, TILE, weights)
        assert subject.copies == 2
        for i in range(2):
            y = subject.call(i)
            assert isinstance(y, torch.Tensor)
            assert layer.why_wrong(y) is None


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_tiles_are_compiled_by_operands_like_the_layers(group_size: int, zero_points: bool) -> None:
    (own,) = _layer(Format(group_size, zero_points)).packed(1)
    empty = empty_weight(N, K, group_size, zero_points=zero_points, device="cpu")
    layer = _layer(Format(group_size, zero_points))
    blank = blank_layer(N, K, group_size, zero_points=zero_points, device="cpu")
    pairs = list(zip(own, empty, strict=True))
    pairs += [
        (layer.weight_packed, blank.weight_packed),
        (layer.weight_scale, blank.weight_scale),
        (layer.weight_zero_point, blank.weight_zero_point),
    ]
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


def _tuned(*words: str) -> Format:
    parser = argparse.ArgumentParser()
    w4a16_format.add_tuned_arguments(parser)
    return w4a16_format.tuned(parser.parse_args(words))


def test_a_tuner_takes_one_format_and_its_rows_say_so() -> None:
    assert _tuned() == w4a16_format.DEFAULT
    given = _tuned("--group-size", "32", "--zero-points")
    assert given == Format(32, zero_points=True)
    assert w4a16_format.tuner("a.b", given) == "python -m a.b --group-size 32 --zero-points"
    assert w4a16_format.tuner("a.b", _tuned()) == "python -m a.b"
    one = tune_w4a16_decode.Result("o", 64, 128, 1, 2.0, TILE)
    other = tune_w4a16_wgmma.Result("o", 64, 128, 16, 2.0, "decode")
    for format_, field in ((given, {"format": "g32-zp"}), (_tuned(), {})):
        for rows in (
            tune_w4a16_decode._table_rows([one], format_),
            tune_w4a16_wgmma.table_rows([other], format_),
        ):
            assert {k: v for k, v in rows[0].items() if k == "format"} == field
    text = {"gpu": "card", "source": "s"}
    rows = tune_w4a16_decode._table_rows([one], given)
    assert tiles_decode.parse(json.dumps(text | {"rows": rows}), "t.json").choices
    rows = tune_w4a16_wgmma.table_rows([other], given)
    assert tiles_wgmma.parse(json.dumps(text | {"rows": rows}), "t.json").choices


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_ring_candidates_of_a_format_keep_their_stages(group_size: int, has_zeros: bool) -> None:
    given = Format(group_size, has_zeros)
    for (wide, deep), M in itertools.product(shapes.PRODUCTS.values(), (16, 32, 64)):
        for tile in decode_ring_candidates(wide, deep, M, given):
            tokens = token_tiles(M)
            assert tile.stages_that_fit(tokens, group_size, has_zeros=has_zeros) == tile.stages
    forms = {t.registers for t in decode_ring_candidates(8192, 8192, 16, given)}
    assert (168 in forms) == (group_size == 32)


def test_small_groups_are_tried_with_shorter_queues() -> None:
    size, lean = (4096, 4096), set(w4a16_known_tiles.lean_decode_tiles(4096, 4096))
    plain, small = Format(), Format(32, zero_points=True)
    for known in (False, True):
        tried = tune_w4a16_decode._tried(*size, plain, known=known)
        more = tune_w4a16_decode._tried(*size, small, known=known)
        assert len(more) == len(set(more))
        assert set(more) == (lean if known else lean | set(tried))


# --- options and files ---------------------------------------------------------------------------


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    w4a16_format.add_arguments(parser)
    return parser.parse_args(words)


def test_options_name_formats() -> None:
    products = {"o": (4096, 4096)}
    assert w4a16_format.chosen(_parsed(), products) == [Format(128, False, "bf16")]
    words = ("--group-size", "32,channel", "--group-size", "32", "--zero-points", "--dtype", "fp16")
    found = w4a16_format.chosen(_parsed(*words), products)
    assert found == [Format(32, True, "fp16"), Format(-1, True, "fp16")]
    assert [one.name for one in found] == ["g32 zp fp16", "channel zp fp16"]
    assert [one.file_name for one in found] == ["w4a16-g32-zp-fp16", "w4a16-channel-zp-fp16"]
    assert Format().file_name == "w4a16"
    assert len({one.file_name for one in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize("words", [["--group-size", "48"], ["--dtype", "fp32"]])
def test_an_unknown_format_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _parsed(*words)
    assert words[0] in capsys.readouterr().err


def test_a_group_that_does_not_divide_k_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(shapes.PRODUCTS, "o", (4096, 4160))
    words = ["--output", str(tmp_path), "--shape", "o", "--group-size", "64,128"]
    assert w4a16.main(words) == 2
    said = capsys.readouterr().err
    assert said == "error: g128 bf16 on o: group size 128 does not divide the 4160 input features\n"
    assert not list(tmp_path.iterdir())


def _rows() -> list[report.Row]:
    times = {"taut": 10.0, "Marlin": 15.0, "Machete": 25.0}
    return [
        report.Row("o", 64, 128, M, kernel, timing.Timing(us, us, us), 4_000_000, 1e12)
        for kernel, us in times.items()
        for M in (1, 64)
    ]


def test_rows_say_their_format_and_the_default_file_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    w4a16_format.write(_rows(), ["a note"], 1e12, tmp_path / "new", w4a16_format.DEFAULT)
    report.write(_rows(), ["a note"], 1e12, tmp_path / "old", "w4a16")
    for ending in ("csv", "md"):
        new, old = (tmp_path / folder / f"w4a16.{ending}" for folder in ("new", "old"))
        assert new.read_bytes() == old.read_bytes()
    given = Format(32, zero_points=True, dtype="fp16")
    w4a16_format.write(_rows(), ["a note"], 1e12, tmp_path, given)
    with (tmp_path / "w4a16-g32-zp-fp16.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["kernel"], row["us"]) for row in rows][2] == ("Marlin g32 zp fp16", "15.000")
    assert {(row["group_size"], row["zero_points"], row["dtype"]) for row in rows} == {
        ("32", "yes", "fp16")
    }
    text = (tmp_path / "w4a16-g32-zp-fp16.md").read_text()
    assert "1.50 (Marlin g32 zp fp16) | 40% |" in text
    assert "- every row: groups of 32, zero points, fp16\n- a note\n" in text


@every_format
def test_a_table_of_kernels_is_made_of_groups_in_bf16_each_format_apart(
    given: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    w4a16_format.write(_rows(), [], 1e12, tmp_path, given)
    path = tmp_path / f"{given.file_name}.csv"
    if given.dtype == "bf16" and given.group_size != w4a16_format.CHANNEL:
        cells = measured_table.read([path])
        assert set(cells) == {(64, 128, given.weights)}
        assert cells[64, 128, given.weights][1] == {"taut": 10.0, "Marlin": 15.0, "Machete": 25.0}
    else:
        with pytest.raises(ValueError, match="rows of another format"):
            measured_table.read([path])
    points, _, ours = plots.read(path)
    assert {point.panel for point in points} == {"o 64×128, µs"}
    assert sum(point.line.startswith(ours) for point in points) == 2


def test_every_format_asked_for_is_measured_in_files_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the command but the card: layers on the CPU, made-up times."""
    asked: list[tuple[Any, ...]] = []

    def on_cpu(*given: Any, **named: Any) -> Layer:
        asked.append((*given, named["zero_points"]))
        return make_layer(*given, **named, device="cpu")

    times = timing.Timing(10.0, 9.0, 11.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "copy_ceiling", lambda: 1e12)
    monkeypatch.setattr(timing, "copies_needed", lambda size: 2)
    monkeypatch.setattr(timing, "host_cost", lambda call: 1.0)
    monkeypatch.setattr(timing, "measure", lambda subjects, *_: [times for _ in subjects])
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card"})
    monkeypatch.setattr(plots, "draw_or_say", lambda path: f"drawn {path.name}")
    monkeypatch.setattr(w4a16, "make_layer", on_cpu)
    monkeypatch.setitem(shapes.PRODUCTS, "o", (N, K))
    _machete(monkeypatch, [-1, 64, 128])
    words = ["--output", str(tmp_path), "--shape", "o", "--tokens", "1,16", "--dtype", "bf16"]
    words += ["--kernel", "taut", "--kernel", "Machete", "--group-size", "128,32"]
    assert w4a16.main(words) == 0
    assert asked == [(N, K, group, 16, torch.bfloat16, False) for group in (128, 32)]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"w4a16{part}.{end}" for part in ("", "-g32-bf16") for end in ("csv", "md")}
    said = capsys.readouterr().out
    assert "format g32 bf16\n" in said
    assert "Machete on 48×256: no row: group size 32" in said
    assert "Machete" not in (tmp_path / "w4a16-g32-bf16.csv").read_text()
    assert "no row: group size 32" in (tmp_path / "w4a16-g32-bf16.md").read_text()
    assert "Machete" in (tmp_path / "w4a16.csv").read_text()
