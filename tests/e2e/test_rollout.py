"""``taut bench rollout`` on real vLLM workers: a model, its W8A8, and a harmed copy of that.

The model is a tiny random one, or, where long tests run, SmolLM2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from serving import Served, run_taut
from tiny_families import write_family
from tiny_models import job_for, w8a8_data, write_calibration_text
from validate_setup import WORDS

from taut_deploy.compress import driver
from taut_deploy.models import ModelRecord

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(1800)]
SHARPER = 3.0
"""Random models hardly prefer a token to another; a harm could not show."""
SECTIONS = {
    "guard": {"max_kl_excess_nats": 0.1, "max_disagreement_excess": 0.2, "max_slowdown": 20},
    "rollout": {
        "min_step_s": 2.0,
        "min_answers": 20,
        "min_tokens": 200,
        "max_first_token_ratio": 20,
        "max_inter_token_ratio": 20,
    },
}


def sharpened(model: Path) -> Path:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= SHARPER
    save_file(tensors, file, metadata={"format": "pt"})
    return model


def write_prompts(file: Path) -> Path:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(len(WORDS), (64, 8), generator=generator).tolist()
    file.write_text("\n".join(" ".join(WORDS[i] for i in row) for row in rows) + "\n")
    return file


def rehearse(model: Path, w8a8: Path, output: Path, steps: list[int], *more: object) -> None:
    """Roll the W8A8 and a harmed copy of it out to clients; fail unless one climbs, one returns."""
    sections = {**SECTIONS, "rollout": {**SECTIONS["rollout"], "steps": steps}}
    (output.parent / "sections.yaml").write_text(yaml.safe_dump(sections))
    done = run_taut(
        *("bench", "rollout", model, w8a8, *more),
        *("--gateway", output.parent / "sections.yaml", "--harm-factor", "2"),
        *("--tokens", "32", "--limit-s", "600", "--output", output),
        *("--", "--enforce-eager", "--max-num-seqs=16"),
        timeout_s=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    require_course(output)


def require_course(output: Path) -> None:
    told = json.loads((output / "report.json").read_text())
    good, bad = told["rollouts"]["candidate"], told["rollouts"]["harmed"]
    assert (good["phase"], good["highest_percent"]) == ("complete", 100)
    assert bad["phase"] == "rolled_back" and bad["course"][-1]["why"].startswith("harm: ")
    assert told["traffic"]["failures"] == {} and told["traffic"]["streams"] > 0
    assert told["traffic"]["answered"]["candidate"] > 0
    verify = [sys.executable, "-m", "taut_service", "verify-audit", output / "rollout/audit.jsonl"]
    checked = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0 and told["audit"]["head"] in checked.stdout, checked.stderr


def test_w8a8_climbs_to_all_traffic_and_a_harmed_one_is_rolled_back(tmp_path: Path):
    model = sharpened(write_family(tmp_path / "model", "llama"))
    data = w8a8_data(write_calibration_text(tmp_path / "text.txt"))
    driver.compress(job_for(model, data, tmp_path / "w8a8"))
    prompts = write_prompts(tmp_path / "prompts.txt")
    rehearse(model, tmp_path / "w8a8", tmp_path / "out", [0, 50, 100], "--prompts", prompts)


@pytest.mark.long  # the tiny model above takes the same way, by weights that mean nothing
def test_smollm2_climbs_and_its_harmed_copy_is_rolled_back(
    served: Served, base_model: ModelRecord, tmp_path: Path
):
    rehearse(Path(base_model.path), served.checkpoint, tmp_path / "out", [0, 100])
