"""Calibration tokens: texts known by name, a file of the user's, what the model writes itself."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_deploy.compress.calibrate.self_text import Writer, write_from_start, write_on
from taut_deploy.compress.calibrate.text_files import read_calibration_file
from taut_deploy.compress.calibrate.texts import (
    BUILT_IN_TEXTS,
    built_in_text,
    describe_text,
)
from taut_deploy.errors import RecipeError
from taut_deploy.models.pretrained import load_tokenizer
from taut_deploy.models.store import ModelRecord
from taut_deploy.recipe import Calibration


@dataclass(frozen=True)
class CalibrationSet:
    """Token ids to calibrate on.

    Args:
        tokens: [sequences, sequence_length] int64.
        description: where they come from, in words.
    """

    tokens: torch.Tensor
    description: str

    @property
    def hash(self) -> str:
        """``sha256:`` of the token ids."""
        return "sha256:" + hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()


def make_calibration_set(
    settings: Calibration,
    model: ModelRecord,
    cache: Path,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> CalibrationSet:
    """Build the calibration set a recipe asks for.

    Args:
        settings: the recipe's ``calibration``.
        model: the base model (its tokenizer, and its weights for ``self``).
        cache: directory for texts that were downloaded or sampled.
        device: where the model writes.
        trust_remote_code: let the model's own Python code run.

    Raises:
        RecipeError: if the text is too short or missing.
        ModelError: if a text cannot be downloaded.
    """
    counts = shared_out(settings.sequences, settings.weights)
    tokenizer = load_tokenizer(Path(model.path), trust_remote_code=trust_remote_code)
    parts: dict[str, CalibrationSet] = {}
    for source, count in counts.items():
        if source != "self":
            text, description = _read(source, settings, cache)
            asked = settings.model_copy(update={"sequences": count})
            parts[source] = CalibrationSet(_tokenize(text, asked, tokenizer, source), description)
    if "self" in counts:
        asked = settings.model_copy(update={"sequences": counts["self"]})
        writer = Writer(model, cache, device, trust_remote_code)
        texts = [part.tokens for part in parts.values()]
        tokens = (
            write_on(asked, writer, torch.cat(texts))
            if texts
            else write_from_start(asked, writer, tokenizer)
        )
        parts["self"] = CalibrationSet(tokens, "sampled from the model itself")
    return _mixed(parts, settings.seed)


def shared_out(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Whole shares of a number of sequences, by largest remainder; sources that get none are out.

    Args:
        total: sequences in all.
        weights: of each source, above 0.
    """
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return {name: share for name, share in shares.items() if share}


def _mixed(parts: Mapping[str, CalibrationSet], seed: int) -> CalibrationSet:
    if len(parts) == 1:
        return next(iter(parts.values()))
    tokens = torch.cat([part.tokens for part in parts.values()])
    # Shuffled: stages that judge on the first sequences judge on all sources.
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    told = [f"{len(part.tokens)} x {part.description}" for part in parts.values()]
    return CalibrationSet(tokens[order].contiguous(), "; ".join(told))


def _read(source: str, settings: Calibration, cache: Path) -> tuple[str, str]:
    """A source's text, and what the manifest says of it."""
    if source == "file":
        path = Path(str(settings.path))
        return read_calibration_file(path), describe_text(path)
    text = built_in_text(source, cache).read_text(encoding="utf-8")
    return text, BUILT_IN_TEXTS[source].description


def _tokenize(text: str, settings: Calibration, tokenizer: Any, source: str) -> torch.Tensor:
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    length = settings.sequence_length
    available = len(ids) // length
    if available < settings.sequences:
        origin = settings.path if source == "file" else source
        raise RecipeError(
            f"calibration: {origin} gives {available} sequences of {length} tokens, the recipe "
            f"asks for {settings.sequences}; lower 'sequences' or give more text"
        )
    chunks = ids[: available * length].view(available, length)
    order = torch.randperm(available, generator=torch.Generator().manual_seed(settings.seed))
    return chunks[order[: settings.sequences]].contiguous()
