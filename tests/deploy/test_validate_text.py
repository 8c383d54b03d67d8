"""Cutting a text file into token sequences."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from validate_setup import VOCABULARY, write_text, write_tokenizer

from taut_deploy.validate import CouldNotValidateError
from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.text import bos_token_id, tokenize_file


class CountingTokenizer:
    """Splits at white space; counts the characters it was given."""

    def __init__(self) -> None:
        self.characters: list[int] = []

    def encode(self, text: str, *, special: bool) -> list[int]:
        self.characters.append(len(text))
        return [len(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_sequences_are_the_first_tokens_in_order(tmp_path):
    file = write_text(tmp_path / "t.txt", 100)
    write_tokenizer(tmp_path)
    text = tokenize_file(file, CheckpointTokenizer(tmp_path), 3, 8)
    expected = [VOCABULARY[word] for word in file.read_text().split()[:24]]
    assert text.bos_token_id is None
    assert [token for row in text.sequences for token in row] == expected
    assert [len(row) for row in text.sequences] == [8, 8, 8]


def test_a_bos_the_tokenizer_adds_starts_every_sequence_within_its_length(tmp_path):
    file = write_text(tmp_path / "t.txt", 100)
    write_tokenizer(tmp_path, bos=True)
    text = tokenize_file(file, CheckpointTokenizer(tmp_path), 3, 8)
    words = [VOCABULARY[word] for word in file.read_text().split()[:21]]
    assert text.bos_token_id == 0
    assert text.sequences == tuple((0, *words[i : i + 7]) for i in (0, 7, 14))


def test_an_end_token_is_not_taken_for_a_bos():
    class EndToken(CountingTokenizer):
        def encode(self, text: str, *, special: bool) -> list[int]:
            return [*super().encode(text, special=special), *([99] if special else [])]

    assert bos_token_id(EndToken()) is None


def test_hashes_are_of_the_file_and_of_the_ids(tmp_path):
    file = write_text(tmp_path / "t.txt", 100)
    text = tokenize_file(file, CountingTokenizer(), 2, 5)
    ids = np.array(text.sequences, dtype="<i8")
    assert text.text_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert text.text_bytes == file.stat().st_size
    assert text.tokens_sha256 == hashlib.sha256(ids.tobytes()).hexdigest()


def test_only_the_head_of_a_long_text_is_tokenised(tmp_path):
    (tmp_path / "t.txt").write_text("a bcd\nab ce\nabc d\n" * 50_000)
    tokenizer = CountingTokenizer()
    text = tokenize_file(tmp_path / "t.txt", tokenizer, 2, 10)
    assert max(tokenizer.characters) < 300
    assert text.text_bytes == 900_000


@pytest.mark.parametrize("end", ["", "\n"])
def test_of_a_text_in_one_line_no_more_is_tokenised(tmp_path, end):
    words = " ".join("x" * (1 + at % 7) for at in range(100_000))
    (tmp_path / "t.txt").write_text(words + end)
    tokenizer = CountingTokenizer()
    text = tokenize_file(tmp_path / "t.txt", tokenizer, 2, 10)
    assert max(tokenizer.characters) < 300
    assert [token for row in text.sequences for token in row] == [1 + at % 7 for at in range(20)]
    (tmp_path / "t.txt").write_text("x" * 1_000_000 + end)
    with pytest.raises(CouldNotValidateError, match="1 tokens, but 2 sequences"):
        tokenize_file(tmp_path / "t.txt", tokenizer, 2, 10)


def test_a_text_that_fills_the_memory_is_refused_at_once(tmp_path):
    with (tmp_path / "t.txt").open("wb") as sink:
        sink.truncate((1 << 30) + 1)  # takes no room on the disk
    with pytest.raises(
        CouldNotValidateError, match=r"^--text .*t\.txt: larger than 1 GiB; give a part of it$"
    ):
        tokenize_file(tmp_path / "t.txt", CountingTokenizer(), 2, 10)


def test_a_text_of_very_long_words_is_tokenised_whole_when_its_head_is_not_enough(tmp_path):
    lengths = [200 + at for at in range(40)]
    (tmp_path / "t.txt").write_text("".join("x" * length + "\n" for length in lengths))
    text = tokenize_file(tmp_path / "t.txt", CountingTokenizer(), 4, 10)
    assert [token for row in text.sequences for token in row] == lengths


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "the file is empty"),
        (b" \n\t\n", "the file is empty"),
        (b"abc\xff", "not UTF-8 at byte 3"),
        (b"one two three", "3 tokens, but 4 sequences of 5 need 20"),
        (b"a bb ccc d ee\n" * 4, "only 1 of its 4 sequences are different"),
        (b"a bb ccc d ee\n" * 3 + b"a a a a a", "only 2 of its 4 sequences are different"),
    ],
)
def test_unusable_texts_are_refused_by_name(tmp_path, content, fragment):
    file = tmp_path / "t.txt"
    file.write_bytes(content)
    with pytest.raises(CouldNotValidateError) as caught:
        tokenize_file(file, CountingTokenizer(), 4, 5)
    assert str(caught.value).startswith(f"--text {file}: ")
    assert fragment in str(caught.value)


def test_a_missing_text_is_refused_by_name(tmp_path):
    with pytest.raises(CouldNotValidateError, match=r"gone\.txt: No such file"):
        tokenize_file(tmp_path / "gone.txt", CountingTokenizer(), 2, 5)
