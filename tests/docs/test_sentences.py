"""Sentences are short enough to be read once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_WORDS = 30
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/findings/*.md"),
        ROOT / "docs" / "examples" / "README.md",
        *(ROOT / room / "README.md" for room in ("kernels", "service", "deploy", "k8s", "docker")),
    )
)
_NO_PROSE = re.compile(r"```.*?```|^---\n.*?^---$|^\s*\|.*?$", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )")
_MARK = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?:;])[*_)]*\s+(?=\W*[A-Z0-9])")


def long_sentences(text: str) -> list[str]:
    """Return sentences of more words than a reader keeps; what stands in backticks is a word.

    A heading ends a sentence, and so do a colon and a semicolon where a capital or a number
    follows. Tables and code do not count.
    """
    text = re.sub(r"^#.*$", "\n\n", _NO_PROSE.sub("\n\n", text), flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "X", text))
    sentences = [
        sentence
        for block in _BLOCK.split(text)
        for sentence in _END.split(" ".join(_MARK.sub("", block).split()))
    ]
    return [each for each in sentences if len(each.split()) > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    found = long_sentences((ROOT / page).read_text(encoding="utf-8"))
    assert found == [], f"{page}: {len(found)} sentences of more than {MOST_WORDS} words"


def test_a_long_sentence_is_found_and_what_is_none_is_not() -> None:
    words = " ".join(["word"] * MOST_WORDS)
    assert long_sentences(f"# Title\n\n{words} one.\nAnother.\n") == [f"{words} one."]
    assert long_sentences(f"- {words}\n- {words}\n") == []
    assert long_sentences(f"{words}. One.") == []
    assert long_sentences(f"`{words}` is code, [{words[:-20]}](x).") == []
    assert long_sentences(f"```\n{words} one\n```\n\n| {words} one |\n") == []
