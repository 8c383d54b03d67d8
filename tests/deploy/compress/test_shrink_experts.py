"""``taut slim --experts``: whole experts go, with their rows of the router."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from stood_for import load_whole, logits_of
from tiny_families import EXPERTS, MOE, write_family
from tiny_models import edit_json, job_for, recipe_data, write_calibration_text
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM
from validate_setup import write_tokenizer

from taut_deploy.checkpoint import verify
from taut_deploy.compress import pipeline
from taut_deploy.compress.pipeline_plan import plan
from taut_deploy.compress.shrink.cut import cut
from taut_deploy.compress.shrink.experts import most_important
from taut_deploy.compress.shrink.shrink import ShrinkJob, shrink
from taut_deploy.errors import ModelError
from taut_deploy.models.store import describe_directory

# Their experts are handed tokens without being told which is whose.
UNTOLD = {"llama4"}
GROUPED = {"n_group": 2, "topk_group": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_calibration_text(tmp_path_factory.mktemp("room") / "text.txt")


def asked(model, output, text, share: float, **more) -> ShrinkJob:
    shares = {"experts": share, **more}
    return ShrinkJob(describe_directory(model), output, shares, (str(text),), output.parent, 4, 32)


def write_deepseek(path, experts: int):
    """A DeepSeek-V3 whose tokens choose one of two groups of experts first."""
    settings = {**EXPERTS["deepseek_v3"][1], **GROUPED, "n_routed_experts": experts}
    counts = dict.fromkeys(("num_experts", "num_local_experts"), experts)
    config = AutoConfig.for_model("deepseek_v3", **{**settings, **counts})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if "e_score" in name:
            buffer.copy_(torch.randn(experts))
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def test_importance_is_the_mean_of_router_weight_times_output_norm(tmp_path):
    """REAP's score, token by token and expert by expert."""
    model = load_whole(write_family(tmp_path / "m", "mixtral"))
    ids = torch.randint(2, 60, (3, 20), generator=torch.Generator().manual_seed(1))
    found = cut(model, "experts", 0.5, ids, batch=2)
    mixture, seen = model.model.layers[1].mlp, []
    mixture.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.inference_mode():
        model(ids)
        sums, times = [0.0] * 4, [0] * 4
        for x in seen[0].flatten(0, 1):
            chances = (mixture.gate.weight @ x).softmax(-1)
            top = chances.topk(2)
            for chance, expert in zip(top.values / top.values.sum(), top.indices, strict=True):
                wide, down = mixture.experts.gate_up_proj[expert], mixture.experts.down_proj[expert]
                gate, up = (wide @ x).chunk(2)
                sums[expert] += float(chance * (down @ (silu(gate) * up)).norm())
                times[expert] += 1
    expected = [total / max(1, number) for total, number in zip(sums, times, strict=True)]
    measured = found.measured["model.layers.1"]
    assert measured["tokens"] == times
    assert measured["importance"] == pytest.approx(expected, rel=1e-4)
    best = sorted(sorted(range(4), key=lambda expert: -expected[expert])[:2])
    assert found.kept["model.layers.1"] == best


def test_each_group_keeps_as_many():
    values = torch.tensor([9.0, 8, 7, 6, 1, 4, 3, 2])
    assert most_important(values, 4, 1) == [0, 1, 2, 3]
    assert most_important(values, 4, 2) == [0, 1, 5, 6]


def silence(model, dead: dict[int, int]) -> None:
    """Give every token one channel that is large, and a dead expert's router a row against it."""
    model.get_input_embeddings().weight.data[:, 0] = 0.5
    for index, block in enumerate(model.model.layers):
        for name, value in block.named_parameters():
            leaf = name.split(".")[-2 if name.endswith(("weight", "bias")) else -1]
            if leaf in {"o_proj", "out_proj"} or (leaf == "down_proj" and value.ndim == 2):
                value.data[0] = 0
            elif leaf == "down_proj":
                value.data[:, 0] = 0
            elif leaf in {"gate", "router"} and value.ndim == 2:
                value.data[:, 0] = 0
                value.data[dead[index]] = 0
                value.data[dead[index], 0] = -1000


@pytest.mark.parametrize("family", [name for name in EXPERTS if name not in UNTOLD])
def test_experts_nobody_chooses_are_dropped_and_the_logits_stay(family, text, tmp_path):
    model = write_family(tmp_path / "m", family)
    base, dead = load_whole(model), {0: 2, 1: 1}
    silence(base, dead)
    base.save_pretrained(model)
    manifest = shrink(asked(model, tmp_path / "out", text, 0.75))
    for layer in manifest.layers:
        gone = dead[int(layer["name"].rpartition(".")[2])]
        assert (layer["before"], layer["after"]) == (4, 3)
        assert layer["kept"] == [expert for expert in range(4) if expert != gone]
        assert layer["tokens"][gone] == layer["importance"][gone] == 0
        assert sum(layer["tokens"]) == 4 * 32 * 2
    loaded = load_whole(tmp_path / "out")
    torch.testing.assert_close(logits_of(loaded), logits_of(base), atol=1e-4, rtol=1e-4)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    told = (tmp_path / "out" / "report.md").read_text()
    assert "| `model.layers.1` | 4 to 3 | 1: 0, 0 |" in told
    published = EXPERTS[family][2].replace("experts.3", "experts.2") + ".weight"
    assert published in names, "experts are stored one by one, as the family is published"
    verify(tmp_path / "out")


