"""The page of refusals has every code that the gateway's source has, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gateway-refusals.md"
_NAMED = re.compile(r'\bcode="([a-z_]+)"')
_QUEUE = re.compile(r'_overloaded\([^()]*?"([a-z_]+)"')


def test_codes_are_those_of_the_source() -> None:
    files = (ROOT / "service" / "taut_service").rglob("*.py")
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    known = {*_NAMED.findall(source), *_QUEUE.findall(source)}
    assert {"queue_full", "queue_timeout", "tools_not_supported"} <= known
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"(?:\d{3} |, )(?=`)((?:`[a-z_]+`(?:, )?)+)", page)
    told = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    assert known - told == set(), "not in docs/gateway-refusals.md"
    # What is told in a list of settings or fields is no code.
    listed = set(re.findall(r"\d{3} `([a-z_]+)`", page))
    assert listed - known == set(), "not in the source"
