"""What scripts that measure a model on one text, calibrated on another, are asked."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.text import tokenize_file


def parser_of(
    description: str | None, sequences: int, *, calibrated: bool = True
) -> argparse.ArgumentParser:
    """A parser for the model's directory, both texts, and sequences and their length.

    Args:
        description: of the script.
        sequences: unless others are asked for.
        calibrated: whether it takes a text of its own to calibrate on.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("directory", type=Path)
    if calibrated:
        parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=sequences)
    parser.add_argument("--sequence-length", type=int, default=512)
    return parser


def reader_of(directory: Path, length: int) -> Callable[[Path, int], torch.Tensor]:
    """What turns a text and a number of sequences into a model's tokens, [count, length] int64."""
    tokenizer = CheckpointTokenizer(directory)

    def read(file: Path, count: int) -> torch.Tensor:
        return torch.tensor(tokenize_file(file, tokenizer, count, length).sequences)

    return read
