"""What linear layers that share weights with their neighbour cost, beside rounding to fewer bits.

Two ways of sharing: one matrix for both layers (tying; Relaxed Recursive Transformers,
arXiv:2410.20672, §3, with the matrix nearest to both outputs in place of their mean), and one
basis of inputs with coefficients of each (Basis Sharing, arXiv:2410.03765, §3.2).

Command: ``python -m taut_deploy.bench.shared_layers DIRECTORY --calibration FILE --text FILE``.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

from taut_deploy.bench.two_texts import parser_of, reader_of
from taut_deploy.compress.calibrate.gram import add_gram, mirror
from taut_deploy.compress.dense import load_dense
from taut_deploy.compress.lowrank.whitened_svd import whiten
from taut_deploy.compress.quantize.gptq import feedback_of, quantize_weight
from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.compress.shrink.importance import decoder_of, run, with_hooks

_DAMPENING = 1e-3
_GROUP = 64
_BITS = (2, 3, 4, 8)
_TIED_PAIRS = (1, 4, 16)


def relative_error(weight: torch.Tensor, other: torch.Tensor, gram: torch.Tensor) -> float:
    """Square of what changes in the output over the square of the output.

    Args:
        weight: [N, K] fp32.
        other: [N, K] fp32, in its place.
        gram: [K, K] fp32, ``x xᵀ`` of the inputs.
    """
    change = other - weight
    return float(((change @ gram) * change).sum() / ((weight @ gram) * weight).sum())


def tie(weights: Sequence[torch.Tensor], grams: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one matrix [N, K] of the least sum of relative output errors.

    Args:
        weights: [N, K] fp32 each.
        grams: [K, K] fp32 each, ``x xᵀ`` of their inputs.
    """
    seen = torch.zeros_like(grams[0], dtype=torch.float64)
    wanted = torch.zeros_like(weights[0], dtype=torch.float64)
    for weight, gram in zip(weights, grams, strict=True):
        output = weight.double() @ gram.double()
        size = (output * weight).sum().clamp(min=1e-30)
        seen += gram.double() / size
        wanted += output / size
    damped = seen + torch.eye(len(seen)) * _DAMPENING * seen.diagonal().mean()
    # What is damped away stays at the mean of the weights.
    mean = torch.stack([weight.double() for weight in weights]).mean(0)
    change: torch.Tensor = torch.linalg.solve(damped, (wanted - mean @ seen).T).T
    return (mean + change).float()


def share_basis(
    weights: Sequence[torch.Tensor], grams: Sequence[torch.Tensor], budget: float
) -> list[torch.Tensor]:
    """The weights as coefficients [N, r] of one basis [r, K], multiplied out.

    Args:
        weights: [N, K] fp32 each.
        grams: [K, K] fp32 each.
        budget: share of the parameters of all that basis and coefficients have.
    """
    rows, inner = weights[0].shape
    rank = int(budget * len(weights) * rows * inner / (len(weights) * rows + inner))
    total = torch.stack(list(grams)).sum(0)
    found = whiten(torch.cat(list(weights)), total, dampening_frac=_DAMPENING).truncate(rank)
    return list(torch.split(found.up @ found.down, rows))


def rounded(weight: torch.Tensor, gram: torch.Tensor, bits: int) -> torch.Tensor:
    """GPTQ in groups of 64, or of the whole row, symmetric, multiplied out."""
    group = _GROUP if weight.shape[1] % _GROUP == 0 else None
    spec = GridSpec(bits, group, True, torch.bfloat16)
    return quantize_weight(weight, feedback_of(gram), spec).dequantize()


