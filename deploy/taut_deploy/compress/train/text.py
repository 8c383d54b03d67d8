"""Tokens to train on: documents one after another, cut into sequences of one length."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from taut_deploy.compress.calibrate.text_files import UnreadableTextError, read_documents
from taut_deploy.compress.calibrate.texts import BUILT_IN_TEXTS, built_in_text
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.models.directory import read_shape, require_within_context
from taut_deploy.models.pretrained import load_tokenizer

# Tokenised at a time: a tokenizer keeps several times the text in memory.
_PIECE = 1 << 20


@dataclass(frozen=True)
class TrainingText:
    """Sequences to train on and sequences to judge by.

    Args:
        trained: [n, T] int64.
        held_out: [m, T] int64, of the same text; m may be 0.
        description: where they come from, in words.
    """

    trained: torch.Tensor
    held_out: torch.Tensor
    description: str

    @property
    def hash(self) -> str:
        """``sha256:`` of all token ids."""
        both = torch.cat([self.trained, self.held_out]).numpy().tobytes()
        return "sha256:" + hashlib.sha256(both).hexdigest()


def read_text(
    sources: list[str],
    model: Path,
    cache: Path,
    length: int,
    held_out: int,
    *,
    trusted: bool,
    asked_by: str = "--text",
) -> TrainingText:
    """Tokenise and pack.

    Args:
        sources: ``corpus``, ``articles``, text files (``.jsonl``: one document a line, under
            ``text``), or ``.npy`` arrays of token ids.
        model: directory with the tokenizer.
        cache: where built-in texts are kept.
        length: tokens of a sequence.
        held_out: sequences to keep apart, where there are 16 times as many.
        trusted: let the model's own Python code run.
        asked_by: flag or field that names the sources, for errors.

    Raises:
        RecipeError: a file cannot be read or gives too few tokens, or sequences are longer than the
            model's context.
    """
    try:
        parts = [_ids(source, model, cache, trusted) for source in sources]
    except UnreadableTextError as error:
        raise RecipeError(f"{asked_by}: {error}") from error
    ids = np.concatenate(parts)
    count = len(ids) // length
    if count < 1:
        raise RecipeError(
            f"{asked_by}: {', '.join(sources)} gives {len(ids)} tokens, fewer than one sequence of "
            f"{length}; give more text or a smaller sequence_length"
        )
    longest = read_shape(model, trust_remote_code=trusted).max_position_embeddings
    require_within_context(longest, length, "sequence_length")
    sequences = torch.from_numpy(ids[: count * length].astype(np.int64)).view(count, length)
    kept = held_out if count >= 16 * held_out else 0
    # Spread over the text, so that every source is judged.
    places = torch.linspace(0, count - 1, kept).long() if kept else torch.empty(0).long()
    judged = torch.zeros(count, dtype=torch.bool)
    judged[places] = True
    trained, held = sequences[~judged].contiguous(), sequences[judged].contiguous()
    return TrainingText(trained, held, describe_sources(sources, asked_by))


def describe_sources(sources: list[str], asked_by: str = "--text") -> str:
    """What a manifest says of training texts: their hashes, not their places.

    Raises:
        RecipeError: a file cannot be read.
    """
    try:
        return "; ".join(_described(source) for source in sources)
    except OSError as error:
        raise RecipeError(f"{asked_by}: {error.filename}: {error.strerror}") from error


def _ids(source: str, model: Path, cache: Path, trusted: bool) -> Any:
    """Token ids of one source, [n]."""
    path = built_in_text(source, cache) if source in BUILT_IN_TEXTS else Path(source)
    if path.suffix == ".npy":
        return _array(path)
    tokenizer = load_tokenizer(model, trust_remote_code=trusted)
    end = tokenizer.eos_token_id
    found: list[int] = []
    for document in read_documents(path):
        found += _tokenized(document, tokenizer)
        found += [] if end is None else [int(end)]
    return np.asarray(found, dtype=np.int64)


def _tokenized(document: str, tokenizer: Any) -> list[int]:
    found: list[int] = []
    while document:
        cut = document.rfind("\n", 0, _PIECE) + 1 if len(document) > _PIECE else len(document)
        cut = cut or _PIECE
        found += tokenizer(document[:cut], add_special_tokens=False, verbose=False)["input_ids"]
        document = document[cut:]
    return found


def _array(path: Path) -> Any:
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UnreadableTextError(f"cannot read {path} as an array of token ids") from error
    if ids.dtype.kind not in "iu" or not ids.size or int(ids.min()) < 0:
        raise UnreadableTextError(f"{path}: token ids are whole numbers from 0 on, one at least")
    return ids.reshape(-1)


def _described(source: str) -> str:
    if source in BUILT_IN_TEXTS:
        return BUILT_IN_TEXTS[source].description
    with Path(source).open("rb") as handle:
        return f"file sha256:{hashlib.file_digest(handle, 'sha256').hexdigest()}"


def require_in_vocabulary(text: TrainingText, rows: int) -> None:
    """Check that the embedding has a row for every token.

    Raises:
        ModelError: it has not.
    """
    largest = int(text.trained.max())
    if largest >= rows:
        raise ModelError(
            f"--text: holds token {largest}, the student's vocabulary has {rows}; tokenise it with "
            "the student's own tokenizer"
        )
