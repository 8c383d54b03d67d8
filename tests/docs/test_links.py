"""Relative links of every Markdown file lead to a file, and their anchors to a heading."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\((?!https?:|mailto:)([^()\s]+)\)")


def documents() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def without_code(text: str) -> str:
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1", "", text)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text: str) -> set[str]:
    """Return the anchors of a file's headings, made as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"(?m)^#{1,6} (.+?)\s*$", re.sub(r"(?ms)^ *```.*?^ *```", "", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def broken(path: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(without_code(text)):
        target, _, anchor = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        if not there.exists():
            yield f"{link}: no such file"
        elif ROOT not in there.parents and there != ROOT:
            yield f"{link}: outside of the repository"
        elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    assert list(broken(path, path.read_text(encoding="utf-8"))) == []


def test_a_broken_link_and_a_missing_heading_are_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "imagined.md"
    text = "[a](nowhere.md) [b](results.md#no-such-heading) [c](results.md) `[d](code.md)`"
    assert list(broken(page, text)) == [
        "nowhere.md: no such file",
        "results.md#no-such-heading: no such heading",
    ]


LIMITS = {
    "README.md": 110,
    "kernels/README.md": 250,
    "service/README.md": 250,
    "deploy/README.md": 200,
    "k8s/README.md": 200,
}


@pytest.mark.parametrize(("name", "lines"), LIMITS.items())
def test_a_front_page_stays_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= lines


def test_every_finding_has_question_answer_and_commit_and_is_listed() -> None:
    folder = ROOT / "docs" / "findings"
    listed = (folder / "README.md").read_text(encoding="utf-8")
    pages = [path for path in folder.glob("*.md") if path.name != "README.md"]
    assert len(pages) >= 12
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert f"]({path.name})" in listed, path.name
        assert "**Question.**" in text and "**Answer.**" in text, path.name
        assert "Command" in text, path.name
        assert re.search(r"202\d-\d\d-\d\d", text), path.name
        assert len(text.splitlines()) <= 80, path.name
