"""What a bench judges models by: perplexity ratio and KL to the base, as ``taut validate`` does."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from taut_deploy.validate.checkpoint_source import CheckpointSource
from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.divergence import compare
from taut_deploy.validate.metrics import measure, stack
from taut_deploy.validate.text import tokenize_file

_RESAMPLES = 2000


class Judge:
    """Compares models with the base on the judged text.

    Args:
        base: directory of the model.
        text: UTF-8 file.
        judged: sequences of it.
        sequence_length: tokens of each.
        device: ``cpu`` or ``cuda``.

    Raises:
        CouldNotValidateError: the text or the base model cannot be read.
    """

    def __init__(
        self, base: Path, text: Path, judged: int, sequence_length: int, device: str
    ) -> None:
        tokenized = tokenize_file(text, CheckpointTokenizer(base), judged, sequence_length)
        self._sequences, self._device = tokenized.sequences, device
        self._base = CheckpointSource(base, "baseline", device)

    @property
    def tokens(self) -> Any:
        """The judged tokens one after another, [n] int64."""
        return np.asarray(self._sequences, dtype=np.int64).reshape(-1)

    def __call__(self, directory: Path) -> dict[str, float]:
        """Perplexity ratio and mean KL of a model to the base, each with the ends of its interval.

        The ends (95 %, two-sided) are at the metric's name and ``_low`` or ``_high``. At least two
        sequences are judged.
        """
        model = CheckpointSource(directory, "candidate", self._device)
        found = [
            compare(self._base.score(ids), model.score(ids), torch.tensor(ids[1:]))
            for ids in self._sequences
        ]
        metrics = measure(stack(found), None, resamples=_RESAMPLES, seed=0)
        ends: dict[str, float] = {}
        for name in ("perplexity_ratio", "mean_kl"):
            metric = metrics[name]
            ends |= {name: metric.estimate, f"{name}_low": metric.low, f"{name}_high": metric.high}
        return {name: round(value, 6) for name, value in ends.items()}
