"""Norms, activations and RoPE in vLLM: who decides, what is told to vLLM, what it holds then."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_kernels.activation import silu_mul_launch
from taut_kernels.launch.tile_tables import Table
from taut_kernels.norm import rms_norm_launch
from taut_kernels.rope import rope_launch
from taut_kernels.rowwise import quantize
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.vllm_plugin import fused_ops, warm_up

SCRIPT = Path(__file__).with_name("vllm_fused_ops.py")


def test_who_asks_what_a_card_would_use_loads_no_compiler(run_python: Any) -> None:
    """`taut doctor` does, on machines without a GPU, too."""
    code = (
        "import sys; from taut_kernels.vllm_plugin import fused_ops; "
        "assert fused_ops.used_by_default('NVIDIA H200'); "
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("card", {})
    monkeypatch.setattr(tiles_fused, "tables", lambda: {"card": table})


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("gpu", "mode", "reason"),
    [
        ("card", "prefer", None),
        ("card", "require", None),
        ("other", "require", None),
        ("other", "prefer", "not measured against vLLM's on other; TAUT_KERNELS=require"),
        ("card", "off", "TAUT_KERNELS=off"),
        (None, "require", "no CUDA device"),
    ],
)
def test_reasons_and_options_agree(gpu: str | None, mode: str, reason: str | None) -> None:
    found = fused_ops.why_not_fused_ops(gpu, mode)
    options = fused_ops.engine_options(gpu, mode)
    if reason is None:
        assert found is None
        assert options["--ir-op-priority"]["rms_norm"][0] == "taut"
        json.dumps(options)
    else:
        assert reason in str(found)
        assert options == {}


def test_summary_is_one_line() -> None:
    found: dict[str, Any] = {
        "providers": {"rms_norm": "taut"},
        "custom_ops": {"SiluAndMul": {"taut": 32}},
        "reason": None,
    }
    assert fused_ops.summary(found) == "rms_norm=taut, SiluAndMul=taut ×32"
    assert fused_ops.summary(found | {"reason": "why"}).endswith("; not ours: why")


@pytest.fixture(scope="module")
def answer(run_with_vllm: Any) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    process = run_with_vllm(str(SCRIPT), "compiled")
    assert process.returncode == 0, process.stderr[-3000:]
    line = next(line for line in process.stdout.splitlines() if line.startswith("ANSWER "))
    found: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return found


@pytest.mark.vllm
def test_vllm_takes_our_providers_and_classes(answer: dict[str, Any]) -> None:
    assert {"taut", "native", "vllm_c"} <= set(answer["providers"])
    assert answer["inplace"] is True
    taken = {"rows": True, "variance": False, "fp64": False, "heads": False, "columns": False}
    assert answer["takes"] == taken
    # Without a CUDA device nothing becomes live by itself.
    assert answer["supported"] is False
    assert answer["replaced"] == []
    assert answer["live_providers"] == {"rms_norm": "native", "fused_add_rms_norm": "native"}
    assert answer["parsed"] == {
        "priority": ["taut"],
        "passes": {"post_grad_custom_post_pass": fused_ops.PASS},
        "custom_ops": ["+quant_fp8"],
        "fuse": [False, False, False],
    }
    # Replaced by force: the classes compute what vLLM's compute.
    assert {"SiluAndMul", "SwigluOAIAndMul", "RotaryEmbedding"} <= set(answer["replaced_by_force"])
    assert "Llama3RotaryEmbedding" in answer["replaced_by_force"]
    assert "YaRNScalingRotaryEmbedding" in answer["replaced_by_force"]
    # A forward of their own, of which Fourier's has the native one only.
    for other in ("MRotaryEmbedding", "XDRotaryEmbedding", "FourierRotaryEmbedding"):
        assert other not in answer["replaced_by_force"]
    assert answer["class"] == "TautSiluAndMul"
    assert answer["enabled"] is True
    for error in ("norm_error", "add_norm_error", "silu_error", "rope_error"):
        assert answer[error] <= 1e-5
    assert answer["live"] == {"SiluAndMul": {"taut": 1}, "RotaryEmbedding": {"taut": 1}}
    # In place without Inductor; into new tensors, in the shapes of the old, with it.
    shapes = {"shapes": [[3, 256], [3, 128]], "off": True}
    assert answer["in_graph"] == [False, False, True, False]
    eager, compiled = (answer["rotated"][mode] for mode in ("NONE", "VLLM_COMPILE"))
    assert max(eager.pop("error"), compiled.pop("error")) <= 1e-5
    assert eager == shapes | {"in_place": True, "untouched": False}
    assert compiled == shapes | {
        "in_place": False,
        "untouched": True,
        "traced": True,
        "alone": True,
        "fallbacks": [0, 0],
        "taken": 1,
    }


@pytest.mark.vllm
def test_norms_that_ours_does_not_take_are_recorded_once(answer: dict[str, Any]) -> None:
    loaded, traced, asked, lowered, without_ops = answer["refusals"]["found"]
    assert loaded == traced == {}
    assert asked == {
        "rms_norm": [
            "the mean square is taken over a part of the row",
            "activations are torch.float64",
        ],
        "fused_add_rms_norm": [
            "the residual is torch.float16, the activations are torch.float32",
            "the residual: a row of 64 columns at stride 3",
        ],
    }
    assert lowered == "the weight is torch.float64, the activations are torch.float32"
    assert without_ops is False, "gauges could not read such ops"
    assert answer["refusals"]["again"] == [{}, {}], "the next model starts anew"


ANGLES = "RotaryEmbedding not ours: angles in another type than the queries, in a compiled graph"
LOGGED = {
    "ours": [],
    "queries alone": [],
    "angles": [],  # said when they were loaded
    "heads": ["RotaryEmbedding not ours: heads not side by side in a row"],
    "positions": ["RotaryEmbedding not ours: positions of several dimensions"],
    "keys": ["RotaryEmbedding not ours: keys in another type than the queries"],
    "gaps": ["SiluAndMul not ours: activations with gaps, or in another type than ours takes"],
}


@pytest.mark.vllm
def test_rotations_are_counted_as_they_will_run_and_others_logged_once(
    answer: dict[str, Any],
) -> None:
    eager, compiled = (answer["not_ours"][mode] for mode in ("NONE", "VLLM_COMPILE"))
    # Without a graph vLLM converts the table once, and ours takes it.
    assert eager.pop("live") == {"RotaryEmbedding": {"taut": 3}}
    assert eager.pop("loaded") == []
    assert compiled.pop("live") == {"RotaryEmbedding": {"taut": 1, "vllm": 2}}
    assert compiled.pop("loaded") == [ANGLES]
    assert eager == compiled == LOGGED


class RMSNorm(torch.nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(columns, dtype=torch.bfloat16))


class Mlp(torch.nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(2, 2 * columns)
        self.gate_up_proj.output_size_per_partition = 2 * columns
        self.gate_up_proj.params_dtype = torch.float16
        self.act_fn = torch.nn.SiLU()


def test_warm_up_reads_the_widths_off_the_model() -> None:
    model = torch.nn.ModuleList([RMSNorm(64), RMSNorm(64), RMSNorm(128), Mlp(96)])
    quantised = torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    model.register_parameter("weight_q", quantised)
    found = warm_up.widths_of(model)
    assert found.norms == {(64, torch.bfloat16), (128, torch.bfloat16)}
    assert found.activations == {(96, torch.float16)}
    assert found.quantised == {torch.int8}


class Linear(torch.nn.Module):
    """A linear layer after loading, as vLLM's classes name its sizes."""

    def __init__(self, weight: torch.dtype, scale: torch.Tensor | None = None, **sizes: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=weight), requires_grad=False)
        self.input_scale, self.params_dtype = scale, torch.bfloat16
        self.__dict__.update(sizes)


