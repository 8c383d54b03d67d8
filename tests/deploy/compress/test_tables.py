"""Embeddings and head in 8 and 4 bits: what is stored, who reads it, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from stood_for import load_whole, logits_of, says_golden, stored
from tiny_models import (
    job_for,
    make_recipe,
    recipe_data,
    write_calibration_text,
    write_llama,
)
from transformers import AutoModelForCausalLM

import taut_deploy.hf  # noqa: F401  reads quantised embeddings
from taut_deploy.checkpoint import verify
from taut_deploy.compress import driver
from taut_deploy.compress.pipeline_plan import plan
from taut_deploy.compress.train.quantized_layers import layer_schemes
from taut_deploy.errors import ModelError, RecipeError

NAMES = {"embeddings": "model.embed_tokens", "head": "lm_head"}
TABLES = {8: {"bits": 8}, 4: {"bits": 4, "group_size": 32}}
HASH_BEFORE_TABLES = "sha256:b82f02f527055a68c56299f4e7888aa474cd25a8e47e9e9e64560c5906a9af94"
"""Of one recipe, by the code as it was before recipes had tables."""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``tied/`` and ``untied/`` in fp32, and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    for name in ("tied", "untied"):
        write_llama(path / name, hidden=128, intermediate=256, tie=name == "tied")
    write_calibration_text(path / "text.txt")
    return path


@pytest.fixture(scope="module")
def compressed(room):
    done: dict[tuple[str, int], driver.CompressionJob] = {}

    def make(kind: str, bits: int) -> driver.CompressionJob:
        if (kind, bits) not in done:
            done[kind, bits] = job_for(room / kind, data(room, bits), room / f"{kind}{bits}")
            driver.compress(done[kind, bits])
        return done[kind, bits]

    return make


def data(room: Path, bits: int):
    table = TABLES[bits]
    return {**recipe_data(room / "text.txt"), "embeddings": table, "head": table}


def by_hand(words: torch.Tensor, scale: torch.Tensor, bits: int) -> list[list[float]]:
    """A packed table, number by number: codes fill a word from its low end, offset by half."""
    rows, numbers = [], 32 // bits
    for line, scales in zip(words.tolist(), scale.tolist(), strict=True):
        codes = [
            ((word >> (bits * place)) & (2**bits - 1)) - 2 ** (bits - 1)
            for word in line
            for place in range(numbers)
        ]
        group = len(codes) // len(scales)
        rows.append([code * scales[at // group] for at, code in enumerate(codes)])
    return rows


def meant(tensors: dict[str, torch.Tensor], name: str, bits: int) -> torch.Tensor:
    words, scale = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
    return torch.tensor(by_hand(words, scale, bits))


KINDS = list(itertools.product(("tied", "untied"), (8, 4)))


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_transformers_reads_what_the_packed_tables_mean(kind, bits, compressed):
    request = compressed(kind, bits)
    tensors = stored(request.output)
    model = load_whole(request.output)
    logits_of(model)  # a head by itself is decompressed by its first call
    own = {role: NAMES["embeddings" if kind == "tied" else role] for role in NAMES}
    for role, name in NAMES.items():
        assert torch.equal(model.get_submodule(name).weight, meant(tensors, own[role], bits))
    for name in set(NAMES.values()) - set(own.values()):
        assert not [key for key in tensors if key.startswith(name)], "a tied table is stored once"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (kind == "tied")
    says_golden(model, request.output, verify(request.output).golden)


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_the_model_is_the_base_with_rounded_tables(kind, bits, compressed):
    """The same layers as without tables would not do: they were calibrated on rounded rows."""
    request = compressed(kind, bits)
    read = load_whole(request.output)
    brute = AutoModelForCausalLM.from_pretrained(request.model.path, dtype=torch.float32).eval()
    base = logits_of(brute)
    tensors = stored(request.output)
    for name, module in brute.named_modules():
        if f"{name}.weight_packed" in tensors:
            of_table = name in NAMES.values()
            module.weight.data = meant(tensors, name, bits if of_table else 4)
        elif f"{name}.weight" in tensors:
            module.weight.data = tensors[f"{name}.weight"].float()
    brute.tie_weights()
    assert torch.allclose(logits_of(read), logits_of(brute), atol=1e-4)
    assert not torch.allclose(logits_of(read), base, atol=1e-2)


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_rows_are_rounded_to_the_nearest_on_the_best_range(kind, bits, compressed):
    """Against a grid that ends at the largest number of a group, which anyone would take first."""
    request = compressed(kind, bits)
    base = AutoModelForCausalLM.from_pretrained(request.model.path, dtype=torch.float32)
    exact = base.model.embed_tokens.weight.data
    tensors = stored(request.output)
    scale = tensors["model.embed_tokens.weight_scale"].float()
    got = torch.tensor(by_hand(tensors["model.embed_tokens.weight_packed"], scale, bits))
    width = exact.shape[1] // scale.shape[1]
    step = scale.repeat_interleave(width, 1)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert torch.equal((exact / step).round().clamp(low, high) * step, got)
    groups = exact.view(len(exact), -1, width)
    plain = groups.abs().amax(-1, keepdim=True) / high
    naive = (groups / plain).round() * plain
    assert (got - exact).square().sum() <= 1.1 * (naive.view_as(exact) - exact).square().sum()
    told = verify(request.output).recipe["tables"][0]
    error = (got - exact).square().sum() / exact.square().sum()
    assert told["relative_error"] == pytest.approx(float(error), rel=1e-4)


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_the_plan_says_the_size(kind, bits, room, compressed, tmp_path):
    request = compressed(kind, bits)
    foreseen = plan(job_for(room / kind, data(room, bits), tmp_path / "planned"))
    files = sum(file.stat().st_size for file in request.output.glob("*.safetensors"))
    assert foreseen.bytes_after == pytest.approx(files, rel=0.03)
    tensors = stored(request.output)
    written = {
        table.name: sum(
            tensor.nbytes
            for name, tensor in tensors.items()
            if name.startswith(NAMES[table.name.partition(" ")[0]])
        )
        for table in foreseen.tables
    }
    assert {table.name: table.bytes for table in foreseen.tables} == written
    expected = ["embeddings and head"] if kind == "tied" else ["embeddings", "head"]
    assert [table.name for table in foreseen.tables] == expected
    report = (request.output / "report.md").read_text()
    assert f"| {expected[0]} | {bits} bits" in report


def test_a_head_alone_is_a_linear_layer_of_its_own_format(room, tmp_path):
    recipe = {**recipe_data(room / "text.txt"), "head": {"bits": 8}}
    request = job_for(room / "untied", recipe, tmp_path / "out")
    driver.compress(request)
    entry = json.loads((request.output / "config.json").read_text())["quantization_config"]
    groups = {
        tuple(group["targets"]): group["weights"]["num_bits"]
        for group in entry["config_groups"].values()
    }
    assert groups == {("Linear",): 4, ("lm_head",): 8}
    assert "lm_head" not in entry["ignore"]
    assert "model.embed_tokens.weight" in stored(request.output)
    model = load_whole(request.output)
    logits_of(model)  # which decompresses the head
    assert torch.equal(model.lm_head.weight, meant(stored(request.output), "lm_head", 8))


def test_a_pruned_model_has_quantised_tables_alone(room, tmp_path):
    prune = {"method": "prune", "sparsity": 0.5, "algorithm": "magnitude", "refit": False}
    recipe = {**data(room, 8), "stages": [prune]}
    request = job_for(room / "tied", recipe, tmp_path / "out")
    driver.compress(request)
    entry = json.loads((request.output / "config.json").read_text())["quantization_config"]
    targets = [group["targets"] for group in entry["config_groups"].values()]
    assert targets == [["Embedding"], ["lm_head"]]
    model = load_whole(request.output)
    assert torch.equal(model.lm_head.weight, meant(stored(request.output), "model.embed_tokens", 8))
    assert (model.model.layers[0].mlp.up_proj.weight == 0).float().mean() == pytest.approx(0.5)


TABLE = {"bits": 8}
REFUSED = {
    "tied, embeddings alone": ("tied", {"embeddings": TABLE}, "head: this model's embeddings and"),
    "tied, head alone": ("tied", {"head": TABLE}, "embeddings: this model's embeddings and head"),
    "tied, not alike": ("tied", {"embeddings": TABLE, "head": {"bits": 4}}, "head: .*alike"),
    "beside codebooks": (
        "untied",
        {"embeddings": TABLE, "stages": [{"method": "palettize", "entries": 16}]},
        "embeddings: is stored by compressed-tensors, .* leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_is_refused_by_the_plan(case, room, tmp_path):
    kind, change, message = REFUSED[case]
    request = job_for(room / kind, {**recipe_data(room / "text.txt"), **change}, tmp_path / "out")
    with pytest.raises(RecipeError, match=f"^{message}"):
        plan(request)


def test_groups_that_do_not_divide_a_row_are_refused(room, tmp_path):
    model = write_llama(tmp_path / "odd", hidden=80)
    recipe = recipe_data(room / "text.txt", group_size="channel") | {"head": {"bits": 4}}
    with pytest.raises(RecipeError, match=r"^head\.group_size: none of .* up to 64 .* of 80"):
        plan(job_for(model, recipe, tmp_path / "out"))


SLIM = {"method": "slim", "ffn": 0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": {"bits": 6}}, "head.bits"),
        ({"head": {"bits": 8, "group": 64}}, "did you mean 'group_size'"),
        ({"head": {"bits": 8, "group_size": 48}}, "head.group_size"),
        ({"embeddings": TABLE, "stages": [SLIM]}, "'embeddings': 'slim' works on the whole model"),
    ],
)
def test_a_recipe_that_asks_for_no_such_table_is_refused(change, message, room):
    with pytest.raises(RecipeError, match=message):
        make_recipe({**recipe_data(room / "text.txt"), **change})


def test_recipes_without_tables_keep_their_hash(room):
    plain = make_recipe(recipe_data(room / "text.txt"))
    assert "head" not in plain.tables
    assert plain.hash != make_recipe(data(room, 8)).hash
    fixed = make_recipe(recipe_data(Path("/text.txt")))
    assert fixed.hash == HASH_BEFORE_TABLES


def test_a_checkpoint_with_quantised_embeddings_is_not_trained(compressed):
    request = compressed("tied", 8)
    entry = json.loads((request.output / "config.json").read_text())["quantization_config"]
    model = AutoModelForCausalLM.from_pretrained(request.model.path)
    with pytest.raises(ModelError, match="embed_tokens: embeddings of 8 bits cannot be trained"):
        list(layer_schemes(model, entry))
