"""The live guard on checkpoints with a known harm: it is found by its measure, and nothing else is.

The models are tiny and random, and computed in this process; the guard's own code compares what
they say. ``tests/service/guard`` has the same over HTTP, with mock workers.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import harms
import pytest
import torch
from guard_reader import DirectoryReader
from tiny_models import edit_json
from validate_setup import VOCABULARY, WORDS, write_tokenizer

from taut_service.config.settings import GuardSettings
from taut_service.guard.compare import compare
from taut_service.guard.evidence import MUST_HOLD, Evidence, bounds_of

ANSWERS = 40
SETTINGS = GuardSettings(
    kl_clip_nats=0.02, max_kl_excess_nats=0.003, max_disagreement_excess=0.25, alpha=0.05
)
"""Bounds that this model's W8A16 keeps (0.0008 nats) and that a tenth of a block's scale breaks."""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return harms.write_room(tmp_path_factory.mktemp("guarded"))


@pytest.fixture(scope="module")
def baseline(room):
    return DirectoryReader(room / "model")


def questions():
    generator = torch.Generator().manual_seed(3)
    for row in torch.randint(len(WORDS), (ANSWERS, 4), generator=generator).tolist():
        words = " ".join(WORDS[place] for place in row)
        yield {"messages": [{"role": "user", "content": words}], "max_tokens": 12}


async def compared(baseline: DirectoryReader, candidate: DirectoryReader) -> Evidence:
    evidence = Evidence(bounds_of(SETTINGS))
    for question in questions():
        heard = await baseline.heard(question, "base")
        found = await compare(heard, candidate, baseline, SETTINGS, by_candidate=False)
        assert found.result == "compared", found
        evidence.observe(found.kind, found.values, found.tokens)
    return evidence


def is_harm(evidence: Evidence) -> bool:
    return evidence.harm().log_evidence >= math.log(1 / SETTINGS.alpha)


def block_scales(tensors: harms.Tensors) -> None:
    """All scales of one decoder block, a tenth too large."""
    for name in tensors:
        if name.startswith("model.layers.0.") and name.endswith("weight_scale"):
            tensors[name] = tensors[name] * 1.1


def other_template(path: Path) -> None:
    (path / "chat_template.jinja").write_text(harms.TEMPLATE.replace("'w1'", "'w5'"))


def other_tokenizer(path: Path) -> None:
    """Two words have each other's number."""
    template = (path / "chat_template.jinja").read_text()
    write_tokenizer(path, words=VOCABULARY | {"w2": VOCABULARY["w3"], "w3": VOCABULARY["w2"]})
    edit_json(path / "tokenizer_config.json", chat_template=template)


async def test_a_good_checkpoint_is_no_harm_and_keeps_its_bounds(room, baseline):
    evidence = await compared(baseline, DirectoryReader(room / "kv", seed=1))
    assert not is_harm(evidence), evidence.shown(SETTINGS.alpha)
    assert evidence.lacking(SETTINGS.alpha) == [], evidence.shown(SETTINGS.alpha)


@pytest.mark.parametrize("change", [block_scales, harms.swapped])
async def test_changed_weights_are_harm(room, baseline, tmp_path, change):
    bad = harms.spoiled(room / "kv", tmp_path / "c", change)
    evidence = await compared(baseline, DirectoryReader(bad, seed=1))
    assert is_harm(evidence), evidence.shown(SETTINGS.alpha)
    assert evidence.harm().measure in MUST_HOLD


async def test_another_model_is_harm(baseline, tmp_path):
    other = harms.write_other(tmp_path / "other")
    evidence = await compared(baseline, DirectoryReader(other, seed=1))
    assert is_harm(evidence)
    assert evidence.harm().measure in MUST_HOLD


@pytest.mark.parametrize("change", [other_template, other_tokenizer])
async def test_other_tokens_of_the_same_words_are_harm(room, baseline, tmp_path, change):
    candidate = shutil.copytree(room / "model", tmp_path / "c")
    change(candidate)
    evidence = await compared(baseline, DirectoryReader(candidate, seed=1))
    assert is_harm(evidence)
    assert evidence.harm().measure in MUST_HOLD


@pytest.mark.parametrize(("share", "harmful"), [(1.0, False), (0.1, True)])
async def test_cut_scales_of_the_cache_are_harm(room, baseline, share, harmful):
    candidate = DirectoryReader(room / "kv", seed=1)
    candidate.keep_in_fp8(share)
    evidence = await compared(baseline, candidate)
    assert is_harm(evidence) is harmful, evidence.shown(SETTINGS.alpha)


@pytest.mark.parametrize(
    ("ours", "theirs", "measure"), [(1.0, 0.25, "colder"), (0.25, 1.0, "warmer")]
)
async def test_another_temperature_by_default_is_harm(room, ours, theirs, measure):
    baseline = DirectoryReader(room / "model", temperature=ours)
    candidate = DirectoryReader(room / "model", temperature=theirs, seed=1)
    evidence = await compared(baseline, candidate)
    assert (is_harm(evidence), evidence.harm().measure) == (True, measure)


async def test_half_the_speed_is_harm(room, baseline):
    evidence = await compared(baseline, DirectoryReader(room / "model", delay_s=0.2, seed=1))
    assert (is_harm(evidence), evidence.harm().measure) == (True, "slow")
