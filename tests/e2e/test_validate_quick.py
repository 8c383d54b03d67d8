"""``taut validate --quick`` of SmolLM2 and its W8A8: what it costs, and a task of lm-eval itself.

One run for both: the harness is asked the items of a file that the run also asks by itself.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from client_packages import needs_lm_eval, python_path
from serving import Served

from taut_deploy.models import ModelRecord

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.long,  # on tiny models the other files of validation have each part
    pytest.mark.timeout(1800),
]
DOCS = Path(__file__).parents[2] / "docs"
MINUTES, CORES = 3, 2
"""What a quick validation may take."""
HEADROOM = 3
"""Its work keeps no two cores busy from start to end, and other work may share them."""
ITEMS = [
    ("Water freezes at", [" 0 °C", " 90 °C"]),
    ("The capital of France is", [" Paris", " Oslo", " Rome"]),
    ("Two plus two is", [" four", " nine"]),
    ("The opposite of hot is", [" cold", " table", " warm"]),
    ("Bees make", [" honey", " milk"]),
    ("The sun rises in the", [" east", " kitchen"]),
]
TASK = """
task: asked
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
target_delimiter: ''
doc_to_text: '{{prompt}}'
doc_to_choice: '{{choices}}'
doc_to_target: '{{answer}}'
metric_list: [{metric: acc}]
"""


class Validated(NamedTuple):
    report: Mapping[str, Any]
    cpu_s: float


@pytest.fixture(scope="module")
def validated(
    served: Served,
    base_model: ModelRecord,
    environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Validated:
    folder = tmp_path_factory.mktemp("quick")
    pages = (file.read_text(encoding="utf-8") for file in sorted(DOCS.glob("*.md")))
    (folder / "text.txt").write_text("\n".join(pages), encoding="utf-8")
    items = folder / "items.jsonl"
    rows = ({"prompt": asked, "choices": of, "answer": 0} for asked, of in ITEMS)
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "taut_deploy", "validate", "--quick", "--json"]
    command += ["--baseline", base_model.path, "--candidate", str(served.checkpoint)]
    command += ["--policy", "aggressive-small-model", "--text", str(folder / "text.txt")]
    command += ["--output", str(folder / "report"), "--task", str(items)]
    variables = {**environment, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if not needs_lm_eval.args[0]:
        (folder / "asked.yaml").write_text(TASK.replace("FILE", str(items)))
        command += ["--lm-eval", "asked", "--lm-eval-path", str(folder)]
        variables |= {"PYTHONPATH": python_path("eval"), "HF_HOME": str(folder / "hf")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=1500, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in {0, 1, 2}, done.stderr
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = json.loads((folder / "report" / "report.json").read_text(encoding="utf-8"))
    return Validated(report, cpu_s)


def test_a_quick_validation_takes_less_than_three_minutes_of_two_cores(validated: Validated):
    text = validated.report["text"]
    assert (text["sequences"], text["sequence_length"]) == (16, 256)
    assert 0.9 < validated.report["metrics"]["perplexity_ratio"]["estimate"] < 1.2
    print(f"{validated.cpu_s:.1f} CPU seconds, {validated.report['wall_time_s']:.1f} s")
    assert validated.cpu_s < MINUTES * 60 * CORES / HEADROOM


@needs_lm_eval
def test_the_harness_itself_finds_right_what_is_found_right_here(validated: Validated):
    ours, theirs = (validated.report["tasks"]["tasks"][name] for name in ("items", "asked"))
    assert (ours["kind"], theirs["kind"]) == ("choices", "harness")
    assert theirs["items"] == len(ITEMS)
    assert theirs["counts"] == ours["counts"]
    right = theirs["counts"]["both"] + theirs["counts"]["baseline_only"]
    assert right > len(ITEMS) // 2, "SmolLM2 knows most of it"
    assert theirs["accuracy"]["baseline"]["sum"] == pytest.approx(right / len(ITEMS))
