"""What of a request makes its prompt, in the fields that ``/tokenize`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEMPLATE_FIELDS = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")
_COMPLETION_ONLY_TEXT = ("suffix", "echo", "prompt_embeds")


def prompt_of(request: Mapping[str, Any]) -> dict[str, Any] | list[int] | None:
    """Return the prompt of a completion or a chat.

    Args:
        request: the client's body.

    Returns:
        Fields for ``/tokenize``, or token ids; None for what cannot be compared: several prompts
        or choices, text within text, pictures and sound.
    """
    if request.get("n") not in (None, 1) or request.get("best_of") not in (None, 1):
        return None
    if "messages" in request:
        return _conversation(request)
    if any(request.get(name) for name in _COMPLETION_ONLY_TEXT):
        return None
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    return None


def shown_of(prompt: dict[str, Any] | list[int]) -> str:
    """Return the text that an answer follows: the prompt, or a conversation's last message."""
    if isinstance(prompt, list):
        return ""
    messages = prompt.get("messages")
    text = prompt.get("prompt") if not messages else messages[-1].get("content")
    return text if isinstance(text, str) else ""


def _conversation(request: Mapping[str, Any]) -> dict[str, Any] | None:
    messages = request["messages"]
    if not isinstance(messages, list) or request.get("continue_final_message"):
        return None
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(
            not isinstance(part, dict) or part.get("type") != "text" for part in content
        ):
            return None
    given = {name: request[name] for name in _TEMPLATE_FIELDS if request.get(name) is not None}
    return {"messages": messages, **given}
