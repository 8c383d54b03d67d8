"""Files that are no weights and still decide answers: a candidate with others is no candidate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_models import edit_json, write_llama

from taut_deploy.validate.behaviour import require_same_behaviour
from taut_deploy.validate.errors import CouldNotValidateError


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    path = write_llama(tmp_path_factory.mktemp("models") / "baseline", layers=1)
    (path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{% endfor %}")
    return path


def template(path: Path) -> None:
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")


CHANGES = {
    "another template": (template, "the chat template is '{{ messages"),
    "no template": (
        lambda path: (path / "chat_template.jinja").unlink(),
        "the chat template is None",
    ),
    "another end": (
        lambda path: edit_json(path / "generation_config.json", eos_token_id=7),
        r"generation_config\.json: eos_token_id is \[7\]",
    ),
    "ends that are more": (
        lambda path: edit_json(path / "generation_config.json", eos_token_id=[1, 2]),
        r"eos_token_id is \[1, 2\]",
    ),
    "another temperature": (
        lambda path: edit_json(path / "generation_config.json", temperature=0.2),
        "temperature is 0.2, the baseline's None",
    ),
    "another context": (
        lambda path: edit_json(path / "config.json", max_position_embeddings=64),
        r"config\.json: max_position_embeddings is 64, the baseline's 128",
    ),
    "another RoPE": (
        lambda path: edit_json(
            path / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}
        ),
        "rope_parameters is .*500000",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_another_behaviour_is_refused_by_its_name(case, baseline, tmp_path):
    change, message = CHANGES[case]
    candidate = shutil.copytree(baseline, tmp_path / "candidate")
    require_same_behaviour(baseline, candidate)
    change(candidate)
    with pytest.raises(CouldNotValidateError, match=message) as refused:
        require_same_behaviour(baseline, candidate)
    assert "\n" not in str(refused.value)
    assert str(candidate) in str(refused.value)


def test_ways_of_writing_the_same_are_the_same(baseline, tmp_path):
    candidate = shutil.copytree(baseline, tmp_path / "candidate")
    config = json.loads((baseline / "config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]
    edit_json(candidate / "config.json", rope_parameters=None, rope_theta=theta)
    edit_json(candidate / "generation_config.json", transformers_version="4.0")
    edit_json(candidate / "tokenizer_config.json", chat_template=None)
    require_same_behaviour(baseline, candidate)
