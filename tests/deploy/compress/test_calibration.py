"""Calibration tokens: the same for the same recipe, and refused where there are too few."""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import tarfile
from dataclasses import replace

import pytest
import torch
from tiny_models import write_calibration_text, write_llama
from validate_setup import VOCABULARY

from taut_deploy.compress.calibrate import self_text, texts
from taut_deploy.compress.calibrate.articles import paragraphs_of, prose_of_dump
from taut_deploy.compress.calibrate.calibration import make_calibration_set, shared_out
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.models.store import describe_directory
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
    return made(room, Calibration(**settings), room / "cache")


def made(room, settings, cache):
    return make_calibration_set(settings, describe_directory(room / "model"), cache)


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
    found = from_file(room)
    assert found.hash == "sha256:" + hashlib.sha256(found.tokens.numpy().tobytes()).hexdigest()
    content = (room / "text.txt").read_bytes()
    assert found.description == f"file sha256:{hashlib.sha256(content).hexdigest()}"


def test_too_little_text_says_how_much_there_is(room):
    with pytest.raises(
        RecipeError, match=r"text\.txt gives 12 sequences of 32 tokens.*asks for 13"
    ):
        from_file(room, sequences=13)


def test_an_empty_text_is_refused(room, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(RecipeError, match=r"calibration\.path: .*empty\.txt is empty, or holds"):
        from_file(room, path=str(tmp_path / "empty.txt"))


def test_documents_a_line_are_read_as_their_text(room, tmp_path):
    text = (room / "text.txt").read_text()
    words = text.split()
    documents = [" ".join(words[:90]), " ".join(words[90:])]
    file = tmp_path / "t.jsonl"
    file.write_text("\n\n".join(json.dumps({"text": one, "id": 1}) for one in documents) + "\n")
    found = from_file(room, path=str(file))
    assert torch.equal(found.tokens, from_file(room).tokens)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"txt": "a"}', "give a JSON object with a 'text' that is a string"),
        ('{"text": 5}', "give a JSON object with a 'text' that is a string"),
        ('["a"]', "give a JSON object with a 'text' that is a string"),
        ('{"text": ', "not valid JSON"),
    ],
)
def test_a_line_that_holds_no_document_is_named(line, why, room, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "a b c"}\n' + line)
    with pytest.raises(RecipeError, match=rf"calibration\.path: .*t\.jsonl: line 2: {why}"):
        from_file(room, path=str(tmp_path / "t.jsonl"))


@pytest.mark.parametrize("name", ["missing.txt", "model"])
def test_a_file_that_cannot_be_read_is_named(name, room):
    with pytest.raises(RecipeError, match=rf"calibration\.path: cannot read .*{name}"):
        from_file(room, path=str(room / name))


def test_samples_from_the_model_repeat_with_the_seed(room, tmp_path):
    settings = Calibration(source="self", sequences=18, sequence_length=16, seed=3)
    first, again = (made(room, settings, tmp_path / name) for name in ("one", "two"))
    other = made(room, settings.model_copy(update={"seed": 4}), tmp_path)
    assert first.tokens.shape == (18, 16)
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    assert len({tuple(row) for row in first.tokens.tolist()}) == 18
    assert int(first.tokens[:, 0].unique()) == VOCABULARY["<s>"]


