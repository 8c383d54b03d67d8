"""Recipes with whole-model stages: the same as the commands one by one, in one checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import job_for, make_recipe, recipe_data, write_calibration_text, write_llama
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner
from validate_setup import write_text

from taut_deploy.checkpoint import verify
from taut_deploy.cli import app
from taut_deploy.compress import driver, pipeline
from taut_deploy.compress.equalize.rotate_model import rotate_model
from taut_deploy.compress.pipeline_plan import plan
from taut_deploy.compress.shrink.shrink import ShrinkJob, shrink
from taut_deploy.compress.train.distil import DistilJob, distil
from taut_deploy.compress.train.job import open_models
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.errors import ModelError, OutputError, RecipeError
from taut_deploy.models.store import describe_directory
from taut_deploy.recipe import Rotate, parse_recipe

SLIM = {"method": "slim", "depth": 0.5, "ffn": 0.75}
TRAINING = {
    "tokens": 12 * 4 * 16,
    "sequence_length": 16,
    "batch_size": 4,
    "held_out": 2,
    "learning_rate": 1e-3,
    "state_every": 3,
}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model`` of four blocks and two texts."""
    path = tmp_path_factory.mktemp("pipeline")
    write_llama(path / "model", layers=4)
    write_calibration_text(path / "text.txt")
    write_text(path / "other.txt", 900, seed=6)
    return path


def data_of(room: Path, *, slim: bool = True, text: str = "other.txt", **training) -> dict:
    data = recipe_data(room / "text.txt")
    stage = {"method": "distil", "text": [str(room / text)], **TRAINING, **training}
    data["stages"] = [*([SLIM] if slim else []), *data["stages"], stage]
    return data


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for shard in directory.glob("*.safetensors"):
        found |= load_file(shard)
    return found


