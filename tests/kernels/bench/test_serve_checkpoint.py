"""The checkpoint that servers answer with: its words, and its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from taut_bench import engine_checkpoint, engine_models, serve_checkpoint


def test_a_text_of_known_words_comes_back(tmp_path: Path) -> None:
    serve_checkpoint.write_tokenizer(tmp_path, 300)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 300
    assert tokenizer("w7 w299 hello w1").input_ids == [7, 299, 0, 1]
    assert tokenizer.decode([7, 299, 1]) == "w7 w299 w1"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, int]]:
    calls: list[tuple[Path, str, int]] = []

    def write(directory: Path, scheme: str, config: dict[str, Any]) -> None:
        directory.mkdir()
        calls.append((directory, scheme, config["num_hidden_layers"]))

    monkeypatch.setattr(engine_checkpoint, "write", write)
    return calls


def test_the_command_line_writes_weights_and_words(
    tmp_path: Path, written: list[tuple[Path, str, int]]
) -> None:
    target = tmp_path / "model"
    arguments = ["--output", str(target), "--scheme", "fp8", "--layers", "2"]
    assert serve_checkpoint.main(arguments) == 0
    assert written == [(target, "fp8", 2)]
    words = engine_models.LLAMA_3_8B["vocab_size"]
    assert len(transformers.AutoTokenizer.from_pretrained(target)) == words


def test_a_directory_that_is_there_is_left_alone(
    tmp_path: Path, written: list[tuple[Path, str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_checkpoint.main(["--output", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
