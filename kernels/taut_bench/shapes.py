"""The products of the benchmarked models' layers, as vLLM cuts them, and how a command picks some.

A product is named ``<model>/<layer>``; those of Llama-3-8B, which most figures are of, by the layer
alone. ``-tp8`` is one rank's slice of eight: qkv and gate_up are cut along N, o and down along K.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from taut_bench.model_sizes import BENCHMARKED, cut

LLAMA3_8B = "llama3-8b"
MODELS = BENCHMARKED | {"llama3-70b-tp8": cut(BENCHMARKED["llama3-70b"], 8)}
SQUARE = {"square": (8192, 8192)}
"""A product of no model's that kernels are often compared on."""


def of_model(name: str) -> dict[str, tuple[int, int]]:
    """Return a model's products by their names.

    Args:
        name: a key of :data:`MODELS`.
    """
    prefix = "" if name == LLAMA3_8B else f"{name}/"
    return {f"{prefix}{layer}": size for layer, size in MODELS[name].products().items()}


LLAMA3_8B_PRODUCTS = of_model(LLAMA3_8B)
PRODUCTS = {name: size for model in MODELS for name, size in of_model(model).items()} | SQUARE
"""Every product: name → (N, K)."""
MOST_TOKENS = 8192
TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 384, 512, 768, 1024, 1664, 2048, 4096, MOST_TOKENS)
"""What ``--tokens all`` stands for."""


def some_of(text: str, known: Iterable[str]) -> list[str]:
    """Read names with commas between them from a command line.

    Args:
        text: the names.
        known: those there are.

    Raises:
        ArgumentTypeError: one is none of them.
    """
    names, known = text.split(","), list(known)
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r}: use some of {', '.join(known)}")
    return names


def _models(text: str) -> list[str]:
    return some_of(text, MODELS)


def token_counts(text: str) -> list[int]:
    """Read numbers of tokens from a command line: ``all``, or some with commas.

    Raises:
        ArgumentTypeError: something else, or a number outside 1..8192.
    """
    if text == "all":
        return list(TOKENS)
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if not all(1 <= M <= MOST_TOKENS for M in found):
        raise argparse.ArgumentTypeError(f"{text!r}: use all, or numbers in 1..{MOST_TOKENS}")
    return found


def add_effort(parser: argparse.ArgumentParser, *, processes: int, replays: int) -> None:
    """Add ``--processes`` and ``--replays`` to a tuner's command line, with these defaults."""
    what = "compilers beside each other"
    parser.add_argument("--processes", type=int, default=processes, help=what)
    parser.add_argument("--replays", type=int, default=replays)


def add_kind(
    parser: argparse.ArgumentParser, choices: Iterable[str], default: Iterable[str]
) -> None:
    """Add ``--kind`` of an 8-bit product to a command line."""
    what = f"of product, repeatable; without it: {', '.join(default)}"
    parser.add_argument("--kind", action="append", choices=sorted(choices), help=what)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--shapes``, ``--shape`` and ``--tokens`` to a benchmark's command line."""
    parser.add_argument(
        "--shapes",
        action="extend",
        type=_models,
        metavar="MODEL,…",
        help=f"all products of these models: {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--shape",
        action="append",
        choices=sorted(PRODUCTS),
        metavar="NAME",
        help="one product, for example qkv (of Llama-3-8B) or qwen2.5-7b/down",
    )
    parser.add_argument(
        "--tokens",
        action="extend",
        type=token_counts,
        metavar="M,…",
        help=f"numbers of tokens, 1..{MOST_TOKENS}, or all",
    )


def chosen(
    arguments: argparse.Namespace, default: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return the products a command line asks for.

    Args:
        arguments: parsed, with what :func:`add_arguments` added.
        default: where it names none.
    """
    names = [name for model in arguments.shapes or () for name in of_model(model)]
    names += arguments.shape or ()
    return {name: PRODUCTS[name] for name in names} or dict(default)