def equal(first: Path, second: Path) -> bool:
    ours, theirs = weights(first), weights(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.fixture(scope="module")
def whole(room):
    """The checkpoint of a recipe that slims, quantises and distils."""
    pipeline.compress(job_for(room / "model", data_of(room), room / "whole"))
    return room / "whole"


def test_a_recipe_gives_the_weights_of_the_commands_one_by_one(room, whole, tmp_path):
    base, cache = describe_directory(room / "model"), room / "cache"
    text = (str(room / "text.txt"),)
    shrink(ShrinkJob(base, tmp_path / "a", {"depth": 0.5, "ffn": 0.75}, text, cache, 6, 32))
    driver.compress(job_for(tmp_path / "a", recipe_data(room / "text.txt"), tmp_path / "b"))
    student, taught = describe_directory(tmp_path / "b"), (str(room / "other.txt"),)
    distil(DistilJob(student, base, tmp_path / "c", taught, TrainSettings(**TRAINING), cache))
    assert equal(whole, tmp_path / "c")


def test_one_manifest_tells_of_every_stage(room, whole):
    manifest = verify(whole)
    data = data_of(room)
    assert manifest.recipe_hash == make_recipe(data).hash
    assert [stage["method"] for stage in manifest.recipe["stages"]] == [
        "slim",
        "quantize",
        "distil",
    ]
    assert [one["method"] for one in manifest.recipe["results"]] == ["slim", "blocks", "distil"]
    losses = manifest.recipe["results"][2]["held_out"]
    assert losses["after"]["loss"] < losses["before"]["loss"]
    assert manifest.base_model["digest"] == describe_directory(room / "model").digest
    assert manifest.scheme == "W4A16"
    cut = [layer for layer in manifest.layers if layer["method"].startswith("shrink")]
    assert {layer["method"].split("+")[0] for layer in cut} == {"shrink depth", "shrink ffn"}
    stored = [layer for layer in manifest.layers if layer["method"] == "gptq+trained"]
    assert len(stored) == 2 * 7  # two blocks are left


def test_the_checkpoint_loads_as_what_it_is(whole):
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert (model.config.num_hidden_layers, model.config.intermediate_size) == (2, 96)
    assert torch.isfinite(model(torch.arange(2, 20)[None]).logits).all()


def test_a_finished_one_is_returned_and_one_of_other_text_is_refused(room, whole, tmp_path):
    def refuse(*_):
        raise AssertionError("worked again")

    again = job_for(room / "model", data_of(room), whole)
    assert pipeline.compress(again, refuse) == verify(whole)
    text = room / "changing.txt"
    text.write_bytes((room / "other.txt").read_bytes())
    job = job_for(room / "model", data_of(room, slim=False, text=text.name), tmp_path / "out")
    pipeline.compress(job)
    text.write_text(text.read_text() + " w1 w2")
    with pytest.raises(OutputError, match="trained on other text"):
        pipeline.compress(job)


def test_nothing_is_left_beside_the_output(whole):
    assert not [one for one in whole.parent.iterdir() if one.name.endswith((".stages", ".partial"))]


class Killed(BaseException):
    """Ends a run as a kill does: nothing of ours catches it."""


@pytest.mark.parametrize(
    "place",
    [
        "step 1/3, slim: writing",
        "step 2/3, blocks: compressing model.layers.1",
        "step 3/3, distil: loss",
        "step 3/3, distil: writing",
    ],
)
def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(room, whole, tmp_path, place):
    job = job_for(room / "model", data_of(room), tmp_path / "out")

    def kill(done: int, total: int, what: str) -> None:
        if what.startswith(place) and (done > 7 or "loss" not in what):
            raise Killed

    with pytest.raises(Killed):
        pipeline.compress(job, kill)
    told = []
    pipeline.compress(job, lambda done, total, what: told.append((done, what)))
    assert verify(job.output).digest == verify(whole).digest
    assert (job.output / "taut.json").read_bytes() == (whole / "taut.json").read_bytes()
    if place.startswith("step 3"):
        assert all("step 3" in what for _, what in told)  # nothing finished is done twice
    if "loss" in place:
        assert min(done for done, what in told) == 7  # the state of step 6 was kept


@pytest.mark.parametrize("after", ["manifest", "rename", "seal"])
def test_a_run_killed_while_it_publishes_goes_on(room, whole, tmp_path, monkeypatch, after):
    job = job_for(room / "model", data_of(room), tmp_path / "out")
    with monkeypatch.context() as patched:

        def killed(*_):
            raise Killed

        def sealed_and_killed(directory, manifest):
            pipeline_seal(directory, manifest)
            raise Killed

        pipeline_seal = pipeline.seal
        if after == "manifest":
            patched.setattr(pipeline, "read_manifest", killed)
        elif after == "rename":
            patched.setattr(pipeline, "seal", killed)
        else:
            patched.setattr(pipeline, "seal", sealed_and_killed)
        with pytest.raises(Killed):
            pipeline.compress(job)
    assert not job.output.exists()
    pipeline.compress(job, lambda *_: pytest.fail("worked again"))
    assert (job.output / "taut.json").read_bytes() == (whole / "taut.json").read_bytes()


def test_the_plan_is_of_the_smaller_model_and_names_every_stage(room, whole):
    found = plan(job_for(room / "model", data_of(room), room / "planned"))
    assert found.blocks == 2
    assert len(found.layers) == 14
    assert {layer.shape for layer in found.layers if "down" in layer.name} == {(64, 96)}
    stored = sum(value.nbytes for value in weights(whole).values())
    assert found.bytes_after == pytest.approx(stored, rel=0.01)
    assert [line.split(":")[0] for line in found.whole_model] == ["slim", "distil"]


ROUND = {"algorithm": "round", "steps": 2}


@pytest.mark.parametrize(
    ("before", "quantize", "training"),
    [
        ([], ROUND, {}),
        ([{"method": "rotate"}], {}, {"hidden": 0.5}),
        ([{"method": "rotate"}], ROUND, {}),
        ([SLIM], {}, {}),
        ([SLIM, {"method": "rotate"}], {}, {}),
    ],
    ids=["round", "rotate", "rotate round", "slim", "slim rotate"],
)
def test_qat_starts_from_the_weights_that_were_rounded(
    before, quantize, training, room, tmp_path, monkeypatch
):
    data = recipe_data(room / "text.txt", **quantize)
    stage = {"method": "qat", "text": [str(room / "other.txt")], **TRAINING, **training}
    data["stages"] = [*before, *data["stages"], stage]
    request = job_for(room / "model", data, tmp_path / "out")
    plan(request)
    seen = []

    def looked_at(job, progress):
        seen.append(open_models(job))
        return distil(job, progress)

    monkeypatch.setattr(pipeline, "distil", looked_at)
    result = pipeline.compress(request).recipe["results"][-1]
    (student, teacher), ids = seen[0], torch.arange(2, 50)[None]
    kept = tmp_path / "kept"  # the same recipe without training stores what training starts at
    data["stages"].pop()
    pipeline.compress(job_for(room / "model", data, kept))
    with torch.no_grad():
        ours = student.model.eval()(ids, output_hidden_states=True)
        stored = AutoModelForCausalLM.from_pretrained(kept).eval()(ids).logits
        taught = teacher(ids, output_hidden_states=True)
    torch.testing.assert_close(ours.logits, stored, rtol=1e-4, atol=1e-4)
    masters, codes = student.masters(), weights_of_layers(student)
    dense = tmp_path / "dense"  # what was rounded: the stages before, and nothing else
    assert_nearer(masters, codes, dense_weights(room, before, dense))
    if training:  # in one basis the first states are near, in another they are not
        distance = (ours.hidden_states[0] - taught.hidden_states[0]).norm()
        assert distance < 0.1 * taught.hidden_states[0].norm()
        assert result["held_out"]["before"]["hidden"] < 0.5


def weights_of_layers(student) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": layer.weight for name, layer in student.layers.items()}


def dense_weights(room: Path, before: list[dict], place: Path) -> dict[str, torch.Tensor]:
    """Of the model after the stages that stand before the blocks."""
    if not before:
        return weights(room / "model")
    model = room / "model"
    if SLIM in before:
        shares, text = {"depth": 0.5, "ffn": 0.75}, (str(room / "text.txt"),)
        base = describe_directory(model)
        shrink(ShrinkJob(base, place / "slim", shares, text, room / "cache", 6, 32))
        model = place / "slim"
    if before[-1]["method"] == "rotate":
        request = job_for(model, recipe_data(room / "text.txt"), place / "out")
        rotate_model(request, Rotate(), place / "turned", lambda *_: None)
        model = place / "turned"
    return weights(model)


def assert_nearer(masters, codes, dense) -> None:
    """Masters are as near to what was rounded as their codes' cells let them be."""
    for name, code in codes.items():
        assert (masters[name] - dense[name]).norm() < 0.7 * (code - dense[name]).norm(), name


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [({"text": "absent.txt"}, RecipeError, r"stages\.2\.text: .*absent\.txt: No such file")],
)
def test_what_a_later_stage_would_refuse_is_refused_first(room, tmp_path, change, error, reason):
    with pytest.raises(error, match=reason):
        pipeline.compress(
            job_for(room / "model", data_of(room, **change), tmp_path / "out"),
            lambda *_: pytest.fail("began"),
        )
    assert not (tmp_path / "out").exists()


