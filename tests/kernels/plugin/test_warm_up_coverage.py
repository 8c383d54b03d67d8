"""Nothing compiles after loading: what serving launches, the plugin's warm-up launched before."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from taut_bench import engine
from taut_kernels.vllm_plugin import warm_up

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1600),  # the first test looks at every launch: minutes, many on old CPUs
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="the plugin's layers are vLLM's"
    ),
]


@pytest.fixture(scope="module")
def found(run_with_vllm: Any) -> dict[str, Any]:
    """Load and serve layers and models with Triton's compiler replaced by one that counts."""
    here = Path(__file__).parent
    path = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    script = str(here / "warm_up_forms.py")
    process = run_with_vllm(script, env={"PYTHONPATH": os.pathsep.join(path)}, timeout=1500)
    assert process.returncode == 0, process.stderr[-2000:]
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


@pytest.mark.parametrize("kind", ["w4a16", "8 bits", "fused"])
@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA X"])
def test_serving_compiles_nothing_that_loading_did_not(
    kind: str, card: str, found: dict[str, Any]
) -> None:
    part = found["survey"][f"{kind}, {card}, require"]
    assert part["late"] == [], "\n".join(part["late"][:10])
    # It was looked at: forms compiled at loading, and launches served from them.
    assert part["loaded"] > 300
    assert part["launches"] > 10_000


def test_before_a_layer_has_weights_all_that_it_will_launch_is_asked_for(
    found: dict[str, Any],
) -> None:
    part = found["asked"]
    assert part["late"] == [], "\n".join(part["late"][:10])
    assert part["layers"] == part["alike"] == 4 * 7


@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA X"])
def test_decodes_compile_nothing_late(card: str, found: dict[str, Any]) -> None:
    part = found["survey"][f"attention, {card}, require"]
    assert part["late"] == [], "\n".join(part["late"][:10])
    assert part["layers"] == 3 * 32
    assert part["loaded"] >= 4 * part["layers"]
    assert part["launches"] > 10_000


def test_layers_shared_with_cutlass_compile_nothing_late(found: dict[str, Any]) -> None:
    part = found["survey"]["8 bits, NVIDIA H200, prefer"]
    assert part["late"] == [], "\n".join(part["late"][:10])
    assert 0 < part["loaded"] < found["survey"]["8 bits, NVIDIA H200, require"]["loaded"]


def test_a_warm_up_that_forgets_something_is_noticed(found: dict[str, Any]) -> None:
    assert found["unnoticed"] == []
    # 31 sizes of W4A16 layers that compile what no other size does, 6 of fp8, 8 fields of a
    # model's widths, 17 tiles of the fused ops.
    assert len(found["mutations"]) >= 53
    # In place and apart; queries alone; gpt-oss, whose module has other names.
    assert sum("Rotation(" in what for what in found["mutations"]) == 4
    assert sum(what.startswith("w4a16") for what in found["mutations"]) >= 25
    assert sum(what.startswith("attention") for what in found["mutations"]) == 16


def test_norms_that_only_vllms_flag_brings_in_are_compiled_too(found: dict[str, Any]) -> None:
    assert found["by_flag"]["native"]["loaded"] == 0
    assert found["by_flag"]["taut"]["loaded"] > 0
    assert found["by_flag"]["taut"]["late"] == 0


def test_vllms_monitor_has_the_modes_the_engine_benchmark_offers(found: dict[str, Any]) -> None:
    assert tuple(found["monitor"]) == engine.JIT_MONITOR


@pytest.mark.parametrize(
    ("capability", "outs"),
    [((8, 0), ["same", "int8"]), ((9, 0), ["same", "fp8", "int8", "static_fp8"])],
)
def test_a_card_without_fp8_is_not_asked_to_compile_it(
    capability: tuple[int, int], outs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    none: frozenset[Any] = frozenset()
    quantised = frozenset({torch.int8, torch.float8_e4m3fn})
    widths = warm_up.Widths(none, none, quantised, static_scale=True)
    assert [out for out, _ in warm_up._outs(widths, torch.device("cuda"))] == outs
