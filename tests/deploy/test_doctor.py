"""What ``taut doctor`` says of FP8 layers, and of directories that others made."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from taut_deploy.diagnose import layer_shapes, layers
from taut_deploy.diagnose.layer_schemes import DENSE, read_quantization
from taut_deploy.diagnose.layer_shapes import StoredLayer
from taut_deploy.errors import ModelError
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.w4a16 import verdict as measured_w4a16

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
THEIRS = "vLLM's own"
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 128256,
}
QKV, OUT, GATE_UP, DOWN, HEAD = FUSED = [
    "6144x4096",
    "4096x4096",
    "28672x4096",
    "4096x14336",
    "128256x4096",
]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_BLOCKS = FP8 | {"weight_block_size": [128, 128]}
E4M3_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
E4M3_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def groups(*found: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {
        f"group_{index}": {"targets": ["Linear"], **group} for index, group in enumerate(found)
    }
    return {"quant_method": "compressed-tensors", "config_groups": named, **more}


def compressed(weights: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    return groups({"weights": weights, "input_activations": inputs}, **more)


E4M3 = compressed(E4M3_WEIGHTS, E4M3_INPUTS, ignore=["lm_head"])


@pytest.fixture
def card(monkeypatch):
    """Puts a card in the machine, or takes it out."""

    def put(gpu: str | None, mode: str = "", capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr("taut_deploy.host.gpu_name", lambda: gpu)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
        monkeypatch.setenv("TAUT_KERNELS", mode)

    put(H200)
    return put


@pytest.fixture
def explain(tmp_path):
    """Doctor's layers of a directory with a ``config.json``: shape → kernel and remark."""

    def explained(quantization: Any, **changes: Any) -> dict[str, tuple[str, str]]:
        config = LLAMA_8B | changes
        config |= {} if quantization is None else {"quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(config))
        rows = layers.explain(tmp_path)["layers"]
        return {row["shape"]: (row["kernel"], row["reason"]) for row in rows}

    return explained


def remark(op: str, shape: str, gpu: str = H200, *, in_layer: bool = False) -> str | None:
    n, k = map(int, shape.split("x"))
    return tiles_scaled_mm.why_not_preferred(op, gpu, n, k, in_layer=in_layer)


@pytest.mark.parametrize("quantization", [FP8, FP8 | {"activation_scheme": "static"}])
def test_fp8_layers_are_judged_by_the_tables_of_the_plugin(quantization, card, explain):
    found = explain(quantization)
    assert list(found) == FUSED
    assert found[HEAD] == (THEIRS, DENSE.obstacle)
    for shape in FUSED[:4]:
        alone, within = (remark("fp8_gemm", shape, in_layer=in_layer) for in_layer in (False, True))
        kernel, said = found[shape]
        assert kernel == ("taut::fp8_gemm" + (f" + {THEIRS}" if alone else ""))
        assert said.startswith(alone or "")
        if alone != within:
            expected = f"with --fused-ops: {within or 'ours at every number of tokens'}"
            assert said.removeprefix(alone or "").removeprefix("; ") == expected
        else:
            assert said == (alone or "")
    # So that the table of int8 in its place would be seen.
    assert any(remark("fp8_gemm", shape) != remark("w8a8_gemm", shape) for shape in FUSED[:4])


def test_an_fp8_model_of_the_measured_kind_uses_fused_ops(card, explain):
    within = explain(E4M3)[QKV][1].partition("; with ")[0].partition("with --no-fused-ops")[0]
    assert within == (remark("fp8_gemm", QKV, in_layer=True) or "")
    assert any("--no-fused-ops" in said for _, said in explain(E4M3).values())
    assert not any("--no-fused-ops" in said for _, said in explain(FP8).values())


def test_fp8_layers_elsewhere(card, explain):
    card(H200, "require")
    assert [explain(E4M3)[shape] for shape in FUSED[:4]] == [("taut::fp8_gemm", "")] * 4
    assert [explain(FP8_BLOCKS)[shape] for shape in FUSED[:4]] == [("taut::fp8_gemm", "")] * 4
    card(H200, "off")
    assert explain(E4M3)[QKV] == (THEIRS, "TAUT_KERNELS=off")
    card("NVIDIA L40S", capability=(8, 9))
    assert explain(E4M3)[QKV] == (
        THEIRS,
        "taut's 8-bit kernels are for compute capability 90, got 89",
    )
    card(None)
    assert explain(E4M3)[QKV] == (THEIRS, "no taut kernel for FP8 on cpu yet")
    card(H200)
    odd = explain(E4M3, intermediate_size=14328)["4096x14328"]
    assert odd[0] == THEIRS
    assert "input features" in odd[1]


GROUP_INPUTS = E4M3_INPUTS | {"strategy": "group", "group_size": 128}
BLOCK_WEIGHTS = E4M3_WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}
BLOCKS = {"FP8": FP8_BLOCKS, "compressed-tensors": compressed(BLOCK_WEIGHTS, GROUP_INPUTS)}
FIRST_OF_VLLM = {
    H100: {QKV: 65, OUT: 65, GATE_UP: 65, DOWN: 65},
    H200: {QKV: 33, OUT: 33, GATE_UP: 17, DOWN: 64},
}
"""Card → shape → fewest tokens at which vLLM's product of blocks is the faster one."""


