"""What ``taut bench rollout`` makes of its arguments: harmed copy, gateway's file, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_models import job_for, w8a8_data, write_calibration_text, write_llama
from typer.testing import CliRunner

from taut_deploy.bench import rollout_fleet as fleet
from taut_deploy.bench.rollout_harm import Harm, harmed_copy
from taut_deploy.bench.rollout_traffic import read_prompts
from taut_deploy.checkpoint import read_manifest, verify
from taut_deploy.cli import app
from taut_deploy.commands.bench_rollout import HARM_TENSORS
from taut_deploy.compress import driver
from taut_deploy.errors import MeasureError, RecipeError
from taut_deploy.models.directory import weight_files
from taut_deploy.serve.process import ChildSpec
from taut_service.config.settings import load_settings


@pytest.fixture(scope="module")
def w8a8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w8a8")
    data = w8a8_data(write_calibration_text(folder / "text.txt"))
    driver.compress(job_for(write_llama(folder / "model"), data, folder / "out"))
    return folder / "out"


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in weight_files(directory) for k, v in load_file(file).items()}


def test_only_the_named_tensors_of_the_copy_differ_and_by_the_factor(w8a8: Path, tmp_path: Path):
    named = harmed_copy(w8a8, tmp_path / "bad", Harm(HARM_TENSORS, 1.5))
    before, after = (tensors_of(directory) for directory in (w8a8, tmp_path / "bad"))
    # The seven products of the first of two blocks.
    assert len(named) == 7 and all(".layers.0." in name for name in named)
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert values.dtype == after[name].dtype
        if name in named:
            ratio = after[name].double() / values.double()
            # One rounding of the dtype.
            assert torch.allclose(ratio, torch.tensor(1.5).double(), rtol=2**-8)
        else:
            assert torch.equal(values, after[name]), name


def test_the_copy_is_a_checkpoint_without_the_verdict_of_the_other(w8a8: Path, tmp_path: Path):
    harmed_copy(w8a8, tmp_path / "bad", Harm("*.weight_scale", 1.1))
    found, original = verify(tmp_path / "bad", "full"), read_manifest(w8a8)
    assert found.golden == original.golden and found.validation is None
    differ = {name for name in original.files if found.files.get(name) != original.files[name]}
    assert all(name.endswith(".safetensors") or name == "report.md" for name in differ)
    assert verify(w8a8, "full").files == original.files


def test_a_pattern_that_names_nothing_leaves_nothing(w8a8: Path, tmp_path: Path):
    with pytest.raises(MeasureError, match=r"--harm-tensors 'nothing\*': no tensor of .*out"):
        harmed_copy(w8a8, tmp_path / "bad", Harm("nothing*", 1.1))
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("factor", [1.0, float("nan"), float("inf")])
def test_a_factor_that_harms_nothing_is_refused(factor: float):
    with pytest.raises(MeasureError, match=r"--harm-factor .*: expected a finite number other"):
        Harm("*", factor)


def member(name: str) -> fleet.Member:
    return fleet.Member(name, 9000, ChildSpec(name, ("true",), {}, Path("log"), 1.0))


@pytest.mark.parametrize(
    "sections", [{}, {"guard": {"alpha": 0.01}, "rollout": {"steps": [0, 100]}}]
)
def test_the_gateway_takes_its_file(sections: dict[str, object], tmp_path: Path):
    members = [member(name) for name in ("baseline", "candidate", "harmed")]
    content = fleet.gateway_file(members, 256, sections, (8000, 8001), tmp_path / "journal")
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(content))
    settings = load_settings(tmp_path / "gateway.yaml")
    assert settings.guard is not None and settings.rollout is not None
    assert settings.guard.sample == 1.0
    assert settings.guard.alpha == (0.01 if sections else 0.05)
    assert settings.rollout.steps == ((0, 100) if sections else (0, 1, 10, 50, 100))
    assert [v.weight for v in settings.models[0].variants] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: []", "expected the sections guard and rollout, no others"),
        ("guard: [1]", "guard: expected a mapping"),
        ("rollout: {directory: /x}", "rollout.directory: the journal of a rehearsal is in"),
        ("- 1", "expected the sections guard and rollout"),
    ],
)
def test_other_sections_are_refused(text: str, told: str, tmp_path: Path):
    file = tmp_path / "sections.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=told) as refused:
        fleet.read_sections(file)
    assert str(refused.value).startswith(f"--gateway {file}: ")


def test_a_file_of_sections_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"--gateway .*gone\.yaml: No such file"):
        fleet.read_sections(tmp_path / "gone.yaml")


def test_a_baseline_that_is_no_model_is_refused_before_anything_is_copied(
    w8a8: Path, tmp_path: Path
):
    (tmp_path / "empty").mkdir()
    arguments = ["bench", "rollout", str(tmp_path / "empty"), str(w8a8)]
    done = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert done.exit_code != 0 and "no config.json" in str(done.exception) + done.output
    assert not (tmp_path / "out").exists()


def test_prompts_are_the_lines_of_a_file(tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two \n")
    assert read_prompts(file) == ["one", " two "]
    assert len(set(read_prompts(None))) == 96
    file.write_text("\n")
    with pytest.raises(MeasureError, match=r"--prompts .*: holds no prompt"):
        read_prompts(file)


def test_an_output_that_holds_something_is_refused_before_anything_starts(
    w8a8: Path, tmp_path: Path
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    arguments = ["bench", "rollout", str(w8a8), str(w8a8), "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert "not empty" in str(done.exception) + done.output
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
