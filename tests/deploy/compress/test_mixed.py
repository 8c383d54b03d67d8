"""Mixed precision: the choice against brute force, the scores' order, and the checkpoint."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from stood_for import logits_of
from tiny_models import (
    job_for,
    make_recipe,
    recipe_data,
    write_calibration_text,
    write_llama_with_idle_block,
)
from transformers import AutoModelForCausalLM

from taut_deploy.checkpoint import read_manifest, verify
from taut_deploy.compress import driver
from taut_deploy.compress.job import open_stream
from taut_deploy.compress.mixed.decide import mixing_of
from taut_deploy.compress.mixed.knapsack import Option, hull, within_bytes, within_loss
from taut_deploy.compress.mixed.scores import Scoring
from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.errors import RecipeError
from taut_deploy.recipe import with_target

CANDIDATES = [
    {"scheme": "W2A16", "group_size": 32, "algorithm": "rtn"},
    {"scheme": "W4A16", "group_size": 32, "algorithm": "rtn"},
    {"scheme": "W8A16", "group_size": 64, "algorithm": "rtn"},
]


def random_units(seed: int, count: int = 5, options: int = 4) -> list[list[Option]]:
    draw = random.Random(seed)
    return [
        [
            Option(index, draw.randint(1, 40), draw.choice([0.0, draw.random(), draw.random()]))
            for index in range(options)
        ]
        for _ in range(count)
    ]


def total(chosen) -> tuple[int, float]:
    return sum(one.bytes for one in chosen), sum(one.loss for one in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_within_bytes_against_all_choices(seed):
    units = random_units(seed)
    every = [total(chosen) for chosen in itertools.product(*units)]
    smallest = min(size for size, _ in every)
    # What one step can gain is the most that the greedy choice may miss.
    largest_step = max(
        small.loss - large.loss
        for unit in units
        for small, large in itertools.pairwise([*hull(unit), hull(unit)[-1]])
    )
    assert within_bytes(units, smallest - 1) is None
    for budget in range(smallest, 200, 7):
        size, loss = total(within_bytes(units, budget))
        best = min(one for fits, one in every if fits <= budget)
        assert size <= budget
        assert best <= loss + 1e-12
        assert loss <= best + largest_step + 1e-12
    whole = max(size for size, _ in every)
    assert total(within_bytes(units, whole))[1] == pytest.approx(min(loss for _, loss in every))


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_within_a_loss_against_all_choices(seed):
    units = random_units(seed)
    every = [total(chosen) for chosen in itertools.product(*units)]
    best = min(loss for _, loss in every)
    assert within_loss(units, best - 1e-9) is None
    for limit in (best, best + 0.3, best + 1.0, 10.0):
        size, loss = total(within_loss(units, limit))
        assert loss <= limit + 1e-12
        assert size >= min(bytes_ for bytes_, one in every if one <= limit + 1e-12)
    assert total(within_loss(units, 10.0))[0] == min(size for size, _ in every), (
        "where any loss will do, the smallest"
    )


def test_an_option_that_is_larger_and_no_better_is_never_on_the_hull():
    options = [Option(0, 10, 1.0), Option(1, 20, 1.0), Option(2, 30, 0.4), Option(3, 20, 0.5)]
    assert [one.candidate for one in hull(options)] == [0, 3, 2]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` of three blocks, the second of them nearly the identity, and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama_with_idle_block(path / "model", 1e-3)
    write_calibration_text(path / "text.txt")
    return path


def data(room, **target):
    stage = {"method": "mixed", "candidates": CANDIDATES, **target}
    return recipe_data(room / "text.txt") | {"stages": [stage]}


def test_scores_say_what_matters(room, tmp_path):
    """A block whose outputs hardly count costs little; more bits cost less."""
    request = job_for(room / "model", data(room, target_bits=5.0), tmp_path / "out")
    stream = open_stream(request)
    mixing = mixing_of(stream, request.recipe, room / "model", torch.float32)
    assert mixing is not None
    assert [len(unit.layers) for unit in mixing.units[:4]] == [3, 1, 2, 1]
    tokens = torch.randint(5, 30, (6, 32), generator=torch.Generator().manual_seed(0))
    scores = Scoring(stream, tokens, mixing.units).run(lambda block: None)
    of_block = {
        index: sum(score.losses["0"] for score in scores if f".layers.{index}." in score.layers[0])
        for index in range(3)
    }
    assert 0 < of_block[1] < 1e-2 * min(of_block[0], of_block[2])
    assert all(score.losses["0"] > score.losses["1"] > score.losses["2"] for score in scores)
    # Of one block the shares add up to what rounding the whole block does to the predictions.
    base = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    rounded = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    for unit in mixing.units[-4:]:
        for name in unit.layers:
            layer = rounded.get_submodule(name)
            spec = unit.formats[0].spec
            grid = spec.fit(layer.weight.data)
            layer.weight.data = grid.round(layer.weight.data)
    with torch.inference_mode():
        p, q = (m(tokens[:4]).logits[:, ::4].log_softmax(-1) for m in (base, rounded))
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert of_block[2] == pytest.approx(expected, rel=1e-3)


def test_a_mixture_meets_its_bits_and_loads_in_stock_transformers(room, tmp_path):
    request = job_for(room / "model", data(room, target_bits=6.0), tmp_path / "out")
    manifest = driver.compress(request)
    assert verify(tmp_path / "out") == manifest
    assert manifest.recipe["mixture"]["bits"] <= 6.0
    assert manifest.recipe_hash == request.recipe.hash
    # By hand: 2 bits and a scale of 32 bits for 32 weights, 4 bits likewise, 8 and one for 64.
    bits = {"W2A16": 3.0, "W4A16": 5.0, "W8A16": 8.5}
    shapes = {"q": 64, "k": 32, "v": 32, "o": 64, "gate": 128, "up": 128, "down": 128}
    names = [layer["name"] for layer in manifest.layers]
    sizes = {name: 64 * shapes[name.split(".")[-1].removesuffix("_proj")] for name in names}
    mean = sum(sizes[one["name"]] * bits[one["scheme"]] for one in manifest.layers) / sum(
        sizes.values()
    )
    overhead = 8 * 16 * len(sizes) / sum(sizes.values())  # each layer's shape, 16 bytes
    assert manifest.recipe["mixture"]["bits"] == pytest.approx(mean + overhead, abs=0.02)
    schemes = {one["name"]: one["scheme"] for one in manifest.layers}
    assert len(set(schemes.values())) > 1
    for index in range(3):
        attention = f"model.layers.{index}.self_attn"
        assert len({schemes[f"{attention}.{part}_proj"] for part in "qkv"}) == 1
    base = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    for name, scheme in schemes.items():  # rounding to nearest, the model's weights alone count
        group, signed = (64, False) if scheme == "W8A16" else (32, True)
        spec = GridSpec(int(scheme[1]), group, True, torch.float32, signed)
        layer = base.get_submodule(name)
        layer.weight.data = spec.fit(layer.weight.data).round(layer.weight.data)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(logits_of(theirs), logits_of(base), atol=1e-4)


def test_the_same_bytes_serve_better_than_another_choice_of_them(room, tmp_path):
    """Bits go where they count: the reverse choice of the same size is worse."""
    chosen = driver.compress(job_for(room / "model", data(room, target_bits=6.0), tmp_path / "a"))
    base = logits_of(AutoModelForCausalLM.from_pretrained(room / "model").eval())

    def distance(output) -> float:
        got = logits_of(AutoModelForCausalLM.from_pretrained(output).eval())
        return float((got - base).norm())

    schemes = {one["name"]: one["scheme"] for one in chosen.layers}

    def swapped(name: str) -> str:
        """The same layer of block 0 for block 1 and the reverse."""
        head, index, tail = name.split(".", 3)[:2], name.split(".")[2], name.split(".", 3)[3]
        return ".".join([*head, {"0": "1", "1": "0", "2": "2"}[index], tail])

    stages = []
    for candidate in CANDIDATES:
        names = [name for name in schemes if schemes[swapped(name)] == candidate["scheme"]]
        if names:
            stages.append({"method": "quantize", "layers": names, **candidate})
    other = recipe_data(room / "text.txt") | {"stages": stages}
    driver.compress(job_for(room / "model", other, tmp_path / "b"))
    sizes = [
        sum(shard.stat().st_size for shard in (tmp_path / name).glob("*.safetensors"))
        for name in "ab"
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    assert distance(tmp_path / "a") < distance(tmp_path / "b")


def test_an_interrupted_run_does_not_score_again(room, tmp_path, monkeypatch):
    request = job_for(room / "model", data(room, target_bits=6.0), tmp_path / "out")
    driver.compress(job_for(room / "model", data(room, target_bits=6.0), tmp_path / "whole"))
    with monkeypatch.context() as broken:
        broken.setattr(driver, "write_report", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            driver.compress(request)
    monkeypatch.setattr(Scoring, "run", lambda *_: pytest.fail("scored again"))
    assert driver.compress(request).digest == read_manifest(tmp_path / "whole").digest


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"target_bits": 2.5}, r"target_bits: the smallest candidates take 3\.\d+ bits a weight"),
        ({"target_bytes": 10}, r"target_bytes: the smallest candidates make \d+ bytes"),
        ({"max_kl": 1e-12}, r"max_kl: the best candidates are predicted to cost"),
    ],
)
def test_a_target_out_of_reach_says_what_is_in_reach(target, message, room, tmp_path):
    with pytest.raises(RecipeError, match=message):
        driver.plan(job_for(room / "model", data(room, **target), tmp_path / "out"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "give exactly one of 'target_bits', 'target_bytes', 'max_kl'"),
        ({"target_bits": 4, "max_kl": 1}, "give exactly one of"),
        ({"target_bits": -1}, "target_bits"),
        ({"max_kl": 0}, "max_kl"),
        ({"target_bits": 4, "candidates": CANDIDATES[:1]}, "candidates"),
        (
            {"target_bits": 4, "candidates": [*CANDIDATES, {**CANDIDATES[0], "layers": ["a"]}]},
            "'candidates': drop 'layers' and 'ignore'",
        ),
        (
            {"target_bits": 4, "candidates": [*CANDIDATES, {**CANDIDATES[0], "group_sise": 32}]},
            "did you mean 'group_size'",
        ),
    ],
)
def test_a_wrong_stage_is_one_line(change, message, room):
    with pytest.raises(RecipeError, match=message):
        make_recipe(data(room, **change))


def test_flags_set_another_target(room):
    recipe = make_recipe(data(room, target_bits=6.0))
    assert with_target(recipe, None, None, None) is recipe
    assert with_target(recipe, 4.25, None, None).stages[0].target_bits == 4.25
    aimed = with_target(recipe, None, "1.5MiB", None).stages[0]
    assert (aimed.target_bits, aimed.target_bytes) == (None, 1_572_864)
    assert with_target(recipe, None, "5GB", None).stages[0].target_bytes == 5_000_000_000
    assert with_target(recipe, None, None, 0.02).hash != recipe.hash


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((4.0, None, 0.1), "--target-bits and --max-kl: give one of them"),
        ((None, "5 apples", None), "--target-bytes: '5 apples' is no size"),
        ((-1.0, None, None), "--target-bits: target_bits: "),
        ((None, "0", None), "--target-bytes: target_bytes: "),
        ((None, None, float("nan")), "--max-kl: max_kl: "),
    ],
)
def test_wrong_flags_are_one_line(flags, message, room):
    with pytest.raises(RecipeError, match=message) as caught:
        with_target(make_recipe(data(room, target_bits=6.0)), *flags)
    assert "\n" not in str(caught.value)


def test_a_target_without_a_mixture_names_the_recipe(room):
    with pytest.raises(RecipeError, match="recipe 'tiny' has no 'mixed' stage"):
        with_target(make_recipe(recipe_data(room / "text.txt")), 4.5, None, None)
