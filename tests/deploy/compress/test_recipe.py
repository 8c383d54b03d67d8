"""Recipes: the shipped ones parse, and every mistake names its key."""

from __future__ import annotations

import pytest
import yaml

from taut_deploy.errors import RecipeError
from taut_deploy.recipe import builtin_recipes, load_recipe, parse_recipe

W8A8 = {"method": "quantize", "scheme": "W8A8"}
W4A16 = {"method": "quantize", "scheme": "W4A16", "group_size": 32}
GOOD = {"name": "r", "stages": [W4A16]}

WRONG = {
    "unknown key": (
        {**GOOD, "stagez": 1},
        r"stagez: unknown key; did you mean 'stages'\?$",
    ),
    "unknown stage key": (
        {**GOOD, "stages": [{**W4A16, "gruop_size": 1}]},
        r"stages\.0.*gruop_size: unknown key; did you mean 'group_size'\?",
    ),
    "unknown calibration key": (
        {**GOOD, "calibration": {"sauce": 1}},
        r"calibration\.sauce: unknown key; did you mean 'source'\?",
    ),
    "unknown key of a smooth": (
        {**GOOD, "stages": [{"method": "smooth", "zzz": 1}, W8A8]},
        r"smooth\.zzz: unknown key; there are layers, ignore, method, alpha",
    ),
    "no name": ({"stages": [W4A16]}, "name: Field required"),
    "name with a slash": ({**GOOD, "name": "a/b"}, "name: .*pattern"),
    "no stages": ({"name": "r"}, "stages: Field required"),
    "empty stages": ({**GOOD, "stages": []}, "stages: .*at least 1"),
    "stages a string": ({**GOOD, "stages": "W8A8"}, "stages: .*tuple"),
    "unknown method": (
        {**GOOD, "stages": [{"method": "shave"}]},
        r"stages\.0\.method: Input should be one of 'smooth', .*, 'qat'$",
    ),
    "misspelt method": (
        {**GOOD, "stages": [{**W4A16, "method": "quantise"}]},
        r"stages\.0\.method: .*; did you mean 'quantize'\?$",
    ),
    "no method": ({**GOOD, "stages": [{"scheme": "W8A8"}]}, r"stages\.0: give 'method'$"),
    "misspelt algorithm": (
        {**GOOD, "stages": [{**W4A16, "algorithm": "gtpq"}]},
        r"quantize\.algorithm: .*'rtn', .*; did you mean 'gptq'\?$",
    ),
    "misspelt source": (
        {**GOOD, "calibration": {"source": "corpsu"}},
        r"calibration\.source: Input should .*; did you mean 'corpus'\?$",
    ),
    "misspelt allocation": (
        {**GOOD, "stages": [{"method": "factorize", "rank_budget": 0.5, "alocation": "loss"}]},
        r"factorize\.alocation: unknown key; did you mean 'allocation'\?$",
    ),
    "unknown key of a candidate": (
        {**GOOD, "stages": [{"method": "mixed", "candidates": [{"scheem": "W8A8"}]}]},
        r"candidates\.0\.scheem: unknown key; did you mean 'scheme'\?$",
    ),
    "a prune without a target": (
        {**GOOD, "stages": [{"method": "prune"}]},
        "give either 'sparsity', such as 0.5, or 'pattern', 2:4 or 4:8",
    ),
    "a prune with two targets": (
        {**GOOD, "stages": [{"method": "prune", "sparsity": 0.5, "pattern": "2:4"}]},
        "give either 'sparsity'",
    ),
    "a sparsity that keeps nothing": (
        {**GOOD, "stages": [{"method": "prune", "sparsity": 1.0}]},
        r"prune\.sparsity: .*less than 1",
    ),
    "an unknown pattern": (
        {**GOOD, "stages": [{"method": "prune", "pattern": "3:4"}]},
        r"prune\.pattern: .*'2:4' or '4:8'",
    ),
    "steps of another algorithm": (
        {**GOOD, "stages": [{**W4A16, "steps": 10}]},
        "gptq takes no steps: drop 'steps'",
    ),
    "too many steps": (
        {**GOOD, "stages": [{**W4A16, "algorithm": "round", "steps": 500}]},
        r"steps: .*less than or equal to 200",
    ),
    "one sequence to learn from": (
        {
            **GOOD,
            "calibration": {"sequences": 1},
            "stages": [{**W4A16, "algorithm": "round"}],
        },
        "'calibration.sequences': learning by a block's output needs at least 2",
    ),
    "rotating alone": (
        {**GOOD, "stages": [{"method": "rotate"}]},
        "nothing makes the model smaller",
    ),
    "rotating twice": (
        {**GOOD, "stages": [{"method": "rotate"}, {"method": "rotate"}, W4A16]},
        "'rotate' stands once, after 'slim'",
    ),
    "rotating some layers": (
        {**GOOD, "stages": [{"method": "rotate", "layers": ["*mlp*"]}, W4A16]},
        "acts on the whole model: drop 'layers'",
    ),
    "training from weights that were smoothed": (
        {**GOOD, "stages": [{"method": "smooth"}, W8A8, {"method": "qat"}]},
        "'smooth' changes the scale of weights.*'qat' must start from 'codes'",
    ),
    "states after slimming and rotating": (
        {
            **GOOD,
            "stages": [
                {"method": "slim", "ffn": 0.5},
                {"method": "rotate"},
                W4A16,
                {"method": "qat", "hidden": 0.5},
            ],
        },
        "in another basis than those of any whole model: set 'hidden' of 'qat' to 0",
    ),
    "pruning what is stored": (
        {**GOOD, "stages": [W4A16, {"method": "prune", "sparsity": 0.5}]},
        "'prune' must stand before 'quantize'",
    ),
    "unknown scheme": (
        {**GOOD, "stages": [{**W4A16, "scheme": "W3"}]},
        r"stages\.0.*scheme: .*W8A8",
    ),
    "odd group": (
        {**GOOD, "stages": [{**W4A16, "group_size": 48}]},
        r"group_size.*32, 64",
    ),
    "W4A16 without group": (
        {**GOOD, "stages": [{"method": "quantize", "scheme": "W4A16"}]},
        "W4A16 needs 'group_size'",
    ),
    "W8A8 with group": ({**GOOD, "stages": [{**W8A8, "group_size": 32}]}, "drop 'group_size'"),
    "W8A8 asymmetric": ({**GOOD, "stages": [{**W8A8, "symmetric": False}]}, "symmetric: false"),
    "W4A8 asymmetric": (
        {**GOOD, "stages": [{**W4A16, "scheme": "W4A8", "symmetric": False}]},
        "W4A8 has no zero points: drop 'symmetric: false'",
    ),
    "W4AFP8 per channel": (
        {**GOOD, "stages": [{**W4A16, "scheme": "W4AFP8", "group_size": "channel"}]},
        "W4AFP8 needs 'group_size' 32, 64 or 128",
    ),
    "no quantize": ({**GOOD, "stages": [{"method": "smooth"}]}, "followed by 'quantize'"),
    "quantize first": (
        {**GOOD, "stages": [W8A8, {"method": "smooth"}]},
        "'smooth' must stand before 'quantize'",
    ),
    "a pattern that is none": (
        {**GOOD, "stages": [{**W4A16, "layers": ["re:*"]}]},
        r"stages\.0\.quantize\.layers\.0: .*no regular expression",
    ),
    "an ignore that is none": ({**GOOD, "ignore": ["re:("]}, r"ignore\.0: .*no regular expr"),
    "alpha too large": (
        {**GOOD, "stages": [{"method": "smooth", "alpha": 1.5}, W8A8]},
        r"alpha.*less than or equal to 1",
    ),
    "no sequences": ({**GOOD, "calibration": {"sequences": 0}}, r"calibration\.sequences"),
    "long sequences": (
        {**GOOD, "calibration": {"sequence_length": 1 << 20}},
        r"calibration\.sequence_length",
    ),
    "file without path": ({**GOOD, "calibration": {"source": "file"}}, r"calibration: .*'path'"),
    "path without file": ({**GOOD, "calibration": {"path": "x"}}, r"calibration: .*'path'"),
    "unknown source": ({**GOOD, "calibration": {"source": "web"}}, r"calibration\.source"),
    "dampening zero": (
        {**GOOD, "stages": [{**W4A16, "dampening_frac": 0}]},
        r"dampening_frac.*greater than 0",
    ),
    "ignore a string": ({**GOOD, "ignore": "lm_head"}, "ignore: .*tuple"),
    "a list": ([GOOD], "expected a mapping"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_the_key_at_fault_is_named(mistake):
    data, message = WRONG[mistake]
    with pytest.raises(RecipeError, match=message) as refused:
        parse_recipe(yaml.safe_dump(data), "my.yaml")
    assert str(refused.value).startswith("my.yaml: ")
    assert "\n" not in str(refused.value)


def test_text_that_is_not_yaml_is_one_line(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("name: [unclosed\nstages: }")
    with pytest.raises(RecipeError, match=r"r\.yaml: not valid YAML") as refused:
        load_recipe(str(path))
    assert "\n" not in str(refused.value)


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not a text file"):
        load_recipe(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize("reference", ["w3a3", "/", "nowhere/at/all.yaml"])
def test_a_recipe_that_does_not_exist_says_which_do(reference):
    with pytest.raises(RecipeError, match=r"no such recipe; give a YAML file or one of .*w8a8"):
        load_recipe(reference)


def test_the_shipped_recipes_parse():
    assert set(builtin_recipes()) >= {"w8a8", "w4a16"}
    for name in builtin_recipes():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description


def test_the_hash_covers_what_changes_the_result_and_nothing_else():
    base = parse_recipe(yaml.safe_dump(GOOD), "r")
    renamed = parse_recipe(yaml.safe_dump({**GOOD, "name": "b", "description": "d"}), "r")
    spelled = parse_recipe(yaml.safe_dump({**GOOD, "ignore": ["lm_head"]}), "r")
    seeded = parse_recipe(yaml.safe_dump({**GOOD, "calibration": {"seed": 1}}), "r")
    ignoring = parse_recipe(yaml.safe_dump({**GOOD, "ignore": []}), "r")
    assert base.hash == renamed.hash == spelled.hash
    assert len({base.hash, seeded.hash, ignoring.hash}) == 3


@pytest.mark.parametrize("written", ["2:4", "'2:4'", '"2:4"'])
def test_a_pattern_needs_no_quotes(written):
    text = f"{{name: r, stages: [{{method: prune, pattern: {written}}}]}}"
    assert parse_recipe(text, "my.yaml").stages[0].pattern == "2:4"
