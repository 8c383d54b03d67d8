"""Stock vLLM's load of what is stored, tensor by tensor, and what it loads nowhere.

Every scheme as a dense model and as the experts of a mixture, whatever this machine can multiply.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stood_for import stored
from tiny_families import write_family
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama

from taut_deploy.compress import driver, resolve
from taut_deploy.diagnose.layer_schemes import read_quantization
from taut_deploy.diagnose.unserved import of_weights_alone
from taut_deploy.errors import RecipeError
from taut_deploy.recipe.schemes import SCHEMES

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

# A multiple of 256 is what vLLM's INT4 x FP8 experts take, and FP8 blocks are of 128.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OF_EXPERTS = {
    "mixtral": {"w13": ("w1", "w3"), "w2": ("w2",)},
    "qwen3_moe": {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)},
}
WITH_ROWS_TO_SPARE = ("model.embed_tokens.weight", "lm_head.weight")
# Made by vLLM: for the cache, and for inputs that are not rounded here.
NOT_STORED = (".self_attn.attn.", ".routed_experts.w13_input_", ".routed_experts.w2_input_")


@dataclass(frozen=True)
class Case:
    """A tiny model, and how all its layers or its experts are stored."""

    family: str
    scheme: str
    group: int | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        zeros = "" if self.symmetric else " with zero points"
        return f"{self.family} {self.scheme} g{self.group}{zeros}"

    @property
    def example(self) -> str:
        """The name of a layer that is stored so."""
        return "layers.0.mlp" + (".down_proj" if self.family == "llama" else ".experts.0.down_proj")

    def write(self, room: Path) -> Path:
        """Its checkpoint, compressed though vLLM may not load it."""
        text = write_calibration_text(room / "text.txt")
        if self.family == "llama":
            model = write_llama(
                room / "model", hidden=256, intermediate=256, layers=1, dtype=torch.bfloat16
            )
        else:
            wide = {} if self.family == "mixtral" else WIDE
            model = write_family(room / "model", self.family, torch.bfloat16, **wide)
        more = {"layers": ["*.experts.*"]} if self.family == "qwen3_moe" else {}
        if not self.symmetric:
            more["symmetric"] = False
        data = recipe_data(text, scheme=self.scheme, algorithm="rtn", group_size=self.group, **more)
        driver.compress(job_for(model, data, room / "out"))
        return room / "out"


def every(family: str) -> list[Case]:
    return [Case(family, name, 128 if one.grouped else None) for name, one in SCHEMES.items()]


CASES = [
    Case("mixtral", "W4A16", 32, symmetric=False),
    Case("llama", "W4AFP8", 64),
    *every("llama"),
    # Experts by tensor are refused for what vLLM computes, not for what it loads.
    *(case for case in every("qwen3_moe") if case.scheme != "FP8-TENSOR"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Every case's checkpoint, the refusal of experts that vLLM loads nowhere left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "_require_served", lambda *_: None)
        return {case: case.write(tmp_path_factory.mktemp("case")) for case in CASES}


@pytest.fixture(scope="module")
def run_script(run_with_vllm):
    def run(*arguments):
        script = Path(__file__).with_name("load_in_vllm.py")
        done = run_with_vllm(str(script), *arguments, env={"VLLM_PLUGINS": ""})
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("READ "))
        return json.loads(line.removeprefix("READ "))

    return run


@pytest.fixture(scope="module")
def refusals(checkpoints, run_script, tmp_path_factory):
    """Why vLLM did not load a case, None where it did."""
    file = tmp_path_factory.mktemp("asked") / "directories.json"
    file.write_text(json.dumps([str(path) for path in checkpoints.values()]))
    found = run_script("load", file)
    return {case: found[str(path)] for case, path in checkpoints.items()}


def said_of(checkpoint: Path, layer: str) -> str | None:
    """Why taut says that a layer is loaded on no device."""
    (group,) = read_quantization(json.loads((checkpoint / "config.json").read_text())).groups
    return group[1].unserved.why(layer, "cuda")


def sources(name: str, family: str) -> list[str]:
    """The stored tensors that vLLM puts one after another into a parameter."""
    module, _, leaf = name.replace(".routed_experts", "").rpartition(".")
    parent, _, last = module.rpartition(".")
    if last == "experts":
        stem, _, leaf = leaf.partition("_")
        parts = OF_EXPERTS[family][stem]
        return [f"{module}.{index}.{part}.{leaf}" for index in range(4) for part in parts]
    return [f"{parent}.{part}.{leaf}" for part in JOINED[last]] if last in JOINED else [name]


def expected(parts: list[str], tensors: Mapping[str, torch.Tensor], like: torch.Tensor):
    """What vLLM's parameter must hold."""
    flat = torch.cat([tensors[part].reshape(-1) for part in parts])
    return flat.reshape(like.shape).to(like.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_holds_what_was_stored(case, checkpoints, refusals):
    checkpoint = checkpoints[case]
    if said_of(checkpoint, case.example):
        assert refusals[case] is not None, "vLLM loads it after all"
        return
    assert refusals[case] is None
    tensors, used = stored(checkpoint), set()
    for name, found in load_file(checkpoint.parent / "loaded.safetensors").items():
        if any(part in name for part in NOT_STORED):
            continue
        parts = sources(name, case.family)
        used.update(parts)
        if name in WITH_ROWS_TO_SPARE:
            found = found[: len(tensors[name])]
        if not name.endswith("weight_shape"):  # of the last part, and in bf16
            assert torch.equal(found, expected(parts, tensors, found)), name
    assert used == tensors.keys()


@pytest.mark.parametrize(
    ("scheme", "symmetric"),
    [
        ("FP8-STATIC", True),
        ("FP8-TENSOR", True),
        ("W3A16", True),
        ("W4A8", True),
        ("W8A16", False),
    ],
)
def test_experts_that_vllm_does_not_serve_are_refused_by_name(scheme, symmetric, tmp_path):
    case = Case("qwen3_moe", scheme, 128 if SCHEMES[scheme].grouped else None, symmetric)
    with pytest.raises(
        RecipeError, match=rf"^stages: model\.layers\.0\.mlp\.experts\.0\.\w+ cannot be {scheme}: "
    ):
        case.write(tmp_path)


def test_experts_are_refused_where_vllm_has_no_kernel_for_them(run_script):
    found = run_script("kernels")
    assert len(found) == 12
    for asked, devices in found.items():
        bits, group, zeros = (
            json.loads(word.lower()) for word in asked.replace("None", "null").split()
        )
        on_cpu = of_weights_alone(bits, group, zero_points=zeros).expert_on_cpu
        assert ("cpu" in devices) == (on_cpu is None), asked
        assert ("cuda" in devices) == (bits == 4 or not zeros), asked
