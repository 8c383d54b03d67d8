"""What a request will cost in tokens, guessed before a worker has seen it.

Text counts as one token for ``BYTES_PER_TOKEN`` bytes of UTF-8, token ids count exactly, the
completion counts as what the request allows. Guesses only: rate limits are settled with what was
used, admission and fairness need proportions. The cost is that of a walk over messages and parts,
never over characters of ASCII text.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

BYTES_PER_TOKEN = 4
"""English text under the byte-pair vocabularies in use; code and other scripts need more tokens."""
COMPLETIONS_DEFAULT = 16
"""``max_tokens`` of ``/v1/completions`` that is not given (OpenAI API reference; so does vLLM)."""
MAX_CHOICES = 128
"""What ``n`` counts at most; OpenAI's own bound."""
_GENERATES_NOTHING = frozenset({"embeddings", "tokenize", "detokenize", "count_tokens"})
_BOUNDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Estimate(NamedTuple):
    """Tokens in and out."""

    prompt: int
    completion: int


def estimate(
    document: dict[str, Any], route: str, max_model_len: int, default_max_tokens: int
) -> Estimate:
    """Guess the tokens of a request.

    Args:
        document: the parsed body, its fields checked.
        route: metric name of the route.
        max_model_len: the model's context; no sequence is longer.
        default_max_tokens: for a request that names no bound.

    Returns:
        At least one token in; none out on a route that generates nothing.
    """
    messages = document.get("messages")
    if messages:
        sequences, prompt = 1, _of_messages(messages) + _of_content(document.get("system"))
    else:
        sequences, prompt = _of_other_prompts(document, max_model_len)
    prompt = max(1, min(prompt, sequences * max_model_len))
    if route in _GENERATES_NOTHING:
        return Estimate(prompt, 0)
    bound = _bound(document) or (
        COMPLETIONS_DEFAULT if route == "completions" else default_max_tokens
    )
    choices = document.get("n")
    if _is_count(choices):
        sequences *= min(choices, MAX_CHOICES)
    return Estimate(prompt, sequences * min(bound, max_model_len))


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _bound(document: dict[str, Any]) -> int:
    """Return how long the completion may become, 0 if that is not said."""
    for name in _BOUNDS:
        value = document.get(name)
        if _is_count(value):
            return value
    return 0


def _of_other_prompts(document: dict[str, Any], max_model_len: int) -> tuple[int, int]:
    """Return the number of sequences and the tokens of all of them."""
    for name in ("prompt", "input", "tokens"):
        value = document.get(name)
        if isinstance(value, str):
            return 1, _of_text(value) + _of_content(document.get("instructions"))
        if isinstance(value, list) and value:
            return _of_list(value, max_model_len)
    return 1, 0


def _of_list(value: list[Any], max_model_len: int) -> tuple[int, int]:
    """Return sequences and tokens of token ids, messages, texts or lists of token ids.

    Some routes leave these fields to the worker: anything that JSON can hold may be here.
    """
    first = value[0]
    if isinstance(first, dict):
        return 1, _of_messages(value)
    if not isinstance(first, (str, list)):
        return 1, len(value)
    tokens = 0
    for item in value:
        size = len(item) if isinstance(item, list) else _of_content(item)
        tokens += min(size, max_model_len)
    return len(value), tokens


def _of_text(text: str) -> int:
    size = len(text) if text.isascii() else len(text.encode(errors="replace"))
    return -(-size // BYTES_PER_TOKEN)


def _of_messages(messages: Any) -> int:
    if not isinstance(messages, list):
        return 0
    tokens = 0
    for item in messages:
        if isinstance(item, dict):
            tokens += _of_content(item.get("content"))
    return tokens


def _of_content(content: Any) -> int:
    if isinstance(content, str):
        return _of_text(content)
    tokens = 0
    if isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                tokens += _of_text(text)
    return tokens
