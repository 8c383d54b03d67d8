"""Seeded changes of single values in what users and strangers write: read, or refused in one line.

Recipe, policy and settings of ``taut serve`` as YAML; ``taut.json`` and ``config.json``.
``TAUT_FUZZ_CASES`` (default 300) says how many of each.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_manifest import tiny_manifest
from tiny_models import write_llama

from taut_deploy.checkpoint import MANIFEST, read_manifest, seal
from taut_deploy.diagnose.default_kernels import config_of, suits_decode_attention, suits_fused_ops
from taut_deploy.errors import CheckpointError, ModelError, TautError
from taut_deploy.models.directory import read_shape
from taut_deploy.recipe import load_recipe
from taut_deploy.serve.provenance import provenance_of
from taut_deploy.serve.settings import load_serve_settings
from taut_deploy.validate.policy import load_policy

CASES = int(os.environ.get("TAUT_FUZZ_CASES", "300"))
LONGEST_S = 5.0
LONGEST_LINE = 1000
# Values that code written for one type stumbles over.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**40, 0.5, -0.0, 1e308),
    *(float("inf"), float("nan"), "", " ", "x" * 5000, "--trust-remote-code", "a\nb", "a\x1b[31mb"),
    *("../../x", "/etc/passwd", "%s{0}", "é", "\u202e", "1e5", "null", "0x10"),
    *([], [[]], {}, [None], {"": None}, {"a": {"b": [1]}}, [1, "a"], {"__class__": 1}),
)
TEXTS = (
    *("[", "]", "{", "}", ":", "- ", "\n", "\t", '"', "'", "&a ", "*a", "!!int ", "!!binary "),
    *("<<: ", "? ", "| ", "> ", "%", "@", "`", "#", "---\n", "...\n", "\x00", "\ufeff", "\\ud800"),
    *("9" * 5000, "[" * 5000, "{a: " * 500, "- " * 500, "e999", ".nan", "2026-99-99", "1:1:1"),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((*at, key))
        if isinstance(inner, dict | list):
            found += places(inner, (*at, key))
    return found


def change_values(document: Any, chance: random.Random) -> Any:
    """Change, remove or add one to three values of plain data."""
    changed = json.loads(json.dumps(document))
    for _ in range(chance.randint(1, 3)):
        *way, last = chance.choice(places(changed) or [("new",)])
        owner = changed
        for key in way:
            owner = owner[key]
        match chance.randrange(4):
            case 0 if isinstance(owner, dict):
                owner.pop(last, None)
            case 1 if isinstance(owner, dict):
                owner[str(chance.choice(VALUES))[:100]] = copy.deepcopy(owner.get(last))
            case _:
                owner[last] = copy.deepcopy(chance.choice(VALUES))
    return changed


def change_text(text: str, chance: random.Random) -> bytes:
    """Change one to three places of a text, at times into what is no text."""
    for _ in range(chance.randint(1, 3)):
        at, length = chance.randrange(len(text) + 1), chance.randint(0, 20)
        match chance.randrange(4):
            case 0:
                text = text[:at] + text[at + length :]
            case 1:
                text = text[:at] + text[at : at + length] + text[at:]
            case _:
                text = text[:at] + chance.choice(TEXTS) + text[at:]
    content = text.encode("utf-8", "surrogatepass")
    return content + b"\xff" if chance.random() < 0.03 else content


def mutations(document: Any, dump: Callable[[Any], str], seed: int) -> list[bytes]:
    """``CASES`` mutated documents: two thirds by value, a third by character."""
    found = []
    for case in range(CASES):
        chance = random.Random(seed * 1_000_003 + case)
        if case % 3:
            found.append(dump(change_values(document, chance)).encode("utf-8", "surrogatepass"))
        else:
            found.append(change_text(dump(document), chance))
    return found


def attempt(read: Callable[[], Any], file: Path, expected: type[TautError]) -> str:
    """What came of it: ``read``, or ``refused`` in one line that names the file."""
    started = time.monotonic()
    try:
        read()
        found = "read"
    except expected as error:
        line = str(error)
        assert file.name in line or file.parent.name in line, line
        assert "\n" not in line, line
        assert len(line) < LONGEST_LINE + len(str(file)), line[:200]
        line.encode()
        found = "refused"
    assert time.monotonic() - started < LONGEST_S
    return found


def dump_yaml(document: Any) -> str:
    """As a user would write it, wide characters as they are."""
    return str(yaml.safe_dump(document, allow_unicode=True))


RECIPE = resources.files("taut_deploy") / "recipes" / "w8a8.yaml"
POLICY = {
    "name": "p",
    "description": "d",
    "require": {"perplexity_ratio": {"max": 1.03}, "top1_agreement": {"min": 0.9, "max": 1.0}},
    "latency": {"itl_p50_ratio_at_most": 1.05, "required": False},
}
SERVE = {
    "model": "m",
    "recipe": "w8a8",
    "port": 8000,
    "workers": 2,
    "max_model_len": 64,
    "kernels": "prefer",
    "vllm_args": ["--seed", "1"],
    "gateway": {"admission": {"max_inflight": 3}},
}
DOORS: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    "recipe": (yaml.safe_load(RECIPE.read_text()), lambda file: load_recipe(str(file)).hash),
    "policy": (POLICY, load_policy),
    "serve": (SERVE, lambda file: load_serve_settings(file, {})),
}


@pytest.mark.parametrize("door", DOORS)
def test_mutated_yaml_is_read_or_one_line(door, tmp_path, record_property):
    document, load = DOORS[door]
    file = tmp_path / "document.yaml"
    counts: Counter[str] = Counter()
    for content in mutations(document, dump_yaml, len(door)):
        file.write_bytes(content)
        counts[attempt(lambda: load(file), file, TautError)] += 1
    record_property("outcomes", dict(counts))
    assert counts["refused"] > CASES / 4
    assert counts["read"] > 0


def sealed(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that has been validated."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    measured = {"estimate": 1.01, "low": 1.0, "high": 1.02}
    manifest = tiny_manifest(
        recipe={"name": "r", "stages": []},
        calibration={"hash": "sha256:2", "description": "d", "sequences": 4},
        layers=[{"name": "l", "group_size": 32, "bits": 8, "density": 1.0}],
        libraries={"torch": "2"},
        validation={"verdict": "PASS", "policy": "p", "metrics": {"perplexity_ratio": measured}},
    )
    seal(directory, manifest)
    return dict(json.loads((directory / MANIFEST).read_text()))


def test_mutated_manifests_are_read_or_one_line(tmp_path, record_property):
    directory = tmp_path / "checkpoint"
    document = sealed(directory)
    counts: Counter[str] = Counter()

    def read() -> None:
        manifest = read_manifest(directory)
        # What is read reaches a command line and the gateway's file.
        assert manifest.name.isprintable()
        assert not manifest.name.startswith("-")
        assert manifest.max_model_len < 2**31
        json.dumps(provenance_of(manifest), allow_nan=False)

    for content in mutations(document, json.dumps, 7):
        (directory / MANIFEST).write_bytes(content)
        counts[attempt(read, directory / MANIFEST, CheckpointError)] += 1
    record_property("outcomes", dict(counts))
    assert counts["refused"] > CASES / 4
    assert counts["read"] > 0


def test_mutated_configurations_are_read_or_one_line(tmp_path, record_property):
    model = write_llama(tmp_path / "model", layers=1)
    file = model / "config.json"
    document = json.loads(file.read_text())
    counts: Counter[str] = Counter()

    def read() -> None:
        config = config_of(model)
        suits_fused_ops(config, ())
        suits_decode_attention(config, "auto", ())
        read_shape(model)

    for content in mutations(document, json.dumps, 8):
        file.write_bytes(content)
        counts[attempt(read, file, ModelError)] += 1
    record_property("outcomes", dict(counts))
    shutil.rmtree(model)
    assert counts["refused"] > CASES / 8
    assert counts["read"] > 0
