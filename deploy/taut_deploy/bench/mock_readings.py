"""What the mock engine reads for the gateway's guard: tokens, and log-probabilities of a prompt.

Answers have the size and the shape of vLLM's: for each token of the prompt the ``prompt_logprobs``
most probable ones and its own. They are put together from prepared pieces. As a worker's do from
batch to batch, they differ a little from one reading to the next, too little for a guard to mind.
"""

from __future__ import annotations

import json
import math
import random
import struct
from functools import lru_cache
from itertools import cycle
from typing import Any

from taut_deploy.bench.mock_answers import CREATED, document, error

BYTES_PER_TOKEN = 4
_VOCABULARY = 128_000
_PLACES = 512
"""Different distributions; longer texts repeat them."""
_MAX_TOP_K = 20
_NOISE = 1e-4
"""Nats, between two readings."""
_NUMBERS = cycle(range(3))


def tokenized(body: bytes) -> bytes:
    """Answer ``/tokenize``: a token for four characters of a prompt or a conversation.

    Args:
        body: of the request.
    """
    try:
        count = -(-len(_text_of(json.loads(body))) // BYTES_PER_TOKEN)
    except (ValueError, KeyError, TypeError, AttributeError):
        return error(400, "neither a prompt nor a conversation")
    return _tokens(count)


@lru_cache(maxsize=64)
def _tokens(count: int) -> bytes:
    tokens = [_token(place) for place in range(count)]
    answer = {"count": count, "max_model_len": 131_072, "tokens": tokens}
    return document(200, json.dumps(answer, allow_nan=False).encode())


def read(body: bytes) -> bytes:
    """Answer ``/v1/completions`` with ``prompt_logprobs``.

    Args:
        body: of the request; its prompt is token ids.
    """
    try:
        request = json.loads(body)
        tokens, top_k = tuple(map(int, request["prompt"])), int(request["prompt_logprobs"])
    except (ValueError, KeyError, TypeError):
        return error(400, "prompt_logprobs want a prompt of token ids")
    if not 0 <= top_k <= _MAX_TOP_K:
        return error(400, f"prompt_logprobs: 0 to {_MAX_TOP_K}")
    return _reading(tokens, top_k, next(_NUMBERS))


@lru_cache(maxsize=16)
def _reading(tokens: tuple[int, ...], top_k: int, number: int) -> bytes:
    count = len(tokens)
    entries = (
        _entry(place % _PLACES, token, top_k, number)
        for place, token in enumerate(tokens[1:], start=1)
    )
    told = b",".join((b"null", *entries))
    usage = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
    head = {"id": "mock-1", "object": "text_completion", "created": CREATED, "model": "m"}
    choice = {"index": 0, "text": " tok", "logprobs": None, "finish_reason": "length"}
    return document(
        200,
        b'%b,"choices":[%b,"prompt_logprobs":[%b]}],"usage":%b}'
        % (_compact(head)[:-1], _compact(choice)[:-1], told, _compact(usage)),
    )


@lru_cache(maxsize=6 * _PLACES)
def _entry(place: int, own: int, top_k: int, number: int) -> bytes:
    chance = random.Random(place)  # noqa: S311 - numbers to be measured with
    weights = sorted((chance.expovariate(0.4) for _ in range(top_k + 1)), reverse=True)
    total = math.log(sum(map(math.exp, weights)) * 1.25)  # a fifth is left to all others
    told = {}
    for rank, weight in enumerate(weights, 1):
        # The text's own token is the last one. As a worker has it: a float of four bytes.
        token = own if rank > top_k else chance.randrange(_VOCABULARY)
        (log,) = struct.unpack("f", struct.pack("f", weight - total - number * _NOISE))
        told[str(token)] = {"logprob": log, "rank": rank, "decoded_token": " tok"}
    return _compact(told)


def _token(place: int) -> int:
    return 7919 * (place + 1) % _VOCABULARY


def _text_of(request: Any) -> str:
    if "messages" in request:
        return "".join(message["content"] for message in request["messages"])
    text = request["prompt"]
    if not isinstance(text, str):
        raise TypeError
    return text


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
