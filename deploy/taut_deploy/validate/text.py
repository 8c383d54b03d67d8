"""The text both models are scored on, as token sequences of equal length.

The file is read once and tokenised once, with the baseline's tokenizer and without special tokens;
the first ``sequences`` runs of tokens are taken in order. **BOS rule**: a tokenizer that by itself
puts a token in front of a text (Llama 3 does, SmolLM2 does not) gets that token at the start of
every sequence, in place of the last text token, so that all sequences keep their length. Both
models are given the same ids.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from taut_deploy.documents import read_bounded
from taut_deploy.validate.errors import CouldNotValidateError

# Generous for any language and tokenizer; a longer file is read whole but only its head is
# tokenised.
_CHARACTERS_PER_TOKEN = 12
_GROWTH = 4
MOST_BYTES = 1 << 30
"""Of a text, which is held in memory."""


class Tokenizer(Protocol):
    """What the text needs of a tokenizer, local or on a server."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of ``text``, with the tokenizer's own special tokens if ``special``."""

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Equal token sequences and where they came from.

    Args:
        sequences: token ids, ``sequences`` × ``sequence_length``.
        bos_token_id: the token at the start of every sequence, or None.
        text_sha256: hex digest of the whole file.
        text_bytes: size of the whole file.
        tokens_sha256: hex digest of the ids as little-endian int64, row by row.
    """

    sequences: tuple[tuple[int, ...], ...]
    bos_token_id: int | None
    text_sha256: str
    text_bytes: int
    tokens_sha256: str


def read_text(path: Path) -> tuple[str, bytes]:
    """Read the evaluation text.

    Returns:
        The text and the file's bytes.

    Raises:
        CouldNotValidateError: missing, too large, not UTF-8, or nothing but white space.
    """
    try:
        if path.stat().st_size > MOST_BYTES:  # before it is read
            raise CouldNotValidateError(f"--text {path}: larger than 1 GiB; give a part of it")
        raw = read_bounded(path, MOST_BYTES, CouldNotValidateError)
    except OSError as error:
        raise CouldNotValidateError(f"--text {path}: {error.strerror}") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CouldNotValidateError(f"--text {path}: not UTF-8 at byte {error.start}") from error
    if not text.strip():
        raise CouldNotValidateError(f"--text {path}: the file is empty")
    return text, raw


def tokenize_file(
    path: Path, tokenizer: Tokenizer, sequences: int, sequence_length: int
) -> TokenizedText:
    """Cut the head of a text file into token sequences.

    Args:
        path: UTF-8 file.
        tokenizer: the baseline's.
        sequences: how many.
        sequence_length: tokens each, a BOS included.

    Raises:
        CouldNotValidateError: unreadable, empty or too short.
    """
    text, raw = read_text(path)
    bos = bos_token_id(tokenizer)
    body = sequence_length - (bos is not None)
    needed = sequences * body
    characters = needed * _CHARACTERS_PER_TOKEN
    ids = tokenizer.encode(_head(text, characters), special=False)
    while len(ids) < needed and characters < len(text):
        characters *= _GROWTH
        ids = tokenizer.encode(_head(text, characters), special=False)
    if len(ids) < needed:
        raise CouldNotValidateError(
            f"--text {path}: {len(ids)} tokens, but {sequences} sequences of {sequence_length} "
            f"need {needed}; give a longer text or lower --sequences or --sequence-length"
        )
    prefix = () if bos is None else (bos,)
    rows = tuple((*prefix, *ids[i * body : (i + 1) * body]) for i in range(sequences))
    _refuse_repeated(rows, path)
    return TokenizedText(
        sequences=rows,
        bos_token_id=bos,
        text_sha256=hashlib.sha256(raw).hexdigest(),
        text_bytes=len(raw),
        tokens_sha256=hashlib.sha256(np.asarray(rows, dtype="<i8").tobytes()).hexdigest(),
    )


def _refuse_repeated(rows: Sequence[Sequence[int]], path: Path) -> None:
    """Refuse a text of which half is said before: its sequences would be taken as so many texts.

    Short sequences repeat by chance in any text, so some may.
    """
    different = len(set(rows))
    if 2 * different <= len(rows):
        raise CouldNotValidateError(
            f"--text {path}: only {different} of its {len(rows)} sequences are different; give a "
            "text that does not repeat itself"
        )


def _head(text: str, characters: int) -> str:
    """Cut at a line end, so that the cut splits no word the tokenizer would have kept whole.

    Where none comes soon, as in a file of one line, at a space; else anywhere.
    """
    if len(text) <= characters:
        return text
    for mark in ("\n", " "):
        end = text.find(mark, characters, 2 * characters)
        if end >= 0:
            return text[:end]
    return text[: 2 * characters]


def bos_token_id(tokenizer: Tokenizer) -> int | None:
    """The token the tokenizer puts in front of a text by itself, if any."""
    plain, special = tokenizer.encode("a", special=False), tokenizer.encode("a", special=True)
    if len(special) > len(plain) and special[1 : 1 + len(plain)] == plain:
        return special[0]
    return None
