"""What ``taut shrink`` tries, in which order, and what it leaves out with which reason."""

from __future__ import annotations

import importlib.util
import json

import pytest
from tiny_models import recipe_data, write_recipe

from taut_deploy.errors import RecipeError
from taut_deploy.frontier import candidates, served
from taut_deploy.frontier.candidates import Ladder, chosen_recipes, lay_out
from taut_deploy.frontier.limits import SizeLimit, read_limit
from taut_deploy.frontier.request import ShrinkRequest
from taut_deploy.models.store import describe_directory
from taut_deploy.recipe import Recipe, builtin_recipes
from taut_deploy.recipe.schemes import SCHEMES
from taut_deploy.validate import ValidationJob
from taut_deploy.validate.policy import load_policy

GIB = 2**30
# [N, K] of each linear layer of a block: 4 heads of 16 on 2, 64 wide, 128 in the FFN.
SHAPES = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
WEIGHTS = 2 * sum(n * k for n, k in SHAPES)


def ladder_of(
    room,
    recipes: tuple[Recipe, ...],
    *,
    limit: SizeLimit | None = None,
    served_by: str = "h100",
    target_bits: tuple[float, ...] = (),
) -> Ladder:
    path = room.path
    job = ValidationJob(
        baseline=str(path / "model"),
        candidate="",
        text=path / "text.txt",
        policy="balanced",
        output=path / "ladder",
    )
    model = describe_directory(path / "model")
    request = ShrinkRequest(
        model=model,
        recipes=recipes,
        target_bits=target_bits,
        limit=limit,
        policy=load_policy("balanced"),
        validation=job,
        served_by=served_by,
        output=path / "ladder",
        cache=path / "home",
    )
    return lay_out(request)


def recipes_of(room, *names: str) -> tuple[Recipe, ...]:
    return chosen_recipes(tuple(str(room.path / f"{name}.yaml") for name in names))[0]


def reasons(ladder: Ladder) -> dict[str, str]:
    return {one.name: one.reason for one in ladder.skipped}


def base_bytes(room) -> int:
    return (room.path / "model" / "model.safetensors").stat().st_size


def test_sizes_are_predicted_without_compressing_and_put_in_order(room, monkeypatch):
    def never(*_):
        raise AssertionError("a size is not worth a compression")

    monkeypatch.setattr(candidates, "pipeline_plan", never)
    found = ladder_of(room, recipes_of(room, "w8", "w4", "w2")).candidates
    assert [one.name for one in found] == ["w2", "w4", "w8"]
    # By hand: codes, a bfloat16 scale for each group, and two int64 of the shape for each layer.
    dense = base_bytes(room) - 2 * WEIGHTS
    layers = 2 * len(SHAPES)
    by_hand = [
        dense + WEIGHTS * bits // 8 + WEIGHTS // group * 2 + 16 * layers
        for bits, group in ((2, 32), (4, 32), (8, 64))
    ]
    assert [one.weights_bytes for one in found] == by_hand


def test_equal_recipes_are_one_candidate_and_of_equal_sizes_the_fast_one_is_first(room):
    text = room.path / "calibration.txt"
    learned = recipe_data(text, scheme="W4A16", algorithm="round", steps=4)
    write_recipe(room.path / "a-learned.yaml", {**learned, "name": "a-learned"})
    write_recipe(room.path / "w4-too.yaml", {**recipe_data(text, algorithm="rtn"), "name": "w4"})
    found = ladder_of(room, recipes_of(room, "a-learned", "w4", "w4-too")).candidates
    assert [one.name for one in found] == ["w4", "a-learned"]