@pytest.mark.parametrize("gpu", FIRST_OF_VLLM)
@pytest.mark.parametrize("case", BLOCKS)
def test_fp8_by_blocks_is_judged_by_the_table_of_blocks(gpu, case, card, explain):
    card(gpu)
    found = explain(BLOCKS[case])
    for shape, first in FIRST_OF_VLLM[gpu].items():
        assert found[shape] == (
            f"taut::fp8_gemm + {THEIRS}",
            f"not measured to be as fast as vLLM's at {first}– tokens",
        )
    card("NVIDIA H100 PCIe")
    assert explain(BLOCKS[case])[QKV] == (THEIRS, "not measured on NVIDIA H100 PCIe")


ACT_ORDER = "activation reordering (desc_act, actorder) is not supported, nor by newer vLLM"
NOT_OURS = {
    "FP8 by other blocks": (
        FP8 | {"weight_block_size": [64, 128]},
        "no taut kernel for FP8 with scales of 64×128 blocks yet",
    ),
    "FP8 weights alone": (
        compressed(E4M3_WEIGHTS),
        "no taut kernel for float8 weights alone, scales by channel, yet",
    ),
    "FP8 activations by group": (
        compressed(E4M3_WEIGHTS, GROUP_INPUTS),
        "no taut kernel for float8 × float8, scales by channel, yet",
    ),
    "int4 and int8": (
        compressed(INT4_WEIGHTS, INT8_INPUTS),
        "no taut kernel for int4 × int8, scales by group, yet; vLLM leaves its inputs in 16 bits, "
        "where the checkpoint says INT8",
    ),
    "int8 with weights' zero points": (
        compressed(INT8_WEIGHTS | {"symmetric": False}, INT8_INPUTS),
        "no taut kernel for int8 × int8, scales by channel, yet",
    ),
    "8-bit GPTQ": (GPTQ | {"bits": 8}, "no taut kernel for GPTQ weights of 8 bits yet"),
    "reordered GPTQ": (GPTQ | {"desc_act": True}, ACT_ORDER),
    "reordered by groups": (compressed(INT4_WEIGHTS | {"actorder": "group"}), ACT_ORDER),
    "GPTQ with zero points": (
        GPTQ | {"sym": False},
        "GPTQ with zero points (sym: false): vLLM does not load it",
    ),
    "AWQ without": (AWQ | {"zero_point": False}, "weight type uint4 with zero_points=False"),
    "GPTQ in odd groups": (
        GPTQ | {"group_size": 16},
        "group size must be 32, 64, 128 or one group a channel, got 16",
    ),
    "dense": (None, DENSE.obstacle),
}


