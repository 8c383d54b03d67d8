"""Calibration tokens: the same for the same recipe, and refused where there are too few."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest
import torch
from tiny_models import write_calibration_text, write_llama
from validate_setup import VOCABULARY

from taut_deploy.compress.calibrate import calibration
from taut_deploy.compress.calibrate.calibration import make_calibration_set
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.recipe import Calibration


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` and ``text.txt`` of 400 words, one token each."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", layers=1)
    write_calibration_text(path / "text.txt")
    return path


def from_file(room, **changes):
    settings = {"source": "file", "path": str(room / "text.txt"), "sequences": 5}
    settings |= {"sequence_length": 32, **changes}
    return make_calibration_set(Calibration(**settings), room / "model", room / "cache")


def test_sequences_are_distinct_pieces_of_the_text_chosen_by_the_seed(room):
    ids = [VOCABULARY[word] for word in (room / "text.txt").read_text().split()]
    pieces = {tuple(ids[i : i + 32]) for i in range(0, 384, 32)}
    chosen = from_file(room).tokens
    assert chosen.shape == (5, 32)
    rows = {tuple(row) for row in chosen.tolist()}
    assert len(rows) == 5
    assert rows <= pieces
    assert torch.equal(from_file(room).tokens, chosen)
    assert not torch.equal(from_file(room, seed=1).tokens, chosen)


def test_the_hash_is_that_of_the_tokens_and_the_path_is_not_told(room):
    made = from_file(room)
    assert made.hash == "sha256:" + hashlib.sha256(made.tokens.numpy().tobytes()).hexdigest()
    content = (room / "text.txt").read_bytes()
    assert made.description == f"file sha256:{hashlib.sha256(content).hexdigest()}"


def test_too_little_text_says_how_much_there_is(room):
    with pytest.raises(
        RecipeError, match=r"text\.txt gives 12 sequences of 32 tokens.*asks for 13"
    ):
        from_file(room, sequences=13)


@pytest.mark.parametrize("name", ["missing.txt", "model"])
def test_a_file_that_cannot_be_read_is_named(name, room):
    with pytest.raises(RecipeError, match=rf"calibration\.path: cannot read .*{name}"):
        from_file(room, path=str(room / name))


def test_samples_from_the_model_repeat_with_the_seed(room):
    settings = Calibration(source="self", sequences=18, sequence_length=16, seed=3)
    first, again = (make_calibration_set(settings, room / "model", room) for _ in range(2))
    other = make_calibration_set(settings.model_copy(update={"seed": 4}), room / "model", room)
    assert first.tokens.shape == (18, 16)
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    assert len({tuple(row) for row in first.tokens.tolist()}) == 18
    assert int(first.tokens[:, 0].unique()) == VOCABULARY["<s>"]


def fake_pip(archive_text: str | None):
    """Stands in for ``pip download``: writes the package's archive, or fails as offline."""

    def run(command, **_):
        if archive_text is not None:
            folder = command[command.index("--dest") + 1]
            with tarfile.open(f"{folder}/brotli-1.2.1.tar.gz", "w:gz") as archive:
                for member in calibration._CORPUS_MEMBERS:
                    info = tarfile.TarInfo(f"brotli-1.2.1/{member}")
                    info.size = len(archive_text)
                    archive.addfile(info, io.BytesIO(archive_text.encode()))
        return type("Done", (), {"returncode": 0 if archive_text is not None else 1})

    return run


def corpus(room, cache, **changes):
    settings = Calibration(**{"sequences": 2, "sequence_length": 16, **changes})
    return make_calibration_set(settings, room / "model", cache)


def test_the_corpus_is_downloaded_once_and_verified(room, tmp_path, monkeypatch):
    text = "w1 w2 w3 w4 " * 20
    digest = hashlib.sha256(f"{text}\n{text}".encode()).hexdigest()
    monkeypatch.setattr(calibration, "_CORPUS_SHA256", digest)
    monkeypatch.setattr(calibration.subprocess, "run", fake_pip(text))
    made = corpus(room, tmp_path)
    assert made.tokens.shape == (2, 16)
    monkeypatch.setattr(calibration.subprocess, "run", fake_pip(None))
    assert torch.equal(corpus(room, tmp_path).tokens, made.tokens), "from the cache"
    (tmp_path / "calibration-corpus.txt").write_text("cut short")
    with pytest.raises(ModelError, match="cannot download brotli"):
        corpus(room, tmp_path)


def test_a_corpus_with_other_bytes_is_not_kept(room, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration.subprocess, "run", fake_pip("w1 " * 100))
    with pytest.raises(ModelError, match=r"calibration text has sha256 .* expected 915d60e0"):
        corpus(room, tmp_path)
    assert not (tmp_path / "calibration-corpus.txt").exists()


def test_offline_names_the_way_out(room, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration.subprocess, "run", fake_pip(None))
    with pytest.raises(ModelError, match=r"cannot download brotli==1\.2\.1 .*calibration\.source"):
        corpus(room, tmp_path)
