"""Ranks and sparsities by layer: scores and choice against brute force, and the checkpoints."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from stood_for import logits_of
from tiny_inputs import correlated
from tiny_models import (
    job_for,
    make_recipe,
    pruned_data,
    recipe_data,
    write_calibration_text,
    write_llama_with_idle_block,
)
from transformers import AutoModelForCausalLM

import taut_deploy.hf  # noqa: F401 - registers the loader of factors
from taut_deploy.checkpoint import verify
from taut_deploy.compress import driver
from taut_deploy.compress.allocate.decide import allocate, allocation_of
from taut_deploy.compress.allocate.ranks import rank_unit
from taut_deploy.compress.allocate.sparsities import sparsity_unit
from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.formats.low_rank import LowRankFormat
from taut_deploy.compress.mixed.scores import Scoring
from taut_deploy.errors import RecipeError

FACTORIZE = {"method": "factorize", "rank_budget": 0.7, "allocation": "loss"}


def inputs_of(x: torch.Tensor) -> InputGroup:
    """What calibration keeps of rows [T, K]."""
    return InputGroup([], None, x.T @ x / len(x), x.abs().amax(0), x, len(x))


def squares(x: torch.Tensor, difference: torch.Tensor) -> float:
    return float((x.double() @ difference.double().T).square().sum())


def test_the_error_of_every_rank_against_the_factors_themselves():
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    x = correlated(512, 32)
    equal = LowRankFormat(None, 0.8, None, torch.float32)
    unit = rank_unit("a", (48, 32), equal, 1e-9)
    tried = unit.try_layer("a", weight, inputs_of(x))
    # numpy has no whitening: the best factors for these inputs are the SVD of what comes out.
    u, s, v = torch.linalg.svd(x.double() @ weight.double().T, full_matrices=False)
    for rank in unit.ranks:
        best = float((u[:, rank:] * s[rank:] @ v[rank:]).square().sum()) / len(x)
        assert tried.errors[rank] == pytest.approx(best, rel=1e-3)
    at_reference = squares(x, tried.weight - weight) / len(x)
    assert at_reference == pytest.approx(tried.errors[unit.reference], rel=1e-3)


def test_sizes_of_ranks_by_hand():
    """Interpolative factors of [48, 32] in fp32: r (80 - r) numbers and 48 places of 4 bytes."""
    unit = rank_unit("a", (48, 32), LowRankFormat(None, 0.8, None, torch.float32), 1e-3)
    # 0.8 of 1536 numbers: 16 * 64 = 1024 fit, 24 * 56 = 1344 do not; 32 would save nothing.
    assert unit.sizes == {8: 2496, 16: 4288, 24: 5568}
    assert unit.reference == 16


@pytest.mark.parametrize("by_magnitude", [True, False])
def test_the_error_of_every_sparsity_against_sorting(by_magnitude):
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    x = correlated(64, 8)
    unit = sparsity_unit(("a",), 64, 0.5, by_magnitude=by_magnitude)
    assert unit.sparsities == (0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35)
    assert [unit.sizes[i] for i in range(7)] == [22, 26, 29, 32, 35, 38, 42]
    tried = unit.try_layer("a", weight, inputs_of(x))
    for position, sparsity in enumerate(unit.sparsities):
        pruned = weight.clone()
        if by_magnitude:
            lowest = weight.abs().flatten().sort().indices[: 64 - round((1 - sparsity) * 64)]
            pruned.view(-1)[lowest] = 0
        else:
            for row in pruned:
                score = row.abs() * x.square().mean(0).sqrt()
                row[score.sort().indices[: 8 - round((1 - sparsity) * 8)]] = 0
        assert tried.errors[position] == pytest.approx(squares(x, pruned - weight), rel=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_against_all_choices(seed):
    """Never above the size of equal shares, and within one step of the least loss there."""
    draw = random.Random(seed)
    equal = LowRankFormat(None, 0.8, None, torch.float32)
    shapes = [(32, 48), (64, 32), (48, 48), (32, 32)]
    units = [rank_unit(str(i), shape, equal, 1e-3) for i, shape in enumerate(shapes)]
    losses = [
        {str(rank): draw.random() * sum(draw.random() ** 2 for _ in range(40 - rank))
         for rank in unit.ranks}
        for unit in units
    ]  # fmt: skip
    budget = sum(unit.sizes[unit.reference] for unit in units)
    chosen = allocate(units, losses)
    size, loss = sum(one.bytes for one in chosen), sum(one.loss for one in chosen)
    every = [
        (
            sum(unit.sizes[rank] for unit, rank in zip(units, ranks, strict=True)),
            sum(of[str(rank)] for of, rank in zip(losses, ranks, strict=True)),
        )
        for ranks in itertools.product(*(unit.ranks for unit in units))
    ]
    assert size <= budget
    best = min(lost for taken, lost in every if taken <= budget)
    step = max(max(of.values()) - min(of.values()) for of in losses)
    assert best <= loss + 1e-12
    assert loss <= best + step


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` of three blocks, the second of them nearly the identity, and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama_with_idle_block(path / "model", 1e-2)
    write_calibration_text(path / "text.txt")
    return path


def factorized(room, **stage):
    return recipe_data(room / "text.txt") | {"stages": [{**FACTORIZE, **stage}]}


def weight_bytes(output) -> int:
    return sum(shard.stat().st_size for shard in output.glob("*.safetensors"))


def distance(room, output) -> float:
    base = logits_of(AutoModelForCausalLM.from_pretrained(room / "model").eval())
    got = logits_of(AutoModelForCausalLM.from_pretrained(output).eval())
    return float((got - base).norm())


def test_ranks_go_where_they_count_at_the_same_size(room, tmp_path):
    decided = driver.compress(job_for(room / "model", factorized(room), tmp_path / "loss"))
    driver.compress(
        job_for(room / "model", factorized(room, allocation="uniform"), tmp_path / "equal")
    )
    assert verify(tmp_path / "loss") == decided
    told = decided.recipe["allocation"]
    assert told["predicted_kl"] < told["predicted_kl_of_equal_shares"]
    ranks = {one["name"]: one["rank"] for one in decided.layers}
    assert ranks == told["layers"]
    of_block = [sum(r for n, r in ranks.items() if f".layers.{i}." in n) for i in range(3)]
    assert of_block[1] < min(of_block[0], of_block[2])
    headers = 4096  # names and shapes, padded
    assert weight_bytes(tmp_path / "loss") <= weight_bytes(tmp_path / "equal") + headers
    assert distance(room, tmp_path / "loss") < distance(room, tmp_path / "equal")


def test_sparsities_go_where_they_count_around_the_same_mean(room, tmp_path):
    data = pruned_data(room / "text.txt", algorithm="wanda", sparsity=0.5)
    equal = driver.compress(job_for(room / "model", data, tmp_path / "equal"))
    data["stages"][0]["allocation"] = "loss"
    decided = driver.compress(job_for(room / "model", data, tmp_path / "loss"))
    density = {one["name"]: one["density"] for one in decided.layers}
    told = decided.recipe["allocation"]["layers"]
    assert {name: round(1 - one, 2) for name, one in density.items()} == pytest.approx(
        told, abs=0.02
    )
    assert len(set(told.values())) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "loss").eval()
    sizes = {name: model.get_submodule(name).weight.numel() for name in density}
    zeros = sum(int((model.get_submodule(name).weight == 0).sum()) for name in density)
    assert zeros / sum(sizes.values()) == pytest.approx(0.5, abs=0.01)
    assert all(one["density"] == pytest.approx(0.5, abs=0.01) for one in equal.layers)
    assert distance(room, tmp_path / "loss") < distance(room, tmp_path / "equal")


def test_the_plan_names_the_ranks_that_the_run_gives(room, tmp_path):
    request = job_for(room / "model", factorized(room), tmp_path / "out")
    planned = {layer.name: layer.bytes for layer in driver.plan(request).layers}
    manifest = driver.compress(request)
    equal = LowRankFormat(None, 0.7, None, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(room / "model")
    for layer in manifest.layers:
        shape = tuple(model.get_submodule(layer["name"]).weight.shape)
        assert planned[layer["name"]] == equal.of_rank(layer["rank"]).stored_bytes(*shape)


def test_an_interrupted_run_does_not_score_again(room, tmp_path, monkeypatch):
    request = job_for(room / "model", factorized(room), tmp_path / "out")
    whole = driver.compress(job_for(room / "model", factorized(room), tmp_path / "whole"))
    with monkeypatch.context() as broken:
        broken.setattr(driver, "compress_block", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.compress(request)
    monkeypatch.setattr(Scoring, "run", lambda *_: pytest.fail("scored again"))
    assert driver.compress(request).files == whole.files


def test_equal_shares_need_no_scores(room):
    request = job_for(room / "model", factorized(room, allocation="uniform"), room / "out")
    assert allocation_of(None, request.recipe, torch.float32) is None


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [{"method": "factorize", "rank": 8, "allocation": "loss"}],
            "'allocation: loss' goes with 'rank_budget', not 'rank'",
        ),
        (
            [{"method": "prune", "pattern": "2:4", "allocation": "loss"}],
            "'allocation: loss' goes with 'sparsity'",
        ),
        (
            [
                {"method": "prune", "sparsity": 0.5, "allocation": "loss", "layers": ["*q_proj"]},
                {**FACTORIZE, "ignore": ["*q_proj"]},
            ],
            "one 'mixed' at most or one stage with 'allocation: loss'",
        ),
        (
            [{"method": "slim", "ffn": 0.5}, FACTORIZE],
            "none after 'slim' or 'rotate'",
        ),
    ],
)
def test_what_cannot_be_allocated_is_refused(stages, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe({"name": "tiny", "stages": stages})


def test_the_hash_of_equal_shares_is_what_it_was():
    stage = {"method": "factorize", "rank_budget": 0.8}
    plain = make_recipe({"name": "tiny", "stages": [stage]})
    assert plain.stages[0].hashed() == {
        "method": "factorize",
        "rank_budget": 0.8,
        "rank": None,
        "residual": None,
        "dampening_frac": 0.001,
    }
    other = make_recipe({"name": "tiny", "stages": [{**stage, "allocation": "loss"}]})
    assert other.hash != plain.hash
