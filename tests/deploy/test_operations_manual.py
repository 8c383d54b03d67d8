"""docs/operations.md says nothing that the code does not: commands, flags, alerts, names, links."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from taut_deploy import cli

ROOT = Path(__file__).parents[2]
MANUAL = ROOT / "docs" / "operations.md"
NO_COMMANDS = re.compile(r"^ *```(mermaid|yaml)\n.*?^ *```$", re.MULTILINE | re.DOTALL)
TEXT = NO_COMMANDS.sub("", MANUAL.read_text(encoding="utf-8"))
PROGRAMS = ("taut", "taut-gateway", "taut-healthcheck")
FENCED = re.compile(r"^ *```\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
RULES = sorted((ROOT / "docker/observability/prometheus/rules").glob("*.rules.yml"))
SOURCES = ("deploy", "docker", "k8s", "kernels", "service", "requirements")


def command_lines() -> list[str]:
    """Every line of a code block, and every inline span that begins with a program of ours."""
    blocks = [line.strip() for block in FENCED.findall(TEXT) for line in block.splitlines()]
    rest = FENCED.sub("", TEXT)
    spans = [span for span in INLINE.findall(rest) if span.split(" ")[0] in PROGRAMS]
    return [line for line in [*blocks, *spans] if line]


def invocations(line: str) -> Iterator[tuple[str, list[str]]]:
    """Programs of ours in a line, each with its own words, pipes and redirections apart."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "|"]:
        if set(word) <= set("|&;<>"):
            if words and words[0] in PROGRAMS:
                yield words[0], words[1:]
            words = []
        else:
            words.append(word)


INVOCATIONS = [(line, *found) for line in command_lines() for found in invocations(line)]


def options_of_taut(words: list[str]) -> tuple[set[str], list[str]]:
    """Options of the subcommand that words name, and the words behind it.

    Raises:
        AssertionError: there is no such command.
    """
    command: Any = typer.main.get_command(cli.app)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, f"taut has no command {name}"
        command = command.commands[name]
    known = {"--help"}
    for parameter in command.params:
        known |= {*parameter.opts, *parameter.secondary_opts}
    return known, rest


def options_of(program: str) -> set[str]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(re.findall(r"--[a-z][a-z-]*", done.stdout))


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    return {program: options_of(program) for program in PROGRAMS[1:]}


def test_there_are_commands_to_check() -> None:
    assert len(INVOCATIONS) > 25
    assert {program for _, program, _ in INVOCATIONS} == set(PROGRAMS)


@pytest.mark.parametrize(("line", "program", "words"), INVOCATIONS)
def test_command_and_its_flags_exist(
    line: str, program: str, words: list[str], known: dict[str, set[str]]
) -> None:
    if program == "taut":
        options, rest = options_of_taut(words)
    else:
        options, rest = known[program], words
    mine = rest[: rest.index("--")] if "--" in rest else rest
    used = {word.partition("=")[0] for word in mine if word.startswith("--")}
    assert used - options == set(), line


def test_the_check_would_notice_a_flag_that_is_gone() -> None:
    options, rest = options_of_taut(["cache", "warm", "x", "--gone"])
    assert set(rest) - options == {"x", "--gone"}
    with pytest.raises(AssertionError, match="no command guess"):
        options_of_taut(["guess"])


def anchors() -> list[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", TEXT), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def alerts() -> dict[str, dict[str, Any]]:
    documents = [yaml.safe_load(path.read_text()) for path in RULES]
    rules = [
        rule for document in documents for group in document["groups"] for rule in group["rules"]
    ]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def test_every_alert_has_a_section_and_points_at_it() -> None:
    found = alerts()
    assert len(found) > 20
    for name, rule in found.items():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert name.lower() in anchors(), f"{name} has no section in {MANUAL}"


def test_no_section_is_about_an_alert_that_is_gone() -> None:
    sections = set(re.findall(r"^### (Taut\w+)$", TEXT, re.MULTILINE))
    assert sections == set(alerts())


def test_every_section_says_something() -> None:
    for name in alerts():
        _, _, after = TEXT.partition(f"\n### {name}\n")
        section = re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]
        assert len(section.split()) > 15, name


