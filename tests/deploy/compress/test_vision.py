"""Models with a vision part: their text part is compressed, the rest is kept as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stood_for import stored
from tiny_families import VISION, write_family
from tiny_models import job_for, recipe_data, write_calibration_text
from torch import nn
from transformers import AutoModelForImageTextToText

from taut_deploy.compress import driver
from taut_deploy.compress.pipeline_plan import plan
from taut_deploy.compress.shrink.shrink import ShrinkJob, shrink
from taut_deploy.compress.skeleton import empty_model
from taut_deploy.errors import ModelError
from taut_deploy.models.pretrained import load_config
from taut_deploy.models.store import describe_directory
from taut_deploy.validate.checkpoint_source import CheckpointSource

SEEN = ("vision", "visual", "projector", "merger")
"""What parts of a model are called that no text goes through."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_calibration_text(tmp_path_factory.mktemp("room") / "text.txt")


@pytest.fixture(scope="module", params=VISION)
def pair(request, text, tmp_path_factory):
    """A model, and its W4A16."""
    room = tmp_path_factory.mktemp("vision")
    model = write_family(room / "model", request.param)
    (model / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    driver.compress(job_for(model, recipe_data(text), room / "out"))
    return model, room / "out"


def sees(name: str) -> bool:
    return any(part in name for part in SEEN)


def test_the_text_part_is_compressed_and_the_vision_part_kept_to_the_byte(pair):
    model, out = pair
    before, after = load_file(model / "model.safetensors"), stored(out)
    kept = [name for name in before if sees(name)]
    assert len(kept) > 15
    assert all(torch.equal(before[name], after[name]) for name in kept)
    packed = [name for name in after if name.endswith("weight_packed")]
    assert len(packed) == 2 * 7 and not any(map(sees, packed))
    assert (out / "preprocessor_config.json").read_text() == (
        model / "preprocessor_config.json"
    ).read_text()


def test_readers_are_told_every_linear_layer_of_the_vision_part(pair):
    model, out = pair
    told = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    loaded = AutoModelForImageTextToText.from_pretrained(model)
    linear = {name for name, module in loaded.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name in linear if sees(name)} <= set(told)
    assert not any("layers.0.mlp.up_proj" in name for name in told if not sees(name))


def test_transformers_reads_it_and_says_nearly_the_same(pair):
    model, out = pair
    base = AutoModelForImageTextToText.from_pretrained(model).eval()
    read, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.randint(6, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = base(input_ids=ids).logits.float()
        found = read.eval()(input_ids=ids).logits.float()
    change = float((found - expected).norm() / expected.norm())
    assert 0 < change < 0.6


def test_validate_takes_both(pair):
    for path in pair:
        source = CheckpointSource(path, "candidate", "cpu")
        assert source.config["model_type"] in VISION


def test_no_part_of_a_skeleton_drops_anything(pair):
    config = load_config(pair[0])
    config.get_text_config().attention_dropout = 0.5
    model = empty_model(config, torch.float32)
    assert model.config.get_text_config().attention_dropout == 0.0
    assert config.get_text_config().attention_dropout == 0.5


@pytest.mark.parametrize("axis", ["depth", "heads", "ffn", "hidden"])
def test_cutting_it_smaller_is_refused_with_what_can_be_done_instead(axis, pair, text, tmp_path):
    data = {**recipe_data(text), "stages": [{"method": "slim", axis: 0.5}]}
    reason = r": model_type '.*' keeps its text part under text_config.*leave 'slim' out"
    with pytest.raises(ModelError, match=rf"^stages\.slim\.{axis}{reason}"):
        plan(job_for(pair[0], data, tmp_path / "planned"))
    record = describe_directory(pair[0])
    job = ShrinkJob(record, tmp_path / "out", {axis: 0.5}, (str(text),), tmp_path / "cache")
    with pytest.raises(ModelError, match=rf"^--{axis}{reason}"):
        shrink(job)


def test_a_plan_counts_only_the_text_part(text, tmp_path):
    model = write_family(tmp_path / "model", "qwen2_vl")
    found = driver.plan(job_for(model, recipe_data(text), Path(tmp_path / "out")))
    assert not any(sees(row.name) for row in found.layers)