@pytest.mark.parametrize("case", NOT_OURS)
def test_why_a_layer_of_others_is_not_ours(case, card, explain):
    quantization, reason = NOT_OURS[case]
    assert explain(quantization)[QKV] == (THEIRS, reason)


def test_a_card_takes_the_model_s_type_and_a_cpu_bf16(card, explain):
    assert "groups of 128 in fp16" in explain(GPTQ, torch_dtype="float16")[QKV][1]
    assert "groups of 128 in fp16" in explain(GPTQ, dtype="float16")[QKV][1]
    assert explain(GPTQ, torch_dtype="bfloat16")[QKV][1] == ""
    card(None)
    assert (
        explain(GPTQ, torch_dtype="float16")[QKV][0]
        == "taut::weight_only_linear_cpu or torch's int4"
    )


OLDER_AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}
OURS = {
    "GPTQ": (GPTQ, 128, False),
    "GPTQ, one reordered group a channel": (GPTQ | {"group_size": -1, "desc_act": True}, -1, False),
    "AWQ": (AWQ, 128, True),
    "AWQ by its older names": (OLDER_AWQ, 64, True),
    "compressed-tensors": (compressed(INT4_WEIGHTS), 128, False),
    "with zero points": (
        compressed(INT4_WEIGHTS | {"symmetric": False, "actorder": "static"}),
        128,
        True,
    ),
    "one group a channel, the rest by default": (
        compressed({"num_bits": 4, "strategy": "channel"}),
        -1,
        False,
    ),
}


@pytest.mark.parametrize("case", OURS)
def test_four_bit_layers_of_others_are_ours(case, card, explain):
    quantization, group, zero_points = OURS[case]
    found = explain(quantization, tie_word_embeddings=True)
    assert list(found) == FUSED[:4]
    for shape in (QKV, GATE_UP):
        n, k = map(int, shape.split("x"))
        said = measured_w4a16.remark(H200, n, k, group, torch.bfloat16, has_zeros=zero_points)
        assert found[shape] == ("taut::w4a16_gemm", said or "")
    timed = (group, zero_points) in ((128, False), (128, True))
    assert ("timed in symmetric groups" in found[QKV][1]) != timed
    card(None)
    assert explain(quantization)[QKV][0] == "taut::weight_only_linear_cpu or torch's int4"


DEQUANTISED = ("vLLM's bf16 product", "dequantised at load, no memory saved")
EIGHT_BITS = {
    "channels": ({}, ("taut::weight_only_linear_cpu or vLLM's bf16, dequantised", "")),
    "zero points": (
        {"strategy": "group", "group_size": 128, "symmetric": False},
        ("taut::weight_only_linear_cpu or vLLM's bf16, dequantised", ""),
    ),
    "groups of 16": ({"strategy": "group", "group_size": 16}, DEQUANTISED),
}


@pytest.mark.parametrize("case", EIGHT_BITS)
def test_eight_bit_weights_are_ours_on_a_cpu(case, card, explain):
    weights, (kernel, said) = EIGHT_BITS[case]
    quantization = compressed(INT8_WEIGHTS | weights)
    assert explain(quantization)[QKV] == (THEIRS, "no taut kernel for W8A16 on cuda yet")
    card(None)
    found = explain(quantization)[QKV]
    assert found[0] == kernel and found[1].endswith(said)
    card(None, "off")
    assert explain(quantization)[QKV][1].startswith("REFUSED by taut worker")


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_32_are_judged_by_rows_of_their_own(symmetric, card, explain, monkeypatch):
    small = compressed(INT4_WEIGHTS | {"group_size": 32, "symmetric": symmetric})
    row = {"N": 6144, "K": 4096, "M": [1, 256], "us": [1.0, 1.0], "vllm_us": [2.0, 0.9]}

    def measure(*rows: dict[str, Any]) -> None:
        text = json.dumps({"gpu": H200, "source": "", "rows": rows})
        table = measured_w4a16.parse(text, "t.json")
        monkeypatch.setattr(measured_w4a16, "tables", lambda: {H200: table})

    measure(row)
    reason = (
        f"{QKV.replace('x', '×')} in groups of 32 not measured against vLLM's kernels on {H200}"
    )
    assert explain(small)[QKV] == (THEIRS, f"{reason}; TAUT_KERNELS=require runs it")
    measure(row | {"vllm_us": [0.5, 0.5]}, row | {"format": "g32" if symmetric else "g32-zp"})
    said = "slower than vLLM's at 256 tokens (0.90 of its speed)"
    assert explain(small)[QKV] == ("taut::w4a16_gemm", said)
    assert explain(compressed(INT4_WEIGHTS))[QKV][0] == THEIRS