def test_gpt_oss_has_biases_that_go_too(text, tmp_path):
    config = AutoConfig.for_model("gpt_oss", **{**MOE, "head_dim": 32})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            value.data.normal_()
        if name.endswith("router.bias"):
            value.data[1] = -1e4
    model.save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    shrink(asked(tmp_path / "m", tmp_path / "out", text, 0.75))
    base, loaded = load_whole(tmp_path / "m"), load_whole(tmp_path / "out")
    torch.testing.assert_close(logits_of(loaded), logits_of(base), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["granitemoe", "minimax_m2", "ernie4_5_moe"])
def test_routers_that_answer_or_are_asked_otherwise(family, text, tmp_path):
    """In another order, with a bias handed in, or counted by another key."""
    settings = {**MOE, "head_dim": 32, "moe_num_experts": 4, "moe_k": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    for name, buffer in model.named_buffers():
        if "e_score" in name:
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    manifest = shrink(asked(tmp_path / "m", tmp_path / "out", text, 0.75))
    assert {layer["after"] for layer in manifest.layers} == {3}
    loaded = load_whole(tmp_path / "out")
    assert torch.isfinite(logits_of(loaded)).all()


def test_groups_of_experts_keep_their_size_and_the_selecting_bias_stays_exact(text, tmp_path):
    model = write_deepseek(tmp_path / "m", experts=12)
    manifest = shrink(asked(model, tmp_path / "out", text, 0.7))
    (layer,) = manifest.layers
    assert layer["after"] == 8, "0.7 of 12 is nearest to four of each group of six"
    assert [sum(expert < 6 for expert in layer["kept"]), len(layer["kept"])] == [4, 8]
    before, after = (
        load_file(path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
        for path in (model, tmp_path / "out")
    )
    torch.testing.assert_close(after, before[layer["kept"]], rtol=0, atol=0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["n_routed_experts"] == 8
    assert torch.isfinite(logits_of(load_whole(tmp_path / "out"))).all()


@pytest.mark.parametrize(
    ("family", "share", "message"),
    [
        ("mixtral", 0.25, "leaves 1 of 4 experts, and every token chooses num_experts_per_tok 2"),
        ("mixtral", 0.9, "leaves all 4 units"),
        ("llama4", 0.5, "is not one router and one stack of experts"),
        ("llama", 0.5, "'llama' counts no experts"),
    ],
)
def test_what_cannot_lose_experts_is_refused_by_plan_and_run(
    family, share, message, text, tmp_path
):
    model = write_family(tmp_path / "m", family)
    data = recipe_data(text)
    data["stages"].insert(0, {"method": "slim", "experts": share})
    with pytest.raises(ModelError, match=message):
        plan(job_for(model, data, tmp_path / "out"))
    with pytest.raises(ModelError, match=message):
        shrink(asked(model, tmp_path / "out", text, share))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("experts", "share", "message"),
    [
        (4, 0.5, "leaves 2 of 4 experts, .* 2 of 1 out of n_group 2 groups; keep more"),
        (12, 0.2, "leaves 2 of 12 experts"),
    ],
)
def test_groups_that_would_be_too_small_are_refused(experts, share, message, text, tmp_path):
    model = write_deepseek(tmp_path / "m", experts)
    with pytest.raises(ModelError, match=message):
        shrink(asked(model, tmp_path / "out", text, share))


def test_a_quantised_model_is_refused_by_the_plan_already(text, tmp_path):
    """gpt-oss is published in MXFP4, which other stages dequantise on the way."""
    model = write_family(tmp_path / "m", "mixtral")
    edit_json(model / "config.json", quantization_config={"quant_method": "mxfp4"})
    data = recipe_data(text)
    data["stages"].insert(0, {"method": "slim", "experts": 0.5})
    with pytest.raises(ModelError, match="is quantised; give the model it was made from"):
        plan(job_for(model, data, tmp_path / "out"))
    with pytest.raises(ModelError, match="is quantised; give the model it was made from"):
        shrink(asked(model, tmp_path / "out", text, 0.5))


def test_no_other_axis_of_a_mixture_is_planned(text, tmp_path):
    model = write_family(tmp_path / "m", "mixtral")
    data = recipe_data(text)
    data["stages"].insert(0, {"method": "slim", "ffn": 0.5})
    with pytest.raises(ModelError, match=r"stages\.slim\.ffn: experts in one tensor"):
        plan(job_for(model, data, tmp_path / "out"))


def test_an_expert_cut_wrongly_is_found_by_running_it(text, tmp_path, monkeypatch):
    from taut_deploy.compress.shrink import experts as module

    model = write_family(tmp_path / "m", "qwen3_moe")
    fill = module.fill

    def swapped(model, smaller, chosen):
        fill(model, smaller, chosen)
        smaller.model.layers[0].mlp.experts.down_proj.data = smaller.model.layers[
            0
        ].mlp.experts.down_proj.data.flip(0)

    monkeypatch.setattr(module, "fill", swapped)
    with pytest.raises(ModelError, match=r"--experts: .* computes something else"):
        shrink(asked(model, tmp_path / "out", text, 0.5))


def test_a_recipe_drops_experts_and_quantises_the_others(text, tmp_path):
    model = write_family(tmp_path / "m", "qwen3_moe")
    data = recipe_data(text)
    data["stages"].insert(0, {"method": "slim", "experts": 0.5})
    job = job_for(model, data, tmp_path / "out")
    foreseen = plan(job)
    manifest = pipeline.compress(job)
    stored = {layer["name"] for layer in manifest.layers if layer["method"] == "gptq"}
    assert stored == {layer.name for layer in foreseen.layers if layer.scheme}
    assert sum(".experts." in name for name in stored) == 2 * 2 * 3
    assert [layer["method"] for layer in manifest.layers[:2]] == ["shrink experts"] * 2
    assert "slim: keeps 50% of experts" in foreseen.whole_model[0]
    assert torch.isfinite(logits_of(load_whole(tmp_path / "out"))).all()
