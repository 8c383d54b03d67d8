"""Plain paragraphs out of a dump of encyclopaedia articles, as MediaWiki exports them.

Layout of a dump: https://www.mediawiki.org/wiki/Help:Export. Markup is taken off by patterns, not
parsed: what is wanted is prose, so that a paragraph with markup left in it may as well be dropped.
"""

import bz2
import html
import io
import re
import xml.etree.ElementTree as ET

_LEAST_CHARACTERS = 1000
"""Of an article: shorter ones are redirects and lists."""
_LEAST_WORDS = 12
"""Of a paragraph: shorter ones are headings and captions."""

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NOT_PROSE = re.compile(
    r"<ref[^<>]*/>|<(ref|gallery|math|timeline|code|pre|source|table|imagemap)\b[^<>]*>.*?</\1>",
    re.DOTALL | re.IGNORECASE,
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
# The innermost of templates and tables, which nest.
_INNERMOST = re.compile(r"\{\{[^{}]*\}\}|\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
_MEDIA = re.compile(
    r"\[\[(?:File|Image|Category|[a-z-]{2,12}):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", re.IGNORECASE
)
_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]")
_OUTWARD = re.compile(r"\[(?:https?|ftp)://\S+\s*([^\[\]]*)\]")
_LEFT_OVER = re.compile(r"\{\{|\}\}|\[\[|\]\]|\|")


def prose_of_dump(compressed: bytes) -> str:
    """The articles of a dump, a paragraph a line and an empty line between articles.

    Args:
        compressed: the dump's XML, packed with bzip2.
    """
    found = []
    # Verified by its hash afterwards, and read from a pinned package.
    for _, element in ET.iterparse(io.BytesIO(bz2.decompress(compressed))):  # noqa: S314
        namespace, closed, name = element.tag.rpartition("}")
        if name == "page":
            inside = namespace + closed
            text = element.findtext(f"{inside}revision/{inside}text") or ""
            paragraphs = paragraphs_of(text)
            if sum(map(len, paragraphs)) >= _LEAST_CHARACTERS:
                found.append("\n".join(paragraphs))
            element.clear()
    return "\n\n".join(found) + "\n"


def paragraphs_of(markup: str) -> list[str]:
    """The sentences of one article's wiki markup, a paragraph each."""
    text = _NOT_PROSE.sub("", _COMMENT.sub("", markup))
    replaced = 1
    while replaced:
        text, replaced = _INNERMOST.subn("", text)
    text = _LINK.sub(r"\1", _MEDIA.sub("", text))
    text = _TAG.sub("", _OUTWARD.sub(r"\1", text))
    text = html.unescape(text).replace("'''", "").replace("''", "").replace("()", "")
    return [
        line for line in (" ".join(raw.split()) for raw in text.splitlines()) if _is_prose(line)
    ]


def _is_prose(line: str) -> bool:
    return (
        len(line.split()) >= _LEAST_WORDS
        and (line[0].isalpha() or line[0] in '"(')
        and line[-1] in '.!?"):'
        and _LEFT_OVER.search(line) is None
    )
