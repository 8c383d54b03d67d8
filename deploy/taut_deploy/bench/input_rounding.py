"""What it costs a model that its layers' inputs are rounded, and nothing else.

No weights of such a format lose less by being better: the weights here are the model's own. Inputs
are rounded as vLLM rounds them, one scale for a token, in the model's dtype; INT8 beside FP8, then
FP8 for one kind of layer after the other.

Command: ``python -m taut_deploy.bench.input_rounding DIRECTORY --text FILE``.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from taut_deploy.bench.two_texts import parser_of, reader_of
from taut_deploy.compress.dense import load_dense
from taut_deploy.compress.formats.activations import Float8Dynamic, Int8PerToken
from taut_deploy.compress.source.linears import linear_layers
from taut_deploy.compress.state import round_inputs
from taut_deploy.validate.bootstrap import mean_interval, resample_indices

# What a layer's inputs become.
Rounding = Callable[[torch.Tensor], torch.Tensor]
_RESAMPLED = 10_000


def kinds_of(model: nn.Module) -> dict[str, list[nn.Linear]]:
    """The blocks' linear layers by the last part of their names."""
    found: dict[str, list[nn.Linear]] = {}
    for name, layer in linear_layers(model):
        if layer is not model.get_output_embeddings():  # type: ignore[operator]
            found.setdefault(name.rpartition(".")[2], []).append(layer)
    return found


@contextmanager
def rounded(layers: Iterable[nn.Linear], rounding: Rounding) -> Iterator[None]:
    """Let layers see their inputs rounded inside the block."""
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(round_inputs(layer, rounding).remove)
        yield


@torch.inference_mode()
def losses(
    model: Any, tokens: torch.Tensor, layers: Iterable[nn.Linear], rounding: Rounding
) -> tuple[list[float], list[float]]:
    """Of each sequence: mean KL to the model itself, and mean log-probability lost, in nats.

    Args:
        model: transformers' model.
        tokens: [n, T] int64.
        layers: whose inputs are rounded.
        rounding: of an input [..., K].
    """
    kls, lost = [], []
    layers = list(layers)
    for row in tokens:
        exact = _log_probabilities(model, row)
        with rounded(layers, rounding):
            found = _log_probabilities(model, row)
        kls.append(float((exact.exp() * (exact - found)).sum(-1).mean()))
        lost.append(float((exact - found).gather(-1, row[1:, None]).mean()))
    return kls, lost


def _log_probabilities(model: Any, row: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print a table."""
    parser = parser_of(__doc__, 64, calibrated=False)
    asked = parser.parse_args(None if arguments is None else list(arguments))
    tokens = reader_of(asked.directory, asked.sequence_length)(asked.text, asked.sequences)
    model = load_dense(asked.directory, "cpu", trust_remote_code=False)
    kinds = kinds_of(model)
    every = [layer for layers in kinds.values() for layer in layers]
    fp8, int8 = Float8Dynamic().round, Int8PerToken().round
    ways = {"all, FP8": (every, fp8), "all, INT8": (every, int8)}
    ways |= {f"{kind}, FP8": (layers, fp8) for kind, layers in kinds.items()}
    picks = resample_indices(len(tokens), _RESAMPLED, 0)
    sys.stdout.write("| inputs | mean KL, nats | perplexity ratio [95 %] |\n|---|---|---|\n")
    for name, (layers, rounding) in ways.items():
        kls, lost = losses(model, tokens, layers, rounding)
        interval = mean_interval(np.array(lost), picks)
        ratio = math.exp(float(np.mean(lost)))
        ends = f"{math.exp(interval.low):.4f}, {math.exp(interval.high):.4f}"
        sys.stdout.write(f"| {name} | {np.mean(kls):.5f} | {ratio:.4f} [{ends}] |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