def test_warm_up_finds_what_is_quantised_row_by_row() -> None:
    int8, fp8, bf16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
    layers = [
        Linear(fp8, input_size=4096, input_size_per_partition=1024),
        Linear(fp8, input_size=4096, input_size_per_partition=1024),
        Linear(int8, input_size=96),
        Linear(fp8, torch.ones(()), input_size=64),  # a given scale
        Linear(bf16, input_size=32),
        Linear(int8),
    ]
    found = warm_up.widths_of(torch.nn.ModuleList(layers))
    assert found.inputs == {(1024, bf16, fp8), (96, bf16, int8)}


class TautRotary:
    """A rotary embedding of ours, as the plugin's classes name what they have."""

    head_size, is_neox_style, apart = 64, True, True

    def __init__(self, native: str | None = None) -> None:
        self.cos_sin_cache = torch.zeros(8, 48)
        self.query_dtype, self.native = torch.float16, native

    @classmethod
    def enabled(cls) -> bool:
        return True

    def why_native(self) -> str | None:
        return self.native


def attention(inside: dict[str, Any], **names: Any) -> torch.nn.Module:
    """An attention of a model, with names of its own, and vLLM's inside."""
    module = torch.nn.Module()
    module.__dict__.update({"rotary_emb": TautRotary()} | names)
    module.attn = torch.nn.Module()
    module.attn.__dict__.update({"kv_sharing_target_layer_name": None} | inside)
    return module


