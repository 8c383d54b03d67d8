"""What scripts that measure a model on one text, calibrated on another, are asked."""

import argparse
from pathlib import Path

import torch

from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.text import tokenize_file


def parser_of(description: str | None, sequences: int) -> argparse.ArgumentParser:
    """A parser for the model's directory, both texts, and sequences and their length.

    Args:
        description: of the script.
        sequences: unless others are asked for.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=sequences)
    parser.add_argument("--sequence-length", type=int, default=512)
    return parser


def tokens_of(file: Path, directory: Path, count: int, length: int) -> torch.Tensor:
    """A text in a model's tokens, [count, length] int64."""
    found = tokenize_file(file, CheckpointTokenizer(directory), count, length)
    return torch.tensor(found.sequences)
