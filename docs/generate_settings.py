"""Write ``docs/gateway-settings.md``: every key of the gateway's file, from its pydantic models.

``python docs/generate_settings.py`` writes the page, ``--check`` says whether it is current and
exits 1 if not. Types, defaults and bounds come from the models. What a key means is a line of
``docs/gateway-settings.yaml``; a key without a line, and a line without a key, are errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from taut_service.config.settings import Settings

HERE = Path(__file__).parent
PAGE = HERE / "gateway-settings.md"
MEANINGS = HERE / "gateway-settings.yaml"

INTRODUCTION = """# Settings of the gateway

One YAML file, read by `taut-gateway --config FILE`; `--check` reads it and says what is wrong.
Only `models` is required. Unknown and repeated keys are refused. Times are in seconds.
This page is generated: `python docs/generate_settings.py`.
"""

_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "pattern": "matches `{}`",
}


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Follow a reference; what stands beside it, such as a default, wins."""
    reference = schema.get("$ref")
    if reference is None:
        return dict(schema)
    target = root["$defs"][str(reference).rpartition("/")[2]]
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}


def _variants(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what a value may be, null left out."""
    choices = schema.get("anyOf") or [schema]
    found = [_resolved(choice, root) for choice in choices]
    return [choice for choice in found if choice.get("type") != "null"]


def _type(variants: list[dict[str, Any]]) -> str:
    names = []
    for variant in variants:
        if "enum" in variant:
            names.append(", ".join(f"`{value}`" for value in variant["enum"]))
        elif variant.get("type") == "array":
            names.append("list")
        else:
            names.append(str(variant.get("format") or variant.get("type") or "any"))
    return " or ".join(dict.fromkeys(names))


def _bounds(variants: list[dict[str, Any]]) -> str:
    texts = [
        text.format(str(variant[name]).replace("|", "\\|"))
        for variant in variants
        for name, text in _BOUNDS.items()
        if name in variant
    ]
    return ", ".join(dict.fromkeys(texts))


def _default(schema: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    value = schema.get("default")
    if value is None:
        return "none"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _below(variants: list[dict[str, Any]], root: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the suffix and the section below a value, or an empty section."""
    for variant in variants:
        if variant.get("properties"):
            return "", variant
        if variant.get("type") == "array":
            entry = _resolved(variant.get("items", {}), root)
            if entry.get("properties"):
                return "[]", entry
    return "", {}


def rows(schema: Mapping[str, Any], root: Mapping[str, Any], path: str = "") -> Iterator[list[str]]:
    """Yield key, type, default and bounds of every value below a section.

    Args:
        schema: the section's JSON schema.
        root: the whole schema, for references.
        path: the section's own key.
    """
    required = set(schema.get("required", ()))
    for name, value in schema["properties"].items():
        key = f"{path}.{name}" if path else name
        variants = _variants(value, root)
        suffix, section = _below(variants, root)
        if section:
            yield from rows(section, root, key + suffix)
            continue
        here = _resolved(value, root)
        yield [key, _type(variants), _default(here, name in required), _bounds(variants)]


def page() -> str:
    """Return the text of the page.

    Raises:
        ValueError: a key has no meaning, or a meaning no key; names them.
    """
    schema = Settings.model_json_schema()
    found = list(rows(schema, schema))
    meanings = yaml.safe_load(MEANINGS.read_text(encoding="utf-8"))
    keys = {row[0] for row in found}
    if missing := sorted(keys - set(meanings)):
        raise ValueError(f"{MEANINGS.name}: no line for {', '.join(missing)}")
    if extra := sorted(set(meanings) - keys):
        raise ValueError(f"{MEANINGS.name}: no such setting: {', '.join(extra)}")
    return INTRODUCTION + "\n" + "\n".join(_tables(found, meanings)) + "\n"


def _tables(found: list[list[str]], meanings: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a table for each key at the top of the file."""
    heading = ""
    for key, kind, default, bounds in found:
        top = key.split(".")[0].removesuffix("[]")
        if top != heading:
            if heading:
                yield ""
            heading = top
            yield f"## {top}\n"
            yield "| key | type | default | meaning |"
            yield "|---|---|---|---|"
        shown = f"{kind}, {bounds}" if bounds else kind
        yield f"| `{key}` | {shown} | {default} | {meanings[key]} |"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/gateway-settings.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    check = parser.parse_args().check
    try:
        text = page()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{PAGE} is not current: run python docs/generate_settings.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
