"""What mkdocs needs beside ``docs/``: the rooms' READMEs, an API reference, and links between them.

A Markdown file outside ``docs/`` becomes a page at its own path, the front page at ``index.md``. A
link to a page of the site is pointed at it; one to another file of the repository becomes its text.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^()\s#]+)(#[^()\s]+)?\)")
_REFERENCE = {
    "kernels": ("Ops", "kernels", lambda text: "import register_op" in text),
    "service": ("Gateway", "service", None),
    "deploy": ("Pipeline", "deploy", None),
}
_MODULES = {
    "service": ("errors.py", "config/settings/"),
    "deploy": ("recipe/", "checkpoint.py", "compress/"),
}


def _tracked(pattern: str) -> list[str]:
    """List the repository's files, as git knows them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def site_path(path: str) -> str:
    """Return where a Markdown file of the repository is on the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/")


def _repository_path(page: str, pages: dict[str, str]) -> str:
    return pages.get(page, f"docs/{page}")


def _reference(room: str) -> str:
    """Return the source of a page of docstrings."""
    title, folder, chooses = _REFERENCE[room]
    lines = [f"# {title}: reference\n"]
    for name in sorted(_tracked(f"{folder}/taut_*/*.py")):
        inside = name.split("/", 2)[2]
        wanted = (
            chooses((ROOT / name).read_text(encoding="utf-8"))
            if chooses
            else inside.startswith(_MODULES[room])
        )
        if wanted and not inside.rpartition("/")[2].startswith("_"):
            module = name.removeprefix(f"{folder}/").removesuffix(".py").replace("/", ".")
            lines.append(f"::: {module}\n")
    return "\n".join(lines)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not below ``docs/``."""
    from mkdocs.structure.files import File

    pages: dict[str, str] = {}
    for name in _tracked("*.md"):
        if not name.startswith("docs/"):
            page = site_path(name)
            pages[page] = name
            content = (ROOT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=content))
    for room in _REFERENCE:
        page = f"reference/{room}.md"
        files.append(File.generated(config, page, content=_reference(room)))
    config.extra["repository_paths"] = pages
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site."""
    here = page.file.src_uri
    source = _repository_path(here, config.extra["repository_paths"])

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        destination = site_path(path)
        if path.endswith(".md") and files.get_file_from_path(destination) is not None:
            link = posixpath.relpath(destination, posixpath.dirname(here) or ".")
            return f"[{text}]({link}{anchor or ''})"
        return text if (ROOT / path).exists() else match.group(0)

    return _LINK.sub(replaced, markdown)
