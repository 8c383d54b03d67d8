"""What it costs a model to attend with rounded keys and values, and with rounded queries.

Each way is compared with the model itself on the same text, in fp32, rounded as vLLM rounds: FP8
with one scale a tensor from other text, INT8 with a scale for every token and head, queries to FP8
as they are (scale 1) or by a scale from that text.

Command: ``python -m taut_deploy.bench.cache_rounding DIRECTORY --calibration FILE --text FILE``.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from taut_deploy.bench.two_texts import parser_of, reader_of
from taut_deploy.compress.dense import load_dense
from taut_deploy.compress.kv_cache import attention_through, cached, cached_int8
from taut_deploy.compress.quantize.float8 import FP8_MAX

# (attention module, query, key, value) -> what to attend with
Way = Callable[..., tuple[torch.Tensor, ...]]
_MARGIN = 2.0
_AS_THEY_ARE = torch.ones(1)


def ways(model: Any, calibration: torch.Tensor) -> dict[str, Way]:
    """Every way of rounding by its name.

    Args:
        model: transformers' model, in memory.
        calibration: [n, T] int64, the text that scales are taken from.
    """
    largest: dict[nn.Module, torch.Tensor] = {}

    def watch(module: nn.Module, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        now = torch.stack([part.abs().amax() for part in states])
        largest[module] = torch.maximum(largest.get(module, now), now)
        return states

    _log_probabilities(model, calibration, watch)
    scales = {module: found * _MARGIN / FP8_MAX for module, found in largest.items()}

    def fp8(module: nn.Module, states: torch.Tensor, which: int) -> torch.Tensor:
        return cached(states, scales[module][which, None])

    def kept(
        query: Callable[[nn.Module, torch.Tensor], torch.Tensor], *, rounded: bool = True
    ) -> Way:
        def way(module: nn.Module, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, k, v = states
            key, value = (fp8(module, k, 1), fp8(module, v, 2)) if rounded else (k, v)
            return query(module, q), key, value

        return way

    return {
        "cache INT8, token and head": lambda _, q, k, v: (q, cached_int8(k), cached_int8(v)),
        "cache FP8, tensor": kept(lambda _, q: q),
        "cache FP8, tensor; queries FP8 as they are": kept(lambda _, q: cached(q, _AS_THEY_ARE)),
        "cache FP8, tensor; queries FP8, calibrated": kept(lambda module, q: fp8(module, q, 0)),
        "queries FP8 as they are": kept(lambda _, q: cached(q, _AS_THEY_ARE), rounded=False),
        "queries FP8, calibrated": kept(lambda module, q: fp8(module, q, 0), rounded=False),
    }


@torch.inference_mode()
def _log_probabilities(model: Any, tokens: torch.Tensor, way: Way) -> list[torch.Tensor]:
    """Of every token's followers, [T - 1, V] fp32 for each sequence."""
    with attention_through(way):
        return [
            model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            for row in tokens
        ]


def divergence(
    base: list[torch.Tensor], found: list[torch.Tensor], tokens: torch.Tensor
) -> tuple[float, float]:
    """Mean KL to the base in nats, and the ratio of perplexities.

    Args:
        base: [T - 1, V] log-probabilities for each sequence.
        found: likewise.
        tokens: [n, T] int64.
    """
    pairs = list(zip(base, found, tokens, strict=True))
    kl = torch.cat([(exact.exp() * (exact - other)).sum(-1) for exact, other, _ in pairs])
    lost = [(exact - other).gather(-1, row[1:, None]) for exact, other, row in pairs]
    return float(kl.mean()), float(torch.cat(lost).mean().exp())


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print a table."""
    asked = parser_of(__doc__, 16).parse_args(None if arguments is None else list(arguments))
    read = reader_of(asked.directory, asked.sequence_length)
    model = load_dense(asked.directory, "cpu", trust_remote_code=False).float()
    judged = read(asked.text, asked.sequences)
    base = _log_probabilities(model, judged, lambda _, *states: states)
    sys.stdout.write("| rounded | mean KL, nats | perplexity ratio |\n|---|---|---|\n")
    for name, way in ways(model, read(asked.calibration, asked.sequences)).items():
        kl, ratio = divergence(base, _log_probabilities(model, judged, way), judged)
        sys.stdout.write(f"| {name} | {kl:.5f} | {ratio:.4f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