@pytest.mark.parametrize(
    "inputs",
    [INT8_INPUTS, INT8_INPUTS | {"symmetric": False}, {"num_bits": 8, "strategy": "tensor"}],
)
def test_int8_layers_of_others_are_judged_by_int8s_table(inputs, card, explain):
    kernel, said = explain(compressed(INT8_WEIGHTS, inputs, ignore=["lm_head"]))[OUT]
    assert kernel.startswith("taut::w8a8_gemm")
    assert (remark("w8a8_gemm", OUT, in_layer="--no-fused-ops" in said) or "") in said


UNKNOWN = {
    "set apart": (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "sets layers apart (dynamic)"),
    "sparse": (compressed(E4M3_WEIGHTS, E4M3_INPUTS, sparsity_config={"format": "s24"}), "sparse"),
    "no group": (groups({"targets": ["re:.*nothing"], "weights": INT4_WEIGHTS}), "no config group"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_config_json_does_not_tell_is_not_judged(case, card, explain):
    quantization, reason = UNKNOWN[case]
    kernel, said = explain(quantization)[QKV]
    assert kernel == "not judged"
    assert reason in said
    assert "the worker's log says" in said


def test_an_unknown_method_is_not_judged(card, explain, tmp_path):
    assert explain({"quant_method": "bitsandbytes", "load_in_4bit": True}) == {}
    said = layers.explain(tmp_path)["checkpoint"]
    assert said["scheme"] == "unknown (bitsandbytes)"
    assert said["layers"].startswith("not judged: quant_method 'bitsandbytes' is none of awq, ")


def test_sizes_of_another_family_are_not_guessed(card, explain, tmp_path):
    assert explain(GPTQ, model_type="deepseek_v3") == {}
    said = layers.explain(tmp_path)["checkpoint"]
    assert said["layers"].startswith("not judged: no safetensors here")
    assert "'deepseek_v3'" in said["layers"]


def test_a_group_that_names_a_layer_goes_first_and_ignored_ones_are_dense(card, explain):
    found = explain(
        groups(
            {"weights": INT4_WEIGHTS},
            {"targets": [r"re:.*\.down_proj$"], "weights": E4M3_WEIGHTS},
            ignore=["lm_head", "re:.*o_proj"],
        )
    )
    assert found[QKV][0] == "taut::w4a16_gemm"
    assert found[DOWN][1].startswith("no taut kernel for float8 weights alone")
    assert found[OUT] == found[HEAD] == (THEIRS, DENSE.obstacle)
    some = explain(GPTQ | {"modules_in_block_to_quantize": [["self_attn.o_proj"]]})
    assert [shape for shape in FUSED if "w4a16" in some[shape][0]] == [OUT]
    kept = explain(AWQ | {"modules_to_not_convert": ["mlp"]})
    assert [shape for shape in FUSED if "w4a16" in kept[shape][0]] == [QKV, OUT]
    alone = {"modules_to_not_convert": ["model.layers.0.self_attn.o_proj"]}
    kept = explain(FP8 | alone, num_hidden_layers=1)
    assert [shape for shape in FUSED if "fp8" in kept[shape][0]] == [QKV, GATE_UP, DOWN]


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


STORED = {
    "gptq": {"a.qweight": words(8, 48), "a.scales": torch.ones(2, 48)},
    "awq": {"a.qweight": words(64, 6), "a.scales": torch.ones(2, 48)},
    "compressed-tensors": {
        "a.weight_packed": words(48, 8),
        "a.weight_scale": torch.ones(48, 2),
        "a.weight_shape": torch.tensor([48, 64]),
    },
    "fp8": {
        "a.weight": torch.zeros(48, 64).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
    },
}


@pytest.mark.parametrize("method", STORED)
def test_layers_are_found_in_the_shards_headers(method, tmp_path):
    rest = {
        "b.weight": torch.zeros(6, 4),
        "b.bias": torch.zeros(6),
        "norm.weight": torch.ones(4),
        "model.embed_tokens.weight": torch.zeros(9, 4),
        "conv.weight": torch.zeros(2, 3, 4),
    }
    save_file(STORED[method], tmp_path / "one.safetensors")
    save_file(rest, tmp_path / "two.safetensors")
    where = dict.fromkeys(STORED[method], "one.safetensors")
    where |= dict.fromkeys(rest, "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    expected = {"a": StoredLayer(48, 64, quantised=True), "b": StoredLayer(6, 4, quantised=False)}
    assert layer_shapes.stored_layers(tmp_path, method, 8 if method == "fp8" else 4) == expected
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors: missing or damaged"):
        layer_shapes.stored_layers(tmp_path, method, 4)


def test_stored_layers_are_judged_by_what_is_stored(card, tmp_path):
    card(None)
    tensors = {
        "layers.0.o_proj.qweight": words(8, 48),
        "layers.0.q_proj.weight": torch.zeros(32, 64),
        "layers.0.k_proj.weight": torch.zeros(16, 64),
        "layers.0.experts.0.w1.qweight": words(8, 16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "other", "quantization_config": GPTQ | {"group_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = layers.explain(tmp_path)
    assert facts["checkpoint"]["layers"] == "read from the safetensors' headers"
    assert facts["checkpoint"]["scheme"] == "W4A16 (gptq)"
    assert {(row["shape"], row["kernel"]) for row in facts["layers"]} == {
        ("48x64", "taut::weight_only_linear_cpu or torch's int4"),
        ("48x64", THEIRS),
        ("16x64", THEIRS),
    }
    assert "experts" in str(facts["layers"])


WRONG = {
    "no config": (None, "no config.json"),
    "not JSON": ("{", "config.json: not valid JSON"),
    "not an object": ("[]", "expected a JSON object"),
    "no object": ({"quantization_config": "awq"}, "quantization_config: expected a JSON object"),
    "no method": ({"quantization_config": {"bits": 4}}, "names no quant_method"),
    "no bits": ({"quantization_config": {"quant_method": "gptq"}}, "gptq needs bits"),
    "no zero point": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
        "awq needs zero_point",
    ),
    "bits": ({"quantization_config": GPTQ | {"bits": 0}}, "bits: expected a whole number from 1"),
    "group": ({"quantization_config": GPTQ | {"group_size": "a"}}, "group_size: expected a whole"),
    "no groups": (
        {"quantization_config": compressed(None) | {"config_groups": 3}},
        "config_groups",
    ),
    "weights": (
        {"quantization_config": compressed({"num_bits": "some"})},
        "config_groups: weights: num_bits",
    ),
    "ignore": ({"quantization_config": compressed(None, ignore=[3])}, "ignore: expected a list of"),
    "expression": (
        {"quantization_config": compressed(None, ignore=["re:("])},
        "ignore: 're:(' is no regular expression",
    ),
    "size": (LLAMA_8B | {"hidden_size": "big"}, "hidden_size: expected a whole number above 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_directory_that_cannot_be_read_is_one_line(case, tmp_path):
    content, message = WRONG[case]
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        layers.explain(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_shard_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ModelError, match=r"model\.safetensors: missing or damaged"):
        layers.explain(tmp_path)


def test_the_entry_is_found_where_vllm_finds_it():
    for config in (
        {"quantization_config": GPTQ},
        {"text_config": {"quantization_config": GPTQ}},
        {"compression_config": GPTQ},
    ):
        assert read_quantization(config).method == "gptq"
    assert read_quantization({"quantization_config": None}).method is None