def test_every_shipped_recipe_is_tried_or_said_to_be_left_out(room, monkeypatch):
    # The corpus is not there: nothing may need it before the first try.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    recipes, left_out = chosen_recipes(())
    ladder = ladder_of(room, recipes, target_bits=(4.5,))
    skipped = reasons(ladder) | {one.name: one.reason for one in left_out}
    named = {one.name.partition(",")[0] for one in ladder.candidates}
    named |= {name.partition(",")[0] for name in skipped}
    assert named == set(builtin_recipes())
    assert skipped["distil"] == skipped["qat-w4"]
    assert skipped["distil"].startswith("trains for long")
    for pruned in ("wanda50", "sparsegpt50", "sparse24"):
        assert skipped[pruned] == "is no smaller than the model"
    assert "128" in skipped["fp8-block"]
    assert skipped["slim"].startswith("calibration.sequence_length: 512 is more than the 128 tok")
    assert {one.name for one in ladder.candidates} >= {"w4a16", "w8a8", "palette4"}
    assert [one.weights_bytes for one in ladder.candidates] == sorted(
        one.weights_bytes for one in ladder.candidates
    )


def test_a_narrower_model_is_a_candidate(room):
    text = room.path / "text.txt"
    (room.path / "narrow.yaml").write_text(
        f"name: narrow\ncalibration: {{source: file, path: {text}, sequences: 2, "
        "sequence_length: 32}\nstages: [{method: slim, ffn: 0.5}]\n"
    )
    ladder = ladder_of(room, recipes_of(room, "narrow"))
    assert [one.name for one in ladder.candidates] == ["narrow"]


def test_what_trains_is_tried_where_it_is_named():
    recipes, left_out = chosen_recipes(("qat-w4",))
    assert [one.name for one in recipes] == ["qat-w4"]
    assert left_out == ()


def test_what_a_cpu_does_not_serve_is_left_out_there_alone(room):
    recipes = recipes_of(room, "w2", "w4", "w8", "mix")
    on_cpu = ladder_of(room, recipes, served_by="cpu", target_bits=(6.0,))
    assert {one.name for one in on_cpu.candidates} == {"w4", "w8", "mix, 6 bits"}
    expected = "cannot be served: nothing here multiplies W2A16 on a CPU"
    assert reasons(on_cpu) == {"w2": expected}
    on_card = ladder_of(room, recipes, served_by="h200", target_bits=(6.0,))
    assert on_card.skipped == ()


def test_weights_of_8_bits_are_left_out_on_a_cpu_without_our_kernels(room, monkeypatch):
    monkeypatch.setenv("TAUT_KERNELS", "off")
    ladder = ladder_of(room, recipes_of(room, "w4", "w8"), served_by="cpu")
    assert [one.name for one in ladder.candidates] == ["w4"]
    assert "REFUSED by taut worker: only taut's plugin loads it" in reasons(ladder)["w8"]


def test_what_no_worker_loads_is_left_out(room, monkeypatch):
    monkeypatch.setenv("TAUT_KERNELS", "off")
    ladder = ladder_of(room, (*recipes_of(room, "w4"), *chosen_recipes(("palette4",))[0]))
    assert [one.name for one in ladder.candidates] == ["w4"]
    assert "REFUSED by taut worker: only taut's plugin loads it" in reasons(ladder)["palette4"]


def test_mixtures_have_a_candidate_for_each_target_that_leaves_a_choice(room):
    ladder = ladder_of(room, recipes_of(room, "mix"), target_bits=(4.0, 5.0, 7.5, 9.0))
    # By hand: 4 + 16/32 bits a weight and 8 + 16/64, and 128 bits of a shape for each layer.
    shape = 128 * 2 * len(SHAPES) / WEIGHTS
    told = f"its candidates take {4.5 + shape:.2f} to {8.25 + shape:.2f} bits a weight"
    assert reasons(ladder) == {"mix, 4 bits": told, "mix, 9 bits": told}
    dense = base_bytes(room) - 2 * WEIGHTS
    assert {one.name: one.weights_bytes for one in ladder.candidates} == {
        "mix, 5 bits": dense + WEIGHTS * 5 // 8,
        "mix, 7.5 bits": dense + int(WEIGHTS * 7.5 / 8),
    }


