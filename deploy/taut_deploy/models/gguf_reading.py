"""Has transformers read a GGUF once.

For one model it parses the file three times (configuration, weights, tokenizer), and makes gguf's
table of names anew for each module of the model, twice: half the time of a conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock


@contextmanager
def read_once() -> Iterator[None]:
    """Keep what gguf has read, and its tables of names, until the end of the context.

    transformers takes both from the module when it wants them, and changes neither.
    """
    import gguf

    with (
        mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield
