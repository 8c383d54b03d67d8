"""What vLLM rounds otherwise than a checkpoint says is told, layer kind by layer kind."""

import pytest

from taut_deploy.diagnose import other_rounding
from taut_deploy.diagnose.layer_schemes import LayerScheme
from taut_deploy.diagnose.other_rounding import other_roundings, why_other_rounding

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


def config(inputs):
    group = {"targets": ["Linear"], "weights": INT4, "input_activations": inputs}
    entry = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return {"quantization_config": entry}


@pytest.mark.parametrize(
    ("name", "platform", "vllm", "said"),
    [
        ("int4 × int8", "cuda", (0, 26), "rounds its INT8 inputs to FP8"),
        ("int4 × int8", "cuda", (0, 32), "leaves its inputs in 16 bits"),
        ("int4 × int8", "cpu", (0, 26), "leaves its inputs in 16 bits"),
        ("int4 × float8", "cuda", (0, 33), "rounds the groups' scales to FP8"),
        ("W8A8", "cuda", (0, 26), None),
        ("W4A16", "cpu", (0, 32), None),
        ("FP8", "cuda", (0, 32), None),
    ],
)
def test_what_is_rounded_otherwise(name, platform, vllm, said):
    told = why_other_rounding(LayerScheme(name), platform, vllm)
    assert (told is None) if said is None else (said in told)


def test_a_checkpoint_is_told_of_in_one_line(monkeypatch):
    monkeypatch.setattr(other_rounding, "installed_vllm", lambda _: (0, 26))
    (line,) = other_roundings(config({**TOKEN, "type": "int"}), "cuda")
    assert line == (
        "int4 × int8 layers: vLLM 0.26 rounds its INT8 inputs to FP8 and its groups' scales to "
        "FP8; judge it as it is served: taut validate --candidate URL"
    )
    assert list(other_roundings(config(None), "cuda")) == []
    assert list(other_roundings({}, "cpu")) == []
