"""From a recipe of new stages to a verdict: ``taut validate`` reads what they leave."""

from __future__ import annotations

import pytest
from tiny_models import (
    job_for,
    pruned_data,
    recipe_data,
    write_calibration_text,
    write_llama,
)
from validate_setup import job_for as validation_job
from validate_setup import write_text

from taut_deploy.compress import pipeline
from taut_deploy.validate import run_validation

RECIPES = {
    "pruned": lambda text: pruned_data(text, sparsity=0.5),
    "2:4 and int4": lambda text: pruned_data(text, *recipe_data(text)["stages"], pattern="2:4"),
    "hqq": lambda text: recipe_data(text, algorithm="hqq"),
    "awq": lambda text: (
        recipe_data(text) | {"stages": [{"method": "awq"}, *recipe_data(text)["stages"]]}
    ),
    "learned": lambda text: recipe_data(text, algorithm="round", steps=4),
    "rotated": lambda text: (
        recipe_data(text) | {"stages": [{"method": "rotate"}, *recipe_data(text)["stages"]]}
    ),
    "quanto": lambda text: recipe_data(text) | {"stages": [{"method": "quanto"}]},
    "embeddings and head": lambda text: (
        recipe_data(text) | {"embeddings": {"bits": 8}, "head": {"bits": 4, "group_size": 32}}
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_of_the_stage_is_judged(name, tmp_path):
    model = write_llama(tmp_path / "baseline")
    text = write_calibration_text(tmp_path / "calibration.txt")
    pipeline.compress(job_for(model, RECIPES[name](text), tmp_path / "candidate"))
    write_text(tmp_path / "text.txt", 400)
    result = run_validation(validation_job(tmp_path, output=tmp_path / "report"))
    kl = result.metrics["mean_kl"]
    assert 0 < kl.low <= kl.estimate <= kl.high < 5
    assert (tmp_path / "report" / "report.md").is_file()