def test_a_mixture_fills_what_the_limit_allows(room):
    # Files of a mixture have headers of their own, for which room is left.
    room_for_headers = (1 << 16) + 1024 * 2 * len(SHAPES)
    most = base_bytes(room) - 2 * WEIGHTS + WEIGHTS * 6 // 8 + room_for_headers
    limit = SizeLimit("--target-bytes x", most, "weights")
    ladder = ladder_of(room, recipes_of(room, "mix"), limit=limit)
    (found,) = ladder.candidates
    assert found.name == "mix, all that fits"
    assert found.recipe.stages[0].target_bytes == most - room_for_headers


def test_what_is_larger_than_the_limit_is_left_out(room):
    sizes = {
        one.name: one.weights_bytes
        for one in ladder_of(room, recipes_of(room, "w2", "w4", "w8")).candidates
    }
    limit = SizeLimit("--target-bytes x", sizes["w4"], "weights")
    ladder = ladder_of(room, recipes_of(room, "w2", "w4", "w8"), limit=limit)
    assert [one.name for one in ladder.candidates] == ["w2", "w4"]
    assert reasons(ladder)["w8"].endswith("MB are more than --target-bytes x allows")


def test_a_limit_below_everything_names_the_smallest(room):
    limit = read_limit(None, "1KB")
    with pytest.raises(RecipeError, match=r"--target-bytes 1KB: the smallest is .* MB \(recipe w4"):
        ladder_of(room, recipes_of(room, "w8", "w4"), limit=limit)


def test_nothing_left_names_the_first_reason(room):
    with pytest.raises(RecipeError, match="nothing is left to try; w2: cannot be served"):
        ladder_of(room, recipes_of(room, "w2"), served_by="cpu")


def test_memory_counts_weights_as_loaded_and_the_cache_of_a_request(room):
    limit = read_limit("3GiB", None)
    assert limit == SizeLimit("--memory 3GiB", GIB, "memory")  # 2 GiB are reserve
    names = ("w4.yaml", "fp8-kv", "palette4")
    recipes = tuple(
        chosen_recipes((str(room.path / name) if "." in name else name,))[0][0] for name in names
    )
    found = {one.name: one for one in ladder_of(room, recipes, limit=limit).candidates}
    # 1024 + 256 tokens, keys and values of 2 layers, 2 heads of 16, 2 bytes or 1.
    cache = 1280 * 2 * 2 * 2 * 16
    assert found["w4"].memory_bytes == found["w4"].weights_bytes + 2 * cache
    assert found["fp8-kv"].memory_bytes == found["fp8-kv"].weights_bytes + cache
    dense = base_bytes(room)
    assert found["palette4"].weights_bytes < dense
    assert found["palette4"].memory_bytes == dense + 2 * cache


def test_the_schemes_no_cpu_serves_are_schemes():
    assert set(SCHEMES) >= served._NOT_ON_CPU


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_lists_no_kernel_of_those_schemes_for_this_cpu(run_with_vllm):
    script = """
import json, torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_wNa8 as integers,
)
from vllm.platforms import PlatformEnum

def served(bits):
    weights = integers.WNA16_SUPPORTED_TYPES_MAP.get(bits)
    shape = (256, 256)
    asked = MPLinearLayerConfig(shape, shape, weights, torch.bfloat16, 64, False, False)
    known = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    return weights is not None and any(one.can_implement(asked)[0] for one in known)

found = {f"W{bits}A16": served(bits) for bits in (2, 3, 4)}
ours_alone = served(8)
found["NVFP4A16"] = PlatformEnum.CPU in linear._POSSIBLE_NVFP4_KERNELS
print("FOUND " + json.dumps([found, ours_alone]))
"""
    done = run_with_vllm("-c", script)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-2000:]
    found, eight_bits = json.loads(lines[0].removeprefix("FOUND "))
    assert found == {name: name not in served._NOT_ON_CPU for name in found}
    assert not eight_bits, "vLLM has a kernel of W8A16 now: measure ours against it"
