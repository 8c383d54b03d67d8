"""What a request will cost in tokens, guessed before a worker has seen it.

Text counts as one token for ``BYTES_PER_TOKEN`` bytes of UTF-8, token ids count exactly, the
completion counts as what the route's worker will honour. Guesses only: rate limits are settled
with what was used, admission and fairness need proportions. Which bound a worker follows was read
in vLLM 0.32: ``entrypoints/openai/{completion,chat_completion,responses}/protocol.py`` and
``entrypoints/anthropic/serving.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from taut_service.admit.lax import as_int
from taut_service.admit.limits.texts import text_bytes

BYTES_PER_TOKEN: Final = 4
"""English text under the byte-pair vocabularies in use; code and other scripts need more tokens."""
COMPLETIONS_DEFAULT: Final = 16
"""``max_tokens`` of ``/v1/completions`` that is not given (OpenAI API reference; so does vLLM)."""
_BOUNDS: Mapping[str, tuple[str, ...]] = {
    "completions": ("max_tokens",),
    "chat_completions": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}
"""By route, of those that generate: the fields that bound a completion, the strongest first."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "completions": ("n", "best_of"),
    "chat_completions": ("n",),
}


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
    choices, sequences = 1, _sequences(document, route)
    prompt = -(-text_bytes(document) // BYTES_PER_TOKEN)
    limit = sequences * max_model_len
    prompt = 1 if prompt < 1 else prompt if prompt < limit else limit
    fields = _BOUNDS.get(route)
    if fields is None:
        return Estimate(prompt, 0)
    bound = _bound(document, fields)
    if bound is None:
        bound = default_max_tokens
    # A null is another thing than nothing: it asks for all that the context has left.
    if route == "completions" and "max_tokens" not in document:
        bound = COMPLETIONS_DEFAULT
    for name in _CHOICES.get(route, ()):
        choices = max(choices, as_int(document.get(name)) or 0)
    return Estimate(prompt, sequences * choices * min(bound, max_model_len))


def _bound(document: dict[str, Any], fields: tuple[str, ...]) -> int | None:
    """Return how long the completion may become, None if that is not said."""
    for name in fields:
        value = as_int(document.get(name))
        if value is not None and value >= 0:
            return value
    return None


def _sequences(document: dict[str, Any], route: str) -> int:
    """Return how many prompts a request holds; at least one."""
    if route == "completions":
        embeds = document.get("prompt_embeds")
        return _prompts(document.get("prompt")) + _prompts(embeds) or 1
    return (_prompts(document.get("input")) or 1) if route == "embeddings" else 1


def _prompts(value: Any) -> int:
    """Return how many prompts a field holds."""
    if type(value) is list:
        return 1 if not value or type(value[0]) is int else len(value)
    return 0 if value is None else 1
