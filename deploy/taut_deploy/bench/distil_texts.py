"""What ``taut bench distil`` trains on, and the proof that it is not what it judges on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from taut_deploy.compress.calibrate.self_text import PROMPT_TOKENS, sample
from taut_deploy.compress.dense import load_dense
from taut_deploy.compress.train.text import read_text
from taut_deploy.errors import RecipeError
from taut_deploy.models.store import ModelRecord

SELF = "self"
# A passage of so many tokens, some forty words, is not in two texts by chance.
PASSAGE = 64
_SAMPLED_AT_ONCE = 512
_BASE = np.uint64(6364136223846793005)


@dataclass(frozen=True)
class TextSet:
    """One choice of training texts.

    Args:
        name: in the table.
        sources: of :func:`taut_deploy.compress.train.text.read_text`; ``self`` stands for text that
            the base model goes on to write after tokens of the others.
    """

    name: str
    sources: tuple[str, ...]

    @property
    def written(self) -> tuple[str, ...]:
        """The sources that are there before anything is sampled."""
        return tuple(source for source in self.sources if source != SELF)


def parse_text_sets(given: list[str]) -> list[TextSet]:
    """Read ``NAME=SOURCE,SOURCE…`` entries.

    Raises:
        RecipeError: an entry is none, a name comes twice, or a set has nothing but ``self``.
    """
    found: dict[str, TextSet] = {}
    for entry in given:
        name, equals, sources = entry.partition("=")
        parts = tuple(part for part in sources.split(",") if part)
        if not equals or not name.isidentifier() or not parts:
            raise RecipeError(f"--train {entry[:80]!r}: write NAME=SOURCE,SOURCE as in a=corpus")
        if name in found:
            raise RecipeError(f"--train {entry[:80]!r}: another set has the name {name!r}")
        found[name] = TextSet(name, parts)
        if not found[name].written:
            raise RecipeError(
                f"--train {entry[:80]!r}: {SELF!r} goes on from another text; name one beside it"
            )
    return list(found.values())


def require_apart(source: str, ids: NDArray[np.int64], judged: NDArray[np.int64]) -> None:
    """Refuse a training text that holds a passage of the judged one.

    Args:
        source: of the training text, for the message.
        ids: [n] its tokens.
        judged: [m] tokens of the judged text.

    Raises:
        RecipeError: the two share :data:`PASSAGE` tokens in a row.
    """
    if len(ids) < PASSAGE or len(judged) < PASSAGE:
        return
    known: dict[int, list[int]] = {}
    for place, value in enumerate(_passage_hashes(judged).tolist()):
        known.setdefault(value, []).append(place)
    hashes = _passage_hashes(ids)
    for place in np.flatnonzero(np.isin(hashes, np.fromiter(known, np.uint64))).tolist():
        passage = ids[place : place + PASSAGE]
        for start in known[int(hashes[place])]:
            if np.array_equal(passage, judged[start : start + PASSAGE]):
                raise RecipeError(
                    f"--train: {source} holds tokens {start} to {start + PASSAGE} of the judged "
                    "text (--text); a result judged on what was trained on says nothing"
                )


def _passage_hashes(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One number for each run of :data:`PASSAGE` tokens: a polynomial of them, modulo 2⁶⁴."""
    values = ids.astype(np.uint64)
    total = np.zeros(len(ids) - PASSAGE + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(PASSAGE):
            total = total * _BASE + values[offset : offset + len(total)] + np.uint64(1)
    return total


def source_ids(source: str, model: Path, cache: Path, length: int) -> NDArray[np.int64]:
    """The tokens that a source gives, [n] int64.

    Raises:
        RecipeError: it cannot be read or gives too few.
    """
    text = read_text([source], model, cache, length, 0, trusted=False, asked_by="--train")
    return text.trained.flatten().numpy()


def sample_self(
    base: ModelRecord, prompts: NDArray[np.int64], count: int, length: int, device: str, to: Path
) -> str:
    """Let the base model write sequences, each after a few tokens of a text; returns their file.

    Args:
        base: the model.
        prompts: [n] tokens of the text.
        count: sequences to write.
        length: tokens of each, the prompt counted.
        device: ``cpu`` or ``cuda``.
        to: ``.npy`` file to make.

    Raises:
        RecipeError: the text is shorter than a prompt.
    """
    if len(prompts) <= PROMPT_TOKENS or length <= PROMPT_TOKENS:
        raise RecipeError(
            f"--train: {SELF!r} needs texts and sequences of more than {PROMPT_TOKENS}"
        )
    model = load_dense(Path(base.path), device, trust_remote_code=False)
    torch.manual_seed(0)
    places = torch.randint(0, len(prompts) - PROMPT_TOKENS, (count,)).numpy()
    starts = torch.from_numpy(
        np.stack([prompts[place : place + PROMPT_TOKENS] for place in places])
    )
    parts = torch.split(starts.to(device), _SAMPLED_AT_ONCE)
    written = [sample(model, part, length) for part in parts]
    np.save(to, torch.cat(written).numpy().astype(np.uint32))
    return str(to)
