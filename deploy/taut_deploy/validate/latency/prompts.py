"""Prompts that are unlike each other from their first token on.

vLLM keeps the attention state of prompts by blocks of tokens and reuses it for a prompt that begins
alike. A measurement that repeats prompts then times a cache. So every prompt begins with random
tokens, followed by a stretch of the evaluation text from a random place, and every request carries
a ``cache_salt`` of its own, which keeps even a second run with the same seed from hitting what the
first one left behind.
"""

import numpy as np

from taut_deploy.validate.text import TokenizedText

_RANDOM_HEAD = 16  # tokens; vLLM's smallest cache block


def make_prompts(
    text: TokenizedText, count: int, length: int, random: np.random.Generator
) -> list[list[int]]:
    """Draw prompts.

    Args:
        text: where tokens come from; its BOS, if any, stands first in every prompt.
        count: how many.
        length: tokens each, a BOS included.
        random: drawn from; equal states give equal prompts.

    Returns:
        ``count`` lists of ``length`` token ids.
    """
    prefix = [] if text.bos_token_id is None else [text.bos_token_id]
    body = np.concatenate([np.asarray(row[len(prefix) :]) for row in text.sequences])
    distinct = np.unique(body)
    length -= len(prefix)
    head = min(_RANDOM_HEAD, length)
    prompts = []
    for _ in range(count):
        start = int(random.integers(body.size))
        stretch = np.take(body, np.arange(start, start + length - head), mode="wrap")
        drawn = random.choice(distinct, size=head)
        prompts.append([*prefix, *drawn.tolist(), *stretch.tolist()])
    return prompts
