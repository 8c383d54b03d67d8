"""Norms, activations and RoPE in vLLM: who decides, what is told to vLLM, what it holds then."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_kernels import tiles_fused
from taut_kernels.fused import rms_norm, silu_mul
from taut_kernels.vllm_plugin import fused_ops, warm_up

SCRIPT = Path(__file__).with_name("vllm_fused_ops.py")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tiles_fused.FusedTable("card", {})
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


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_takes_our_providers_and_classes(run_python: Any) -> None:
    process = run_python(str(SCRIPT))
    assert process.returncode == 0, process.stderr[-3000:]
    line = next(line for line in process.stdout.splitlines() if line.startswith("ANSWER "))
    answer = json.loads(line.removeprefix("ANSWER "))
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
        "fuse_norm_quant": False,
    }
    # Replaced by force: the classes compute what vLLM's compute.
    assert {"SiluAndMul", "SwigluOAIAndMul", "RotaryEmbedding"} <= set(answer["replaced_by_force"])
    assert "Llama3RotaryEmbedding" in answer["replaced_by_force"]
    assert "MRotaryEmbedding" not in answer["replaced_by_force"]
    assert answer["class"] == "TautSiluAndMul"
    assert answer["enabled"] is True
    for error in ("norm_error", "add_norm_error", "silu_error", "rope_error"):
        assert answer[error] <= 1e-5
    # Under Inductor, the default, the rotary embedding stays vLLM's.
    assert answer["live"] == {"SiluAndMul": {"taut": 1}, "RotaryEmbedding": {"vllm": 1}}


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


def test_warm_up_runs_every_tile_of_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, int, tiles_fused.FusedTile, bool]] = []

    def norm(tile: Any, out: str, x: Any, weight: Any, residual: Any, *rest: Any) -> None:
        seen.append(("norm", out, x.shape[1], tile, residual is not None))
        assert x.shape[0] == tile.rows == rest[1].shape[0]
        assert (rest[2] is None) == (out == "same")

    def activation(tile: Any, out: str, x: Any, *_: Any) -> None:
        seen.append(("silu", out, x.shape[1] // 2, tile, False))

    monkeypatch.setattr(rms_norm, "launch", norm)
    monkeypatch.setattr(silu_mul, "launch", activation)
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