def test_a_slimmed_width_that_groups_do_not_divide_is_refused_in_the_plan(room):
    data = data_of(room)
    data["stages"][0] = {"method": "slim", "ffn": 0.6}  # 80 of 128 neurons
    with pytest.raises(RecipeError, match="80"):
        plan(job_for(room / "model", data, room / "planned"))


def test_a_format_that_cannot_be_trained_is_refused_in_the_plan(room):
    data = data_of(room, slim=False)
    data["stages"][0] = {"method": "palettize", "entries": 16, "group_size": 32}
    with pytest.raises(RecipeError, match=r"codebooks cannot be trained; leave out 'distil'"):
        plan(job_for(room / "model", data, room / "planned"))


def test_a_block_stage_is_called_by_its_place_in_the_whole_recipe(room):
    data = data_of(room)
    data["stages"][1]["layers"] = ["*.q_prj"]
    with pytest.raises(RecipeError, match=r"stages\.1\.layers: '\*\.q_prj' matches no linear"):
        plan(job_for(room / "model", data, room / "planned"))


def test_a_share_that_cuts_nothing_is_refused_in_the_plan(room):
    data = data_of(room)
    data["stages"][0] = {"method": "slim", "depth": 0.95}
    with pytest.raises(ModelError, match="leaves all 4 units"):
        plan(job_for(room / "model", data, room / "planned"))


