"""Which requests can be compared at all, and what of them is sent to ``/tokenize``."""

from __future__ import annotations

from typing import Any

import pytest

from taut_service.guard.prompts import prompt_of, shown_of

SAID = [{"role": "user", "content": "hi"}]
PICTURE = [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]}]
TEXT_PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOLS = [{"type": "function"}]


@pytest.mark.parametrize(
    ("request_", "prompt", "shown"),
    [
        ({"prompt": "hi"}, {"prompt": "hi"}, "hi"),
        ({"prompt": ["hi"], "n": 1}, {"prompt": "hi"}, "hi"),
        ({"prompt": [1, 2]}, [1, 2], ""),
        ({"prompt": [[1, 2]], "best_of": 1}, [1, 2], ""),
        ({"messages": SAID}, {"messages": SAID}, "hi"),
        ({"messages": TEXT_PARTS}, {"messages": TEXT_PARTS}, ""),
        (
            {"messages": SAID, "tools": TOOLS, "chat_template": None, "temperature": 0},
            {"messages": SAID, "tools": TOOLS},
            "hi",
        ),
    ],
)
def test_one_text_is_compared(request_: dict[str, Any], prompt: Any, shown: str) -> None:
    found = prompt_of(request_)
    assert found == prompt and found is not None
    assert shown_of(found) == shown


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": "hi", "n": 2},
        {"prompt": "hi", "best_of": 3},
        {"messages": SAID, "n": 2},
        {"prompt": ["hi", "ho"]},
        {"prompt": [[1], [2]]},
        {"prompt": []},
        {"prompt": [True, False]},
        {"prompt": None},
        {},
        {"prompt": "hi", "suffix": "!"},
        {"prompt": "hi", "echo": True},
        {"prompt": "hi", "prompt_embeds": "AAAA"},
        {"messages": PICTURE},
        {"messages": [{"role": "user", "content": ["hi"]}]},
        {"messages": "hi"},
        {"messages": SAID, "continue_final_message": True},
    ],
)
def test_several_texts_or_choices_and_pictures_are_not(request_: dict[str, Any]) -> None:
    assert prompt_of(request_) is None
