"""A checkpoint of random weights that a server can answer with: ``python -m … --output DIR``.

Llama-3-8B's shape of :mod:`.engine_checkpoint`, with a made-up tokenizer of as many words as it has
tokens, so that ``taut worker`` and ``vllm serve`` take text and answer with some. The words mean
nothing; only speed can be measured with them (``taut bench serve``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from taut_bench import engine_checkpoint, engine_models

_UNKNOWN = "w0"
"""What every word of a real text becomes."""


def write_tokenizer(directory: Path, words: int) -> None:
    """Write a tokenizer of the words ``w0``, ``w1``, … with spaces between them.

    Args:
        directory: of the checkpoint.
        words: how many.

    Raises:
        OSError: it cannot be written.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": _UNKNOWN}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 2 where the directory is there already."""
    parser = argparse.ArgumentParser(
        prog="python -m taut_bench.serve_checkpoint", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    parser.add_argument("--scheme", choices=engine_checkpoint.SCHEMES, default="w4a16")
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args(argv)
    config = engine_models.LLAMA_3_8B | {"num_hidden_layers": arguments.layers}
    try:
        engine_checkpoint.write(arguments.output, arguments.scheme, config)
    except FileExistsError:
        sys.stderr.write(f"error: {arguments.output}: is there already\n")
        return 2
    write_tokenizer(arguments.output, config["vocab_size"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
