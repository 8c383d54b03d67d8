"""The whole validation on tiny random models: verdicts, reports, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_models import edit_json
from validate_setup import (
    VOCABULARY,
    job_for,
    perturb,
    write_model,
    write_text,
    write_tokenizer,
)

from taut_deploy.checkpoint import Golden, Manifest, seal
from taut_deploy.validate import CouldNotValidateError, ValidationJob, Verdict, run_validation


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """``baseline/``, ``candidate/`` (far off), ``twin/`` (equal) and ``text.txt``."""
    path = tmp_path_factory.mktemp("models")
    write_model(path / "baseline", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def noisy(_: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
        return (tensor.float() + 0.5 * noise.nan_to_num()).to(tensor.dtype)

    perturb(path / "baseline", path / "candidate", noisy)
    perturb(path / "baseline", path / "twin", lambda _, tensor: tensor)
    write_text(path / "text.txt", 400)
    return path


def test_equal_checkpoints_differ_by_exactly_nothing(models, tmp_path):
    job = job_for(models, candidate=str(models / "twin"), policy="lossless", output=tmp_path / "r")
    result = run_validation(job)
    assert (result.verdict, result.exit_code) == (Verdict.PASS, 0)
    exact = {"perplexity_ratio": 1.0, "delta_nll": 0.0, "mean_kl": 0.0, "kl_p99": 0.0}
    for name, value in (exact | {"top1_agreement": 1.0, "rms_delta_p": 0.0}).items():
        metric = result.metrics[name]
        assert (metric.low, metric.estimate, metric.high) == (value, value, value)
    assert result.metrics["mean_kl"].noise > 0.0, "bf16 against fp32 is not exactly nothing"


def test_a_damaged_candidate_fails_and_the_report_says_why(models, tmp_path):
    result = run_validation(job_for(models, output=tmp_path / "r"))
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 1)
    report = json.loads(result.report_json.read_text())
    assert report == json.loads(json.dumps(result.report))
    assert (report["schema"], report["schema_version"]) == ("taut-validation-report", 4)
    assert {rule["verdict"] for rule in report["rules"]} == {"FAIL"}
    assert all(rule["margin"] < 0 for rule in report["rules"])
    assert report["text"]["predictions"] == 6 * 23
    assert set(report["models"]["candidate"]["files"]) >= {"model.safetensors", "config.json"}
    assert report["models"]["baseline"]["digest"] != report["models"]["candidate"]["digest"]
    assert report["noise_floor"] == "baseline again in float32, 2 sequences"
    assert report["environment"]["libraries"]["torch"] == torch.__version__
    worst = report["worst_positions"]
    assert len(worst) == 10
    assert [row["kl"] for row in worst] == sorted((row["kl"] for row in worst), reverse=True)
    assert worst[0]["kl"] == report["kl"]["max"]


def test_worst_positions_point_at_the_text(models, tmp_path):
    report = run_validation(job_for(models, output=tmp_path / "r")).report
    words = (models / "text.txt").read_text().split()
    for row in report["worst_positions"]:
        at = row["sequence"] * 24 + row["position"]
        assert row["token"] == words[at]
        assert row["context"].split() == words[row["sequence"] * 24 : at][-24:]


def test_the_markdown_holds_every_metric_and_the_verdict(models, tmp_path):
    result = run_validation(job_for(models, output=tmp_path / "r"))
    text = result.report_markdown.read_text()
    assert text.startswith("# Validation: FAIL\n")
    for label in ("perplexity ratio", "mean KL", "KL p99", "top-1 agreement", "RMS Δp", "ΔNLL"):
        assert label in text
    shard = result.report["models"]["candidate"]["files"]["model.safetensors"]
    assert shard in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {5, 6, 7}, "a bar inside a cell would make another width"


def test_an_undecided_limit_is_inconclusive(models, tmp_path):
    first = run_validation(job_for(models, output=tmp_path / "a"))
    limit = first.metrics["mean_kl"].estimate
    (tmp_path / "p.yaml").write_text(f"name: edge\nrequire: {{mean_kl: {{max: {limit:.6f}}}}}")
    result = run_validation(job_for(models, output=tmp_path / "b", policy=tmp_path / "p.yaml"))
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 2)


def test_a_second_run_gives_the_same_numbers_in_place_of_the_first(models, tmp_path):
    first = run_validation(job_for(models, output=tmp_path / "r"))
    again = run_validation(job_for(models, output=tmp_path / "r"))
    other = run_validation(job_for(models, output=tmp_path / "s", seed=1))
    assert first.metrics == again.metrics
    assert first.metrics["mean_kl"].estimate == other.metrics["mean_kl"].estimate
    # Few sequences: one end may be Student's, which no seed moves.
    assert first.metrics["mean_kl"] != other.metrics["mean_kl"]


def test_a_sequence_start_token_is_counted_in_the_length(tmp_path):
    write_model(tmp_path / "baseline", bos=True)
    write_text(tmp_path / "text.txt", 400)
    result = run_validation(job_for(tmp_path, candidate=str(tmp_path / "baseline")))
    assert result.report["text"]["bos_token_id"] == 0
    assert result.report["text"]["predictions"] == 6 * 23
    assert result.report["noise_floor"] == "baseline again in float64, 2 sequences"


def test_progress_and_a_left_out_noise_run(models, tmp_path):
    calls = []
    job = job_for(
        models,
        output=tmp_path / "r",
        noise_sequences=0,
        progress=lambda *call: calls.append(call),
    )
    result = run_validation(job)
    assert calls == [("compare", done, 6) for done in range(1, 7)]
    assert result.report["noise_floor"] == "not measured"
    assert result.metrics["mean_kl"].noise is None
    assert "None" not in result.report_markdown.read_text()


def break_weights(models, path):
    def broken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * float("nan") if name == "model.norm.weight" else tensor

    return {"candidate": str(perturb(models / "baseline", path / "broken", broken))}


def unknown_rotation(models, path):
    model = shutil.copytree(models / "baseline", path / "turned")
    edit_json(model / "config.json", rope_scaling={"rope_type": "nope", "factor": 2.0})
    return {"baseline": str(model), "candidate": str(model)}


def break_logits(models, path):
    def broken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        # Finite itself; what is multiplied with it is not.
        return tensor * 3e38 if name == "model.norm.weight" else tensor

    return {"candidate": str(perturb(models / "baseline", path / "broken", broken))}


def other_vocabulary_size(models, path):
    write_model(path / "wide", vocab_size=70)
    return {"candidate": str(path / "wide")}


def other_tokenizer(models, path):
    write_model(path / "other")
    turned = {word: len(VOCABULARY) - 1 - i for word, i in VOCABULARY.items()}
    write_tokenizer(path / "other", words=turned)
    return {"candidate": str(path / "other")}


def no_tokenizer(models, path):
    write_model(path / "bare")
    (path / "bare" / "tokenizer.json").unlink()
    return {"candidate": str(path / "bare")}


def empty_text(models, path):
    (path / "empty.txt").write_text("\n")
    return {"text": path / "empty.txt"}


def foreign_output(models, path):
    (path / "mine").mkdir()
    (path / "mine" / "thesis.tex").write_text("x")
    return {"output": path / "mine"}


def look_alike_output(models, path):
    (path / "mine").mkdir()
    (path / "mine" / "report.json").write_text('{"schema": "another"}')
    return {"output": path / "mine"}


def output_is_a_file(models, path):
    (path / "file").write_text("x")
    return {"output": path / "file"}


def manifest_for(directory):
    golden = Golden("a", "b", 1, 1.0)
    return seal(
        directory, Manifest("m", "W8A8", 8, {}, "sha256:recipe", {}, {}, [], golden, 128, {})
    )


def altered_checkpoint(models, path):
    sealed = perturb(models / "baseline", path / "sealed", lambda _, tensor: tensor)
    manifest_for(sealed)
    with (sealed / "model.safetensors").open("r+b") as handle:
        handle.seek(-1, 2)
        handle.write(b"\x01")
    return {"candidate": str(sealed)}


def checkpoint_without_a_shard(models, path):
    sealed = perturb(models / "baseline", path / "sealed", lambda _, tensor: tensor)
    manifest_for(sealed)
    (sealed / "generation_config.json").unlink()
    return {"candidate": str(sealed)}


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda m, p: {"baseline": str(p / "gone")}, "--baseline .*gone: no such directory"),
        (lambda m, p: {"candidate": str(p)}, "--candidate .*: no config.json"),
        (break_weights, "candidate .*broken: model.norm.weight holds NaN or infinity"),
        (unknown_rotation, "turned: cannot be loaded: rope_scaling.rope_type: 'nope'"),
        (break_logits, "candidate .*broken: NaN or infinite logits"),
        (other_vocabulary_size, "the vocabularies differ: 62 in the baseline, 70 in the candidate"),
        (other_tokenizer, "--candidate .*other: its tokenizer differs"),
        (no_tokenizer, "bare: no usable tokenizer"),
        (empty_text, "--text .*: the file is empty"),
        (lambda m, p: {"text": p / "gone.txt"}, "--text .*gone.txt: No such file"),
        (lambda m, p: {"sequences": 100}, "400 tokens, but 100 sequences of 24 need 2400"),
        (lambda m, p: {"sequences": 2, "sequence_length": 129}, "--sequence-length: 129 is more"),
        (lambda m, p: {"policy": "strict"}, "'strict': no such policy"),
        (lambda m, p: {"device": "tpu9"}, "--device tpu9: use cpu, cuda or cuda:N"),
        (lambda m, p: {"device": "meta"}, "--device meta: use cpu, cuda or cuda:N"),
        (foreign_output, "--output .*mine: not empty and holds no earlier"),
        (look_alike_output, "--output .*mine: not empty and holds no earlier"),
        (output_is_a_file, "--output .*file: exists and is not a directory"),
        (altered_checkpoint, "sealed/model.safetensors: altered or cut short"),
        (checkpoint_without_a_shard, "sealed/generation_config.json: missing"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_nothing(models, tmp_path, make, fragment):
    changes = {"output": tmp_path / "report"} | make(models, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CouldNotValidateError, match=fragment) as caught:
        run_validation(job_for(models, **changes))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"sequences": 1}, "--sequences: 1 is below 2"),
        ({"sequence_length": 1}, "--sequence-length: 1 is below 2"),
        ({"bootstrap": 10}, "--bootstrap: 10 is below 200"),
        ({"top_k": 0}, "--top-k: 0 is below 1"),
        ({"noise_sequences": -1}, "--noise-sequences: -1 is below 0"),
        ({"seed": -1}, "--seed: -1 is below 0"),
        ({"timeout_s": 0.0}, "--timeout-s: 0.0 is not a positive"),
        ({"timeout_s": float("nan")}, "--timeout-s: nan is not a positive"),
    ],
)
def test_numbers_out_of_range_are_refused_by_flag(tmp_path, change, flag):
    with pytest.raises(CouldNotValidateError, match=flag):
        job_for(tmp_path, **change)


def test_a_sealed_checkpoint_is_identified_by_its_recipe(models, tmp_path):
    sealed = perturb(models / "baseline", tmp_path / "sealed", lambda _, tensor: tensor)
    manifest = manifest_for(sealed)
    result = run_validation(job_for(models, candidate=str(sealed), output=tmp_path / "r"))
    described = result.report["models"]["candidate"]
    assert (described["recipe_hash"], described["scheme"]) == ("sha256:recipe", "W8A8")
    assert described["digest"] == manifest.digest
    assert "sha256:recipe" in result.report_markdown.read_text()


def test_a_run_that_breaks_off_leaves_no_earlier_verdict(models, tmp_path):
    run_validation(job_for(models, candidate=str(models / "twin"), output=tmp_path / "r"))
    broken = break_logits(models, tmp_path)
    with pytest.raises(CouldNotValidateError):
        run_validation(job_for(models, output=tmp_path / "r", **broken))
    assert list((tmp_path / "r").iterdir()) == []


def test_a_mistyped_flag_leaves_the_earlier_report(models, tmp_path):
    first = run_validation(job_for(models, output=tmp_path / "r"))
    with pytest.raises(CouldNotValidateError):
        run_validation(job_for(models, output=tmp_path / "r", policy="strict"))
    assert first.report_json.exists()


def test_jobs_are_immutable(tmp_path):
    job: ValidationJob = job_for(tmp_path)
    with pytest.raises(AttributeError):
        job.latency = True
    with pytest.raises(AttributeError):
        job.sampling.seed = 2


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("policy.yaml", "name: p\nrequire: {mean_kll: {max: 1}}", "require.mean_kll: unknown key"),
        ("text.txt", "", "the file is empty"),
        ("task.jsonl", "\n", "the file is empty"),
        ("slice.jsonl", "\n", "the file is empty"),
        ("out/notes.txt", "mine", "not empty and holds no earlier validation report"),
        ("c/config.json", "{", "not valid JSON"),
    ],
)
def test_a_bad_file_is_told_of_before_a_tensor_library_is_loaded(tmp_path, file, text, said):
    sound = '{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n'
    (tmp_path / "policy.yaml").write_text("name: p\nrequire: {mean_kl: {max: 1}}")
    (tmp_path / "text.txt").write_text("a b c")
    (tmp_path / "task.jsonl").write_text(sound)
    for side in ("b", "c", "out"):
        (tmp_path / side).mkdir()
    for side in ("b", "c"):
        (tmp_path / side / "config.json").write_text("{}")
    (tmp_path / file).write_text(text)
    command = ["validate", "--baseline", "b", "--candidate", "c", "--output", "out"]
    command += ["--policy", "policy.yaml", "--text", "text.txt", "--task", "task.jsonl"]
    command += ["--slice", "code=slice.jsonl"] if file == "slice.jsonl" else []
    code = (
        "import sys; from taut_deploy.cli import main; status = main(sys.argv[1:]); "
        "print(status, {'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert f"{file.removesuffix('/notes.txt')}: {said}" in run.stderr
    assert run.stdout == "3 set()\n"


def test_importing_the_package_loads_no_tensor_library():
    code = "import sys, taut_deploy.validate; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
