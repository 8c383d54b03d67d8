"""What is left of a block's weights moves until the block's output is right."""

from __future__ import annotations

import pytest
import torch
from tiny_models import job_for, recipe_data, write_llama
from transformers import AutoModelForCausalLM
from validate_setup import write_text

import taut_deploy.hf  # noqa: F401  registers quant_method taut
from taut_deploy.compress import driver
from taut_deploy.compress.calibrate.calibration import make_calibration_set
from taut_deploy.compress.reconstruct import Indexed, Kept, Product, reconstruct
from taut_deploy.compress.state import BlockState, Example
from taut_deploy.errors import ModelError, RecipeError

STAGES = {
    "prune": {"method": "prune", "sparsity": 0.5},
    "2:4": {"method": "prune", "pattern": "2:4"},
    "factorize": {"method": "factorize", "rank_budget": 0.5},
    "residual": {"method": "factorize", "residual": {"rank": 4, "group_size": 32}},
    "palettize": {"method": "palettize", "entries": 8, "group_size": 32},
}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` (fp32, K 64 and 128) and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", layers=3)
    write_text(path / "text.txt", 2000, seed=5)
    return path


def hidden_states(model, tokens):
    with torch.inference_mode():
        return model(tokens, output_hidden_states=True).hidden_states[1:-1]


@pytest.mark.parametrize("name", STAGES)
def test_blocks_come_closer_to_the_original(name, room, tmp_path):
    """On the sequences that judge, which are not learned from."""
    base = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    errors, manifests, models = {}, {}, {}
    for steps in (None, 120):
        stage = {**STAGES[name], **({} if steps is None else {"steps": steps})}
        data = {**recipe_data(room / "text.txt"), "stages": [stage]}
        data["calibration"]["sequences"] = 48
        request = job_for(room / "model", data, tmp_path / f"out-{steps}")
        manifests[steps] = driver.compress(request)
        judges = make_calibration_set(
            request.recipe.calibration, request.model, tmp_path / "cache"
        ).tokens[: 48 // 16]
        models[steps] = AutoModelForCausalLM.from_pretrained(request.output).eval()
        pairs = zip(hidden_states(models[steps], judges), hidden_states(base, judges), strict=True)
        errors[steps] = [float((got - want).square().sum()) for got, want in pairs]
    for after, before in zip(errors[120], errors[None], strict=True):
        # Little of a weight moves beside codes, and of a book only its values and scales.
        assert after < (0.97 if name in {"residual", "palettize"} else 0.9) * before
    assert all(layer["method"].endswith("reconstruct") for layer in manifests[120].layers)
    if "prune" in STAGES[name].values():
        for layer in manifests[120].layers:
            zeros = {s: models[s].get_submodule(layer["name"]).weight == 0 for s in (None, 120)}
            assert layer["density"] == pytest.approx(0.5, abs=0.01)
            assert float(zeros[120].float().mean()) == pytest.approx(0.5, abs=0.01)


def problem(make):
    """A block of one layer whose wanted weight is known."""
    block = torch.nn.ModuleDict({"only": torch.nn.Linear(16, 8, bias=False)})
    block.requires_grad_(False)
    hidden = torch.randn(48, 10, 16, generator=torch.Generator().manual_seed(1))
    wanted = make()
    example = Example(hidden, hidden @ wanted.T, lambda module, x: module["only"](x))
    return BlockState(block, "block", [], {}, example), wanted


def weight_of(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_kind_of_weight_is_what_its_parts_say():
    weight, mask = weight_of(2, 8, 16), weight_of(3, 8, 16) > 0
    assert torch.equal(Kept(weight, mask)(), torch.where(mask, weight, 0.0))
    up, down = weight_of(4, 8, 3), weight_of(5, 3, 16)
    assert torch.equal(Product(up, down, base=weight)(), weight + up @ down)
    order = torch.tensor([3, 0, 10, 1, 4, 2, 5, 6, 7, 9, 8], dtype=torch.int32)
    rows = [*down, *(up @ down)]
    by_row = torch.stack([rows[place] for place in order.tolist()])
    assert torch.equal(Product(up, down, order)(), by_row)
    codes = torch.randint(0, 4, (8, 16), generator=torch.Generator().manual_seed(6))
    book, scale = weight_of(7, 2, 4), weight_of(8, 8, 2)
    by_hand = [
        [float(book[n // 4, codes[n, k]] * scale[n, k // 8]) for k in range(16)] for n in range(8)
    ]
    found = Indexed(codes.to(torch.uint8), book, scale)()
    torch.testing.assert_close(found, torch.tensor(by_hand))


def test_kept_weights_find_the_ones_that_made_the_output():
    mask = weight_of(3, 8, 16) > 0
    state, wanted = problem(lambda: torch.where(mask, weight_of(2, 8, 16), 0.0))
    kept = Kept(wanted + 0.1 * weight_of(9, 8, 16), mask)
    reconstruct(state, {"only": kept}, 300)
    found = kept().detach()
    assert bool((found[~mask] == 0).all())
    assert float((found - wanted).norm()) < 0.02 * float(wanted.norm())


def test_the_start_is_kept_where_no_step_helps():
    state, wanted = problem(lambda: weight_of(2, 8, 16))
    kept = Kept(wanted, torch.ones_like(wanted, dtype=torch.bool))
    reconstruct(state, {"only": kept}, 20)
    assert torch.equal(kept(), wanted)


def test_an_output_that_is_not_finite_is_refused_by_name():
    state, wanted = problem(lambda: weight_of(2, 8, 16))
    state.example.inputs[0, 0, 0] = torch.inf
    kept = Kept(wanted, torch.ones_like(wanted, dtype=torch.bool))
    with pytest.raises(ModelError, match=r"block: the block's output is not finite"):
        reconstruct(state, {"only": kept}, 1)


def test_one_sequence_is_refused_before_the_run(room, tmp_path):
    data = {**recipe_data(room / "text.txt"), "stages": [{**STAGES["prune"], "steps": 10}]}
    data["calibration"]["sequences"] = 1
    with pytest.raises(RecipeError, match="learning by a block's output needs at least 2"):
        job_for(room / "model", data, tmp_path / "out")
