"""More of the text while a limit is undecided: when it stops, and that stopping errs no more."""

from __future__ import annotations

import numpy as np
import pytest
from validate_setup import job_for, perturb, write_model, write_text

from taut_deploy.validate import CouldNotValidateError, Verdict, run_validation
from taut_deploy.validate.bootstrap import mean_interval, resample_indices
from taut_deploy.validate.paired.spending import boundaries, looks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("looks")
    write_model(path / "baseline")
    perturb(path / "baseline", path / "candidate", lambda _, t: t * 1.05)
    write_text(path / "text.txt", 1600)
    return path


def validate(folder, tmp_path, policy, **changes):
    file = tmp_path / "p.yaml"
    file.write_text("name: p\nrequire: " + policy)
    defaults = {"policy": file, "output": tmp_path / "r", "noise_sequences": 0}
    return run_validation(job_for(folder, **(defaults | changes)))


def test_a_clear_candidate_uses_few_sequences(folder, tmp_path):
    result = validate(folder, tmp_path, "{mean_kl: {max: 50}}", max_sequences=60)
    assert result.verdict is Verdict.PASS
    used = result.report["text"]["sequences"]
    assert result.report["statistics"]["looks"][-1] == used < 60
    assert result.report["text"]["predictions"] == used * 23


def test_an_undecided_one_uses_all_and_says_so(folder, tmp_path):
    first = validate(folder, tmp_path, "{mean_kl: {max: 50}}", sequences=60)
    limit = first.metrics["mean_kl"].estimate
    result = validate(folder, tmp_path, f"{{mean_kl: {{max: {limit:.7f}}}}}", max_sequences=60)
    assert result.report["statistics"]["looks"] == [6, 12, 24, 48, 60]
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.metrics["mean_kl"].estimate == pytest.approx(limit)
    assert result.metrics["mean_kl"].high > first.metrics["mean_kl"].high, "looking costs a little"


def test_one_look_is_what_it_was(folder, tmp_path):
    once = validate(folder, tmp_path, "{mean_kl: {max: 50}}")
    equal = validate(folder, tmp_path, "{mean_kl: {max: 50}}", max_sequences=6)
    assert once.metrics == equal.metrics
    assert once.report["statistics"]["looks"] == [6]


def test_quantiles_wait_until_resamples_reach_so_far(folder, tmp_path):
    result = validate(folder, tmp_path, "{kl_p99: {max: 1000}}", max_sequences=24)
    assert result.verdict is Verdict.PASS
    assert result.report["statistics"]["looks"] == [6, 12, 24]


def test_less_than_the_first_look_is_refused(folder, tmp_path):
    with pytest.raises(CouldNotValidateError, match="--max-sequences: 3 is below 6"):
        job_for(folder, max_sequences=3)


def test_stopping_early_passes_a_candidate_at_its_limit_no_more_often_than_stated():
    generator = np.random.default_rng(17)
    sizes = looks(16, 128)
    levels = boundaries(sizes)
    from scipy import stats

    passed = naive = 0
    runs = 500
    for run in range(runs):
        values = generator.normal(1.0, 1.0, sizes[-1])  # the limit is 1, and so is the truth
        stopped = [False, False]
        for size, z in zip(sizes, levels, strict=True):
            indices = resample_indices(size, 200, run)
            for at, alpha in enumerate((2 * stats.norm.sf(z), 0.05)):
                stopped[at] |= mean_interval(values[:size], indices, alpha).high <= 1.0
        passed, naive = passed + stopped[0], naive + stopped[1]
    assert passed / runs <= 0.05
    assert naive > passed
