"""Whether both models read texts and conversations as the same tokens.

Files show their tokenizer whole. A server shows only what it makes of a text and of a conversation
(``/tokenize``), so both sides are asked for the same probes: every template, of chats and of tools,
is seen in its tokens.
"""

from collections.abc import Sequence
from typing import Any

from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.errors import CouldNotValidateError, NotOfferedError
from taut_deploy.validate.generation import Message
from taut_deploy.validate.server_connection import ServerTokenizer

AnyTokenizer = CheckpointTokenizer | ServerTokenizer

_TEXTS = (
    "  Two  spaces,\ttabs\n\n\nand 1234567 digits; naïve café, I'll they've",
    "def f(x: int) -> str:\n    return f'{x!r}'  # {[()]} == != <= && ||\n",
    "Größe, съёмка, 東京都, 한국어, العربية, हिन्दी, 👩‍🚀 🇫🇷",
)
_ASK: Message = {"role": "user", "content": "What is the weather in Oslo?"}
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"place": "Oslo"}'},
        }
    ],
}
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": '{"celsius": 7}'}
_CONVERSATIONS: tuple[tuple[str, tuple[Message, ...], tuple[Message, ...]], ...] = (
    ("a question", (_ASK,), ()),
    (
        "a conversation with a system message",
        (
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello!"},
            _ASK,
        ),
        (),
    ),
    ("a question with a tool", (_ASK,), (_TOOL,)),
    ("a tool's result", (_ASK, _CALL, _RESULT), (_TOOL,)),
)


def require_same_texts(
    candidate: str, ours: AnyTokenizer, theirs: AnyTokenizer, text: str, baseline: str
) -> None:
    """Refuse tokenizers that read a text otherwise, or put ids together otherwise.

    Args:
        candidate: named in errors.
        ours: the baseline's.
        theirs: the candidate's.
        text: the beginning of the judged text.
        baseline: named in errors.

    Raises:
        CouldNotValidateError: says what differs.
    """
    differs = _first_difference(ours, theirs, text)
    if differs is not None:
        raise CouldNotValidateError(
            f"--candidate {candidate}: its tokenizer differs from that of {baseline} ({differs}); "
            "only models over the same vocabulary, read by the same rules, can be compared"
        )


def _first_difference(ours: AnyTokenizer, theirs: AnyTokenizer, text: str) -> str | None:
    if isinstance(ours, CheckpointTokenizer) and isinstance(theirs, CheckpointTokenizer):
        if ours.vocabulary != theirs.vocabulary:
            return "the vocabulary"
        first, second = ours.rules, theirs.rules
        for name in first.keys() & second.keys():
            if first[name] != second[name]:
                return f"{name} of tokenizer.json"
    for probe in (text, *_TEXTS):
        for special in (False, True):
            ids = ours.encode(probe, special=special)
            if ids != theirs.encode(probe, special=special):
                return f"the tokens of {_shown(probe)}"
    return None


def require_same_conversations(
    candidate: str, ours: AnyTokenizer, theirs: AnyTokenizer, baseline: str
) -> None:
    """Refuse models that render a conversation as other tokens.

    Args:
        candidate: named in errors.
        ours: the baseline's tokenizer.
        theirs: the candidate's.
        baseline: named in errors.

    Raises:
        CouldNotValidateError: says which conversation, and where its tokens part.
    """
    for what, messages, tools in _CONVERSATIONS:
        first, second = (_rendered(one, messages, tools) for one in (ours, theirs))
        if tools and first in (None, _rendered(ours, messages, ())):
            continue  # the baseline's template takes no tools: nobody offers it any
        if first != second:
            raise CouldNotValidateError(
                f"--candidate {candidate}: its chat template makes of {what} other tokens than "
                f"that of {baseline}{_parting(first, second)}: it would answer otherwise whatever "
                "its weights; serve both with one --chat-template"
            )


def _rendered(
    tokenizer: AnyTokenizer, messages: Sequence[Message], tools: Sequence[Message]
) -> list[int] | None:
    """Token ids; None where there is no template, or it takes no such conversation."""
    if isinstance(tokenizer, ServerTokenizer):
        try:
            return tokenizer.conversation(messages, tools)
        except NotOfferedError:
            return None
    try:
        return None if tokenizer.chat_template is None else tokenizer.conversation(messages, tools)
    except CouldNotValidateError:
        return None


def _parting(first: list[int] | None, second: list[int] | None) -> str:
    if first is None or second is None:
        return f" ({'the baseline' if first is None else 'the candidate'} refuses it)"
    alike = next(
        (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )
    return f" from token {alike + 1} on"


def _shown(text: Any) -> str:
    shown = repr(" ".join(str(text).split()))
    return shown if len(shown) <= 40 else f"{shown[:39]}…"