def test_what_the_model_wrote_is_kept_and_a_run_goes_on_after_a_batch(room, tmp_path, monkeypatch):
    monkeypatch.setattr(self_text, "_BATCH", 4)
    settings = Calibration(source="self", sequences=8, sequence_length=16)
    whole = made(room, settings, tmp_path / "whole").tokens
    sample, calls = self_text.sample, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(*arguments)

    monkeypatch.setattr(self_text, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(room, settings, tmp_path / "cut")
    assert torch.equal(made(room, settings, tmp_path / "cut").tokens, whole)
    assert len(calls) == 3, "the first batch was kept"
    monkeypatch.setattr(self_text, "load_dense", None)  # the second recipe needs no model
    assert torch.equal(made(room, settings, tmp_path / "cut").tokens, whole)


def test_a_mixture_holds_each_source_by_its_weight(room, tmp_path):
    alone = Calibration(source="file", path=str(room / "text.txt"), sequences=6, sequence_length=32)
    mixed = alone.model_copy(update={"source": {"file": 3, "self": 1}, "sequences": 8})
    found = made(room, mixed, tmp_path)
    of_file = {tuple(row) for row in made(room, alone, tmp_path).tokens.tolist()}
    rows = [tuple(row) for row in found.tokens.tolist()]
    written = [row for row in rows if row not in of_file]
    assert (len(rows), len(written)) == (8, 2)
    assert {row[i : i + 8] for row in of_file for i in range(25)} >= {row[:8] for row in written}
    assert rows[:6] != [tuple(row) for row in made(room, alone, tmp_path).tokens.tolist()]
    assert found.description.startswith("6 x file sha256:")
    assert found.description.endswith("; 2 x sampled from the model itself")


def test_shares_are_whole_and_add_up():
    assert shared_out(10, {"corpus": 1.0, "articles": 1.0, "self": 1.0}) == {
        "corpus": 4,
        "articles": 3,
        "self": 3,
    }
    assert shared_out(8, {"corpus": 1.0, "self": 3.0}) == {"corpus": 2, "self": 6}
    assert shared_out(1, {"corpus": 1.0, "self": 3.0}) == {"self": 1}


@pytest.mark.parametrize(
    ("markup", "paragraphs"),
    [
        ("'''Alpha''' is a [[letter (a)|letter]] " + "of words " * 9 + "long.", 1),
        ("Too short to be prose.", 0),
        ("== A heading of many words " + "and more " * 9 + "==", 0),
        ("* A list of many words " + "and more " * 9 + ".", 0),
        ("{{Box|a={{b}}|" + "word word " * 9 + ".}}", 0),
        ("{| class=x\n| A cell with " + "word word " * 9 + ".\n|}", 0),
        ("A sentence<ref>with " + "words " * 20 + ".</ref> that goes on for " + "x " * 9 + ".", 1),
    ],
)
def test_articles_keep_paragraphs_alone(markup, paragraphs):
    found = paragraphs_of(markup)
    assert len(found) == paragraphs
    for line in found:
        assert not set("[]{}|'<>=") & set(line)


def test_a_dump_gives_its_long_articles():
    sentence = "It is a sentence of the article that has [[link|twelve]] words in it. "
    pages = [("Long", sentence * 20), ("Redirect", "#REDIRECT [[Long]]"), ("Short", sentence)]
    body = "".join(
        f"<page><title>{title}</title><revision><text>{text}</text></revision></page>"
        for title, text in pages
    )
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{body}</mediawiki>'
    found = prose_of_dump(bz2.compress(dump.encode()))
    assert found == (sentence.replace("[[link|twelve]]", "twelve") * 20).strip() + "\n"


def fake_pip(archive_text: str | None):
    """Stands in for ``pip download``: writes the package's archive, or fails as offline."""

    def run(command, **_):
        if archive_text is not None:
            folder = command[command.index("--dest") + 1]
            with tarfile.open(f"{folder}/brotli-1.2.1.tar.gz", "w:gz") as archive:
                for member in texts.BUILT_IN_TEXTS["corpus"].members:
                    info = tarfile.TarInfo(f"brotli-1.2.1/{member}")
                    info.size = len(archive_text)
                    archive.addfile(info, io.BytesIO(archive_text.encode()))
        return type("Done", (), {"returncode": 0 if archive_text is not None else 1})

    return run


def corpus(room, cache, **changes):
    settings = Calibration(**{"sequences": 2, "sequence_length": 16, **changes})
    return made(room, settings, cache)


def test_the_corpus_is_downloaded_once_and_verified(room, tmp_path, monkeypatch):
    text = "w1 w2 w3 w4 " * 20
    digest = hashlib.sha256(f"{text}\n{text}".encode()).hexdigest()
    known = replace(texts.BUILT_IN_TEXTS["corpus"], sha256=digest)
    monkeypatch.setitem(texts.BUILT_IN_TEXTS, "corpus", known)
    monkeypatch.setattr(texts.subprocess, "run", fake_pip(text))
    found = corpus(room, tmp_path)
    assert found.tokens.shape == (2, 16)
    monkeypatch.setattr(texts.subprocess, "run", fake_pip(None))
    assert torch.equal(corpus(room, tmp_path).tokens, found.tokens), "from the cache"
    (tmp_path / "calibration-corpus.txt").write_text("cut short")
    with pytest.raises(ModelError, match="cannot download brotli"):
        corpus(room, tmp_path)


def test_a_corpus_with_other_bytes_is_not_kept(room, tmp_path, monkeypatch):
    monkeypatch.setattr(texts.subprocess, "run", fake_pip("w1 " * 100))
    with pytest.raises(ModelError, match=r"calibration text has sha256 .* expected 915d60e0"):
        corpus(room, tmp_path)
    assert not (tmp_path / "calibration-corpus.txt").exists()


def test_offline_names_the_way_out(room, tmp_path, monkeypatch):
    monkeypatch.setattr(texts.subprocess, "run", fake_pip(None))
    with pytest.raises(ModelError, match=r"cannot download brotli==1\.2\.1 .*calibration\.source"):
        corpus(room, tmp_path)
