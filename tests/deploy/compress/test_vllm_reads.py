"""Stock vLLM, without our plugin, reads the formats as they are meant."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from stood_for import stored
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama

from taut_deploy.compress import driver
from taut_deploy.compress.formats.config import quantization_config
from taut_deploy.compress.formats.registry import weight_format
from taut_deploy.recipe import Quantize
from taut_deploy.recipe.schemes import SCHEMES

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

# Kernels behind them on a Hopper GPU, vLLM 0.32: Machete, Humming or Marlin; CUTLASS; CUTLASS or
# DeepGEMM for blocks; Marlin or Humming for FP4, whose products run in 16 bits there.
SERVED_BY = {
    "W8A8": "CompressedTensorsW8A8Int8",
    "W4A16": "CompressedTensorsWNA16",
    "W8A16": "CompressedTensorsWNA16",
    "W3A16": "CompressedTensorsWNA16",
    "W2A16": "CompressedTensorsWNA16",
    "W4A8": "CompressedTensorsWNA8Int",
    "W4AFP8": "CompressedTensorsW4A8Fp8",
    "FP8": "CompressedTensorsW8A8Fp8",
    "FP8-STATIC": "CompressedTensorsW8A8Fp8",
    "FP8-TENSOR": "CompressedTensorsW8A8Fp8",
    "FP8-BLOCK": "CompressedTensorsW8A8Fp8",
    "NVFP4A16": "CompressedTensorsW4A4Fp4",
    "MXFP4A16": "CompressedTensorsW4A4Mxfp4",
}


@pytest.fixture
def read(run_with_vllm):
    def read(*arguments):
        script = Path(__file__).with_name("read_in_vllm.py")
        asked = {"VLLM_PLUGINS": "", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        env = {**asked, "PYTHONPATH": str(script.parent)}
        done = run_with_vllm(str(script), *arguments, env=env)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("READ "))
        return json.loads(line.removeprefix("READ "))

    return read


def test_every_scheme_is_served_by_the_class_that_is_meant(read):
    assert SERVED_BY.keys() == SCHEMES.keys()
    configs = {}
    for name, rules in SCHEMES.items():
        stage = Quantize(scheme=name, group_size=128 if rules.grouped else None)
        found = weight_format(stage, [256], torch.bfloat16)
        configs[name] = quantization_config({"a": found}, {}, ["lm_head"])
    assert read("schemes", json.dumps(configs)) == SERVED_BY


def test_every_layers_cache_is_fp8_and_has_its_scales(read, tmp_path):
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("vLLM's FP8 cache needs AVX-512 on a CPU")
    # Heads of 32, the least vLLM's attention has on a CPU.
    model = write_llama(tmp_path / "model", hidden=128, dtype=torch.bfloat16)
    text = write_calibration_text(tmp_path / "text.txt")
    data = recipe_data(text, algorithm="rtn") | {"kv_cache": {}}
    driver.compress(job_for(model, data, tmp_path / "out"))
    found = read("cache", str(tmp_path / "out"))
    tensors = stored(tmp_path / "out")
    assert len(found) == 2
    for index in range(2):
        layer = found[f"model.layers.{index}.self_attn.attn"]
        assert layer["dtype"].startswith("fp8")
        for what in "kv":
            scale = tensors[f"model.layers.{index}.self_attn.{what}_scale"]
            assert layer[what] == scale.float().tolist()
