"""Random damage to documents: every one is read or refused in one line, never a traceback.

``TAUT_FUZZ_CASES`` is the number of cases of each kind; the seed is fixed.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict

import pytest
from tiny_manifest import tiny_manifest

from taut_deploy.checkpoint import read_manifest
from taut_deploy.errors import TautError
from taut_deploy.models.directory import read_config
from taut_deploy.recipe import parse_recipe
from taut_deploy.serve.settings import load_serve_settings
from taut_deploy.validate.policy import parse_policy

CASES = int(os.environ.get("TAUT_FUZZ_CASES", "1000"))
RECIPE = """name: r
calibration: {source: corpus, sequences: 32, seed: 0}
stages:
  - {method: smooth, alpha: auto}
  - {method: quantize, scheme: W8A8}
ignore: [lm_head]
"""
POLICY = """name: p
require: {perplexity_ratio: {max: 1.03}, top1_agreement: {min: 0.9}}
latency: {itl_p50_ratio_at_most: 1.05, required: true}
"""
SERVE = "model: m\nport: 8000\nworkers: 2\nkernels: off\nvllm_args: [--x]\ngateway: {a: {b: 1}}\n"
MANIFEST = json.dumps(
    asdict(
        tiny_manifest(
            layers=[{"name": "a"}], libraries={"torch": "2"}, files={"config.json": "0" * 64}
        )
    )
)
CONFIG = json.dumps({"model_type": "llama", "hidden_size": 64, "layers": [1, 2.5, None, "x"]})
PIECES = [
    *("[", "]", "{", "}", ":", ",", "- ", "&a ", "*a", "!!int ", "!!float ", "!!binary ", "<<: "),
    *("? ", "| ", "> ", "'", '"', "\\", "\t", "\n", "\x00", "\x1b", "\ud7ff", "é", "\\ud800"),
    *(
        "null",
        "true",
        ".nan",
        ".inf",
        "NaN",
        "-Infinity",
        "1e999",
        "-1",
        "9" * 200,
        "0x" + "f" * 99,
    ),
    *("[" * 200, "{a: " * 200, "2026-99-99", "0o9", "1:99:99", "=", "%YAML 1.1\n", "---\n", "..."),
    *("--trust-remote-code", "../..", "x" * 500),
]


def damaged(text: str, chance: random.Random) -> str:
    """``text`` with one to four pieces put in, taken out, doubled or swapped."""
    for _ in range(chance.randint(1, 4)):
        at, end = sorted(chance.randint(0, len(text)) for _ in range(2))
        end = min(end, at + 40)
        kind = chance.randrange(4)
        piece = (chance.choice(PIECES), "", text[at:end] * 2, text[at:end][::-1])[kind]
        text = text[:at] + piece + text[at if kind == 0 else end :]
    return text


def read_as_manifest(text, folder):
    (folder / "taut.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return read_manifest(folder)


def read_as_config(text, folder):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return read_config(folder)


def read_as_serve(text, folder):
    (folder / "serve.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    return load_serve_settings(folder / "serve.yaml", {})


DOORS = {
    "recipe": (RECIPE, lambda text, folder: parse_recipe(text, "r.yaml")),
    "policy": (POLICY, lambda text, folder: parse_policy(text, "p.yaml")),
    "serve": (SERVE, read_as_serve),
    "manifest": (MANIFEST, read_as_manifest),
    "config": (CONFIG, read_as_config),
}


@pytest.mark.parametrize("door", DOORS)
def test_damaged_documents_are_read_or_refused(door, tmp_path):
    text, read = DOORS[door]
    read(text, tmp_path)
    chance = random.Random(f"taut {door}")
    refused = 0
    for number in range(CASES):
        case = damaged(text, chance)
        try:
            read(case, tmp_path)
        except TautError as error:
            refused += 1
            assert len(str(error)) < 2000, (number, case)
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {case!r}") from error
    assert refused > CASES // 10