def test_warm_up_finds_heads_whatever_a_model_calls_them() -> None:
    """Names: Llama, Mistral, Qwen, Gemma; gpt-oss (totals, too); StableLM; GPT-J; Gemma 3n."""
    llama = {"num_heads": 8, "num_kv_heads": 2}
    oss = {"num_attention_heads": 64, "num_key_value_heads": 8}
    oss |= {"num_local_attention_heads": 32, "num_local_key_value_heads": 4}
    shared = {"num_heads": 6, "num_kv_heads": 3, "kv_sharing_target_layer_name": "layers.3.attn"}
    cases: list[tuple[torch.nn.Module, set[tuple[int, int]]]] = [
        (attention({}, **llama), {(8, 2)}),
        (attention(llama, **llama), {(8, 2)}),
        (attention({"num_heads": 32, "num_kv_heads": 4}, **oss), {(32, 4)}),
        (attention(llama, num_heads=8, num_key_value_heads=2), {(8, 2)}),
        (attention({"num_heads": 16, "num_kv_heads": 16}, num_heads=16), {(16, 16)}),
        (attention(shared, num_heads=6, num_kv_heads=3), {(6, 3), (6, 0)}),
        (attention(llama, rotary_emb=TautRotary("angles in another type")), set()),
        (attention(llama, rotary_emb=None), set()),
        (attention({}), set()),
    ]
    for module, heads in cases:
        found = warm_up.widths_of(torch.nn.ModuleList([module])).rotations
        wanted = {(*of, 64, 48, True, torch.float16, True) for of in heads}
        assert {dataclasses.astuple(each) for each in found} == wanted


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 0])
def test_warm_up_runs_every_tile_of_a_rotation(
    kv_heads: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tiles_fused.FusedTile] = []

    def launch(tile: Any, positions: Any, q: Any, k: Any, cache: Any, neox: Any, new: Any) -> None:
        seen.append(tile)
        assert (k is None) == (kv_heads == 0)
        assert (new is None) == (not apart)
        for part, heads in ((q, 4), (k, 2)):
            if part is not None:
                assert part.shape == (tile.rows, heads, 64)
                assert (part.dtype, part.stride(2)) == (torch.float16, 1)
        assert (positions.shape, cache.shape, neox) == ((tile.rows,), (1, 48), True)

    monkeypatch.setattr(rope_launch, "launch", launch)
    none: frozenset[Any] = frozenset()
    rotation = warm_up.Rotation(4, kv_heads, 64, 48, True, torch.float16, apart)
    widths = warm_up.Widths(none, none, none, rotations=frozenset({rotation}))
    assert warm_up.compile_all(widths, torch.device("cpu"), None) == len(seen) == len(set(seen))
    for M in (1, 7, 300, 5000):
        assert tiles_fused.lookup(None, "rope", 4 + kv_heads, M) in seen


def test_warm_up_runs_every_tile_of_quantisation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, torch.dtype, tiles_fused.FusedTile]] = []

    def launch(tile: Any, out: str, x: Any, y: Any, scales: Any) -> None:
        seen.append((out, x.shape[1], x.dtype, tile))
        assert x.shape == y.shape == (tile.rows, x.shape[1])
        assert scales.shape == (tile.rows, 1)

    monkeypatch.setattr(quantize, "launch", launch)
    none: frozenset[Any] = frozenset()
    bf16, fp16 = torch.bfloat16, torch.float16
    inputs = frozenset({(4096, bf16, torch.int8), (128, fp16, torch.float8_e4m3fn)})
    widths = warm_up.Widths(none, none, none, inputs=inputs)
    assert warm_up.compile_all(widths, torch.device("cpu"), None) == len(seen) == len(set(seen))
    for M in (1, 7, 300, 5000):
        assert ("int8", 4096, bf16, tiles_fused.lookup(None, "row_quant", 4096, M)) in seen
        assert ("fp8", 128, fp16, tiles_fused.lookup(None, "row_quant", 128, M)) in seen
    seen.clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert warm_up._quantise(128, fp16, torch.float8_e4m3fn, torch.device("cuda"), None) == 0
    assert seen == []


def test_warm_up_runs_every_tile_of_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, int, tiles_fused.FusedTile, bool]] = []

    def norm(tile: Any, out: str, x: Any, weight: Any, residual: Any, *rest: Any) -> None:
        seen.append(("norm", out, x.shape[1], tile, residual is not None))
        assert x.shape[0] == tile.rows == rest[1].shape[0]
        assert (rest[2] is None) == (out == "same")

    def activation(tile: Any, out: str, x: Any, *_: Any) -> None:
        seen.append(("silu", out, x.shape[1] // 2, tile, False))

    monkeypatch.setattr(rms_norm_launch, "launch", norm)
    monkeypatch.setattr(silu_mul_launch, "launch", activation)
    widths = warm_up.Widths(
        frozenset({(4096, torch.bfloat16)}),
        frozenset({(14336, torch.bfloat16)}),
        frozenset({torch.int8}),
    )
    assert warm_up.compile_all(widths, torch.device("cpu"), None) == len(seen) == len(set(seen))
    for M in (1, 7, 300, 5000):
        for name, op, N, residual in (
            ("norm", "rms_norm", 4096, False),
            ("norm", "add_rms_norm", 4096, True),
            ("silu", "silu_mul", 14336, False),
        ):
            for out, suffix in (("same", ""), ("int8", "_quant")):
                tile = tiles_fused.lookup(None, op + suffix, N, M)
                assert (name, out, N, tile, residual) in seen