def test_the_arithmetic_of_the_kv_cache_is_right() -> None:
    rows = re.findall(r"^\|[^|]+\| (2 × [\d ×]+) \| ([\d,]+) B \| ([\d,]+)", TEXT, re.MULTILINE)
    assert len(rows) == 4
    for product, per_token, in_a_gib in rows:
        expected = math.prod(int(factor) for factor in product.split("×"))
        assert int(per_token.replace(",", "")) == expected
        assert int(in_a_gib.replace(",", "")) == 2**30 // expected


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) > 20
    known_anchors = anchors()
    assert len(known_anchors) == len(set(known_anchors))
    for link in links:
        path, _, anchor = link.partition("#")
        if path:
            assert (MANUAL.parent / path).exists(), link
        else:
            assert anchor in known_anchors, link


def all_tests() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    return {name for text in texts for name in re.findall(r"def (test_\w+)", text)}


def test_tests_that_are_named_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 30
    assert named - all_tests() == set()


def test_metrics_that_are_named_exist() -> None:
    documented = (ROOT / "docs" / "gateway-metrics.md").read_text()
    listed = (ROOT / "docker" / "observability" / "vllm-metrics.txt").read_text()
    named = set(re.findall(r"`((?:taut_(?!deploy|kernels\b|service)|vllm:)[a-z_:]+)`", TEXT))
    assert len(named) > 8
    assert {name for name in named if f"`{name}`" not in documented and name not in listed} == set()


def sources() -> str:
    suffixes = {".py", ".yaml", ".yml", ".sh", ".tpl", ".Dockerfile", ".md"}
    return "\n".join(
        path.read_text(encoding="utf-8")
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix in suffixes
    )


def test_variables_that_are_named_are_read_somewhere() -> None:
    text = sources()
    named = set(re.findall(r"\b(?:TAUT|VLLM)_[A-Z_]+\b", TEXT))
    assert len(named) > 5
    assert {name for name in named if name not in text} == set()


def of_schema(schema: dict[str, Any], path: list[str], root: dict[str, Any]) -> bool:
    """Whether a chart's schema describes a value."""
    for key in path:
        name = key.removesuffix("[]")
        reference = str(schema.get("$ref", "")).rpartition("/")[2]
        schema = root["definitions"].get(reference, schema)
        if name not in schema.get("properties", {}):
            return False
        schema = schema["properties"][name]
        if key.endswith("[]"):
            schema = schema["items"]
    return True


def test_chart_values_that_are_named_exist() -> None:
    root = yaml.safe_load((ROOT / "k8s" / "values.schema.yaml").read_text())
    tops = "|".join(name for name in root["properties"])
    spans = re.findall(rf"(?:`|--set )((?:{tops})(?:\[\])?\.[\w.\[\]]+)", TEXT)
    named = {span.rstrip(".") for span in spans}
    assert len(named) > 15
    settings = (ROOT / "docs" / "gateway-settings.md").read_text()
    missing = {
        name
        for name in named
        if not of_schema(root, name.split("."), root) and f"`{name}`" not in settings
    }
    assert missing == set()


def test_gateway_settings_that_are_named_exist() -> None:
    documented = (ROOT / "docs" / "gateway-settings.md").read_text()
    sections = "admission|timeouts|routing|limits|rate_limits|listen|models\\[\\]"
    named = set(re.findall(rf"`((?:{sections})\.[\w.\[\]]+)`", TEXT))
    assert len(named) > 6
    for name in named:
        last = name.rpartition(".")[2]
        assert name in documented or f".{last}`" in documented, name


def test_files_and_compose_services_that_are_named_exist() -> None:
    for name in set(re.findall(r"`((?:docker|k8s|docs|requirements)/[\w./-]*)`", TEXT)):
        assert (ROOT / name).exists(), name
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    profiles = {p for service in compose["services"].values() for p in service.get("profiles", ())}
    assert set(re.findall(r"--profile (\w+)", TEXT)) <= profiles
    for name in re.findall(r"docker compose run --rm (\S+)", TEXT):
        assert name in compose["services"]


def test_helm_commands_name_files_that_exist() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values")
    for line in command_lines():
        if line.startswith("helm install"):
            given, rest = parser.parse_known_args(shlex.split(line))
            assert (ROOT / rest[3]).is_dir(), line
            assert (ROOT / given.values).is_file(), line