class Layers:
    """The linear layers of a model's blocks, by number and name, and what their inputs are like.

    Args:
        model: transformers' model, dense, in memory.
        tokens: [n, T] int64 calibration text.
    """

    def __init__(self, model: Any, tokens: torch.Tensor) -> None:
        _, blocks = decoder_of(model)
        self.modules = {
            (index, name): module
            for index, block in enumerate(blocks)
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
        }
        self.kinds = list(dict.fromkeys(name for _, name in self.modules))
        self.blocks = len(blocks)
        self.grams = {
            key: torch.zeros(module.in_features, module.in_features)
            for key, module in self.modules.items()
        }
        self.weights = {key: one.weight.detach().clone() for key, one in self.modules.items()}
        handles = [
            module.register_forward_pre_hook(
                lambda _, arguments, key=key: add_gram(
                    self.grams[key], arguments[0].flatten(0, -2).float()
                )
            )
            for key, module in self.modules.items()
        ]
        with_hooks(handles, lambda: run(model, tokens, 4))
        for gram in self.grams.values():
            mirror(gram)
            gram.div_(tokens.numel())

    def pair(self, index: int, kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Weights and Gram matrices of a layer and of its neighbour's."""
        keys = [(index, kind), (index + 1, kind)]
        return [self.weights[key] for key in keys], [self.grams[key] for key in keys]

    @contextmanager
    def replaced(self, values: dict[tuple[int, str], torch.Tensor]) -> Iterator[None]:
        """Put other weights into the model for a while."""
        for key, value in values.items():
            self.modules[key].weight.data.copy_(value)
        try:
            yield
        finally:
            for key in values:
                self.modules[key].weight.data.copy_(self.weights[key])


def errors_of_kind(layers: Layers, kind: str, step: int) -> dict[str, list[float]]:
    """Relative output errors of every ``step``-th pair of neighbours, by what was done to it."""
    found: dict[str, list[float]] = {}
    for index in range(0, layers.blocks - 1, step):
        weights, grams = layers.pair(index, kind)
        one = tie(weights, grams)
        sums = torch.stack(grams).sum(0)
        ways = {
            "one matrix, 16 bits (8)": [one, one],
            "one matrix, INT4 (2.1)": [rounded(one, sums, 4)] * 2,
            "one basis, half of the parameters (8)": share_basis(weights, grams, 0.5),
        }
        for bits in _BITS:
            each = [rounded(w, g, bits) for w, g in zip(weights, grams, strict=True)]
            ways[f"INT{bits}, GPTQ ({bits + 16 / _GROUP:.2f})"] = each
        for way, values in ways.items():
            errors = map(relative_error, weights, values, grams)
            found.setdefault(way, []).append(sum(errors) / 2)
    return found


def cheapest_pairs(layers: Layers) -> Iterator[tuple[float, int, str]]:
    """Mean relative error, number and kind of pairs that could be tied, no layer twice."""
    costs = []
    for kind in layers.kinds:
        for index in range(layers.blocks - 1):
            weights, grams = layers.pair(index, kind)
            one = tie(weights, grams)
            errors = [relative_error(w, one, g) for w, g in zip(weights, grams, strict=True)]
            costs.append((sum(errors) / 2, index, kind))
    used: set[tuple[int, str]] = set()
    for cost, index, kind in sorted(costs):
        keys = {(index, kind), (index + 1, kind)}
        if not keys & used:
            used |= keys
            yield cost, index, kind


@torch.inference_mode()
def _loss(model: Any, sequences: torch.Tensor) -> float:
    total = 0.0
    for row in sequences:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        total += float(nn.functional.cross_entropy(logits, row[1:]))
    return total / len(sequences)


def _ratios(model: Any, layers: Layers, judged: torch.Tensor) -> Iterator[tuple[str, float, float]]:
    """What was done, megabytes of the model then, and perplexity over the model's own."""
    base = _loss(model, judged)
    numbers = sum(value.numel() for value in model.parameters())
    linear = sum(value.numel() for value in layers.weights.values())
    pairs = list(cheapest_pairs(layers))
    for count in _TIED_PAIRS:
        values: dict[tuple[int, str], torch.Tensor] = {}
        saved = 0
        for _, index, kind in pairs[:count]:
            one = tie(*layers.pair(index, kind))
            values |= {(index, kind): one, (index + 1, kind): one}
            saved += one.numel()
        with layers.replaced(values):
            ratio = torch.tensor(_loss(model, judged) - base).exp()
        yield f"{count} cheapest pairs tied, 16 bits", 2 * (numbers - saved) / 1e6, float(ratio)
    for bits in _BITS:
        values = {key: rounded(w, layers.grams[key], bits) for key, w in layers.weights.items()}
        with layers.replaced(values):
            ratio = torch.tensor(_loss(model, judged) - base).exp()
        size = 2 * (numbers - linear) + linear * (bits + 16 / _GROUP) / 8
        yield f"all linear layers INT{bits}, GPTQ", size / 1e6, float(ratio)


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print two tables."""
    parser = parser_of(__doc__, 32)
    parser.add_argument("--judged", type=int, default=16)
    parser.add_argument("--step", type=int, default=6, help="between pairs of the first table")
    asked = parser.parse_args(None if arguments is None else list(arguments))
    read = reader_of(asked.directory, asked.sequence_length)
    model = load_dense(asked.directory, "cpu", trust_remote_code=False).float()
    layers = Layers(model, read(asked.calibration, asked.sequences))
    _say(
        "| layers | way (bits a weight) | relative output error, median | least |"
        "\n|---|---|---|---|"
    )
    for kind in layers.kinds:
        for way, errors in errors_of_kind(layers, kind, asked.step).items():
            _say(f"| {kind} | {way} | {median(errors):.4f} | {min(errors):.4f} |")
    _say("\n| done | MB | perplexity ratio |\n|---|---|---|")
    for done, size, ratio in _ratios(model, layers, read(asked.text, asked.judged)):
        _say(f"| {done} | {size:.1f} | {ratio:.4f} |")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