def test_slimming_measures_on_text(room):
    data = data_of(room)
    data["calibration"] = {"source": "self"}
    with pytest.raises(RecipeError, match=r"calibration\.source: 'slim' measures on text"):
        plan(job_for(room / "model", data, room / "planned"))


def test_a_recipe_that_only_slims_gives_what_the_command_gives(room, tmp_path):
    data = {**recipe_data(room / "text.txt"), "stages": [SLIM]}
    job = job_for(room / "model", data, tmp_path / "out")
    found = plan(job)
    pipeline.compress(job)
    base = describe_directory(room / "model")
    shares, text = {"depth": 0.5, "ffn": 0.75}, (str(room / "text.txt"),)
    shrink(ShrinkJob(base, tmp_path / "slim", shares, text, room / "cache", 6, 32))
    assert equal(job.output, tmp_path / "slim")
    stored = sum(value.nbytes for value in weights(job.output).values())
    assert found.bytes_after == stored


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ("[{method: distil}]", "there is nothing to train back"),
        ("[{method: slim}]", "give the share to keep"),
        ("[{method: slim, ffn: 1.0}]", "less than 1"),
        ("[{method: slim, ffn: 0.5}, {method: qat}]", "'qat' trains through rounding"),
        ("[{method: prune, sparsity: 0.5}, {method: qat}]", "'qat' trains through rounding"),
        ("[{method: quantize, scheme: W8A8}, {method: slim, ffn: 0.5}]", "must stand before"),
        ("[{method: distil}, {method: quantize, scheme: W8A8}]", "must stand before"),
        ("[{method: quantize, scheme: W8A8}, {method: distil, layers: [a]}]", "whole model"),
        ("[{method: quantize, scheme: W8A8}, {method: distil, token: 1}]", "did you mean 'tokens'"),
        ("[{method: quantize, scheme: W8A8}, {method: distil, kl: 0}]", "nothing to train for"),
        (
            "[{method: slim, hidden: 0.5}, {method: distil, hidden: 1}]",
            "the states have other widths",
        ),
    ],
)
def test_stages_that_do_not_go_together_are_refused(stages, reason):
    with pytest.raises(RecipeError, match=reason):
        parse_recipe(f"name: a\nstages: {stages}", "test")


def test_cache_scales_need_blocks_to_be_calibrated_on():
    with pytest.raises(RecipeError, match="'kv_cache': is calibrated block by block"):
        make_recipe({"name": "a", "kv_cache": {}, "stages": [SLIM]})


def test_cache_scales_of_the_blocks_stay_through_training(room, tmp_path):
    data = {**data_of(room, slim=False, tokens=4 * 16), "kv_cache": {}}
    trained = job_for(room / "model", data, tmp_path / "out")
    pipeline.compress(trained)
    blocks = {**data, "stages": data["stages"][:1]}
    driver.compress(job_for(room / "model", blocks, tmp_path / "blocks"))
    before, after = weights(tmp_path / "blocks"), weights(trained.output)
    scales = [name for name in before if name.endswith(("k_scale", "v_scale"))]
    assert len(scales) == 2 * 4
    assert all(torch.equal(before[name], after[name]) for name in scales)


def test_the_command_prints_the_whole_plan(room, tmp_path, monkeypatch):
    monkeypatch.setenv("TAUT_HOME", str(tmp_path / "home"))
    (tmp_path / "recipe.yaml").write_text(json.dumps(data_of(room)))
    given = ["compress", str(room / "model"), "--recipe", str(tmp_path / "recipe.yaml"), "--plan"]
    answer = CliRunner().invoke(app, given, catch_exceptions=False)
    assert "2 blocks, 14 linear layers" in answer.stdout
    assert "slim: keeps 75% of ffn, 50% of depth" in answer.stdout
    assert "distil: 768 tokens of" in answer.stdout
