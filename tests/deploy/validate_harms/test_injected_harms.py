"""Harms that a compression or a deployment may do: each is found by its name, and nothing else is.

The models are tiny and random, the servers are ``validate_setup.FakeServer``.
"""

from __future__ import annotations

import shutil

import harms
import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_models import edit_json
from validate_setup import FakeServer, job_for, write_text

from taut_deploy.validate import CouldNotValidateError, Verdict, default_sampling, run_validation
from taut_deploy.validate import serving as serving_part
from taut_deploy.validate.latency.plan import LatencyPlan


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return harms.write_room(tmp_path_factory.mktemp("harms"))


def validate(room, tmp_path, candidate, **changes):
    defaults = {
        "baseline": str(room / "model"),
        "candidate": str(candidate),
        "text": room / "judge.txt",
        "policy": room / "p.yaml",
        "output": tmp_path / "report",
        "sequences": 8,
        "sequence_length": 48,
        "noise_sequences": 0,
        "accept_lower_bound": True,
        "latency": False,
    }
    return run_validation(job_for(room, **(defaults | changes)))


def failed(result) -> set[str]:
    assert result.verdict is not Verdict.INCONCLUSIVE
    return {rule.metric for rule in result.rules if rule.verdict is not Verdict.PASS}


@pytest.mark.parametrize("good", ["w4", "kv"])
def test_a_good_checkpoint_passes(room, tmp_path, good):
    result = validate(room, tmp_path, room / good)
    assert failed(result) == set()
    assert {"group_edge_error", "weight_gain"} <= {rule.metric for rule in result.rules}


def test_one_layers_scale_fails_by_its_weights(room, tmp_path):
    bad = harms.spoiled(room / "w4", tmp_path / "c", harms.scale_of_one_layer)
    result = validate(room, tmp_path, bad)
    assert failed(result) == {"weight_gain"}, "on the text it costs too little to be seen"
    (rule,) = (rule for rule in result.rules if rule.metric == "weight_gain")
    assert "model.layers.0.mlp.down_proj is worst" in rule.reason


def test_swapped_tensors_fail_on_the_text(room, tmp_path):
    bad = harms.spoiled(room / "w4", tmp_path / "c", harms.swapped)
    assert "mean_kl" in failed(validate(room, tmp_path, bad))


def test_a_slip_at_the_edges_of_groups_fails_by_its_weights(room, tmp_path):
    tensors = load_file(room / "model" / "model.safetensors")
    original = tensors["model.layers.0.self_attn.q_proj.weight"]
    good = harms.spoiled(room / "w4", tmp_path / "good", harms.above_zero(original))
    assert failed(validate(room, tmp_path / "sound", good)) == set()
    bad = harms.spoiled(good, tmp_path / "bad", harms.off_by_one(original))
    result = validate(room, tmp_path, bad)
    assert failed(result) == {"group_edge_error"}, "on the text it costs too little to be seen"
    assert "layers.0.self_attn.q_proj" in " ".join(rule.reason for rule in result.rules)


def test_a_slip_to_a_scale_of_the_other_sign_is_seen_on_the_text_as_well(room, tmp_path):
    tensors = load_file(room / "model" / "model.safetensors")
    original = tensors["model.layers.0.self_attn.q_proj.weight"]
    bad = harms.spoiled(room / "w4", tmp_path / "c", harms.off_by_one(original))
    result = validate(room, tmp_path, bad)
    assert failed(result) == {"group_edge_error", "mean_kl"}
    assert "layers.0.self_attn.q_proj" in " ".join(rule.reason for rule in result.rules)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (harms.no_cache_scale, r"missing tensors, the first is model\.layers\.1\..*k_scale"),
        (harms.whole_cache_scale, r"k_scale has 0, and the scale of a KV cache is above zero"),
    ],
)
def test_truncated_scales_of_the_cache_are_refused(room, tmp_path, change, message):
    bad = harms.spoiled(room / "kv", tmp_path / "c", change)
    with pytest.raises(CouldNotValidateError, match=message):
        validate(room, tmp_path, bad)


def test_a_checkpoint_altered_after_it_was_written_is_refused_by_its_manifest(room, tmp_path):
    bad = harms.spoiled(room / "w4", tmp_path / "c", harms.scale_of_one_layer)
    shutil.copy(room / "w4" / "taut.json", bad)
    with pytest.raises(CouldNotValidateError, match=r"safetensors: altered or cut short"):
        validate(room, tmp_path, bad)


def lower_case(path):
    file = path / "tokenizer.json"
    edit_json(file, normalizer={"type": "Lowercase"})


def other_unknown(path):
    edit_json(path / "tokenizer.json", decoder={"type": "Fuse"})


@pytest.mark.parametrize(
    ("change", "what"), [(lower_case, "normalizer"), (other_unknown, "decoder")]
)
def test_a_changed_tokenizer_of_equal_vocabulary_is_refused(room, tmp_path, change, what):
    candidate = shutil.copytree(room / "model", tmp_path / "c")
    change(candidate)
    with pytest.raises(CouldNotValidateError, match=rf"tokenizer differs .*{what} of tokenizer"):
        validate(room, tmp_path, candidate)


def test_a_changed_template_in_files_is_refused(room, tmp_path):
    candidate = shutil.copytree(room / "model", tmp_path / "c")
    (candidate / "chat_template.jinja").write_text("w5 {{ messages[0].content }}")
    with pytest.raises(CouldNotValidateError, match="the chat template is"):
        validate(room, tmp_path, candidate)


@pytest.fixture
def servers(room):
    first, second = FakeServer(room / "model"), FakeServer(room / "model")
    with first.listening() as baseline, second.listening() as candidate:
        yield first, second, {"baseline": baseline, "candidate": candidate}


TEMPLATES = {
    "of chats": (harms.TEMPLATE.replace("'w1'", "'w5'"), "makes of a question other tokens"),
    "of tools": (
        harms.TEMPLATE.replace("t.function.name", "t.name"),
        "makes of a question with a tool other tokens",
    ),
    "none": (None, r"a question other tokens .*\(the candidate refuses it\)"),
}


@pytest.mark.parametrize("case", TEMPLATES)
@pytest.mark.parametrize("baseline_is", ["server", "files"])
def test_a_changed_template_behind_a_url_is_refused(room, servers, tmp_path, case, baseline_is):
    _, served, urls = servers
    served.tokenizer.chat_template, message = TEMPLATES[case]
    baseline = urls["baseline"] if baseline_is == "server" else str(room / "model")
    with pytest.raises(CouldNotValidateError, match=message) as refused:
        validate(room, tmp_path, urls["candidate"], baseline=baseline)
    assert "\n" not in str(refused.value)


def test_tools_are_not_compared_where_the_baseline_takes_none(room, servers, tmp_path):
    plain, served, urls = servers
    without = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    plain.tokenizer.chat_template = without
    tools = "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    served.tokenizer.chat_template = tools + without
    result = validate(room, tmp_path, urls["candidate"], baseline=urls["baseline"])
    assert failed(result) == set()


def test_another_default_temperature_fails_by_what_is_written(room, servers, tmp_path):
    _, served, urls = servers
    served.default_temperature = 0.0
    result = validate(room, tmp_path, **urls)
    assert failed(result) == {"default_sampling"}
    assert "the servers' default temperature or sampling differs" in result.rules[-1].reason


def test_a_temperature_inside_the_served_distribution_fails_on_the_text(room, servers, tmp_path):
    _, served, urls = servers
    head = served.model.lm_head
    head.weight.data /= 0.5  # logits over a temperature of 0.5
    assert "mean_kl" in failed(validate(room, tmp_path, **urls))


def test_equal_servers_rarely_seem_to_sample_otherwise():
    generator = np.random.default_rng(5)
    runs = 4000
    spread = generator.normal(0.0, 1.0, (runs, default_sampling.PROMPTS))
    verdicts = [default_sampling._judged(one).verdict for one in spread]
    # One in a thousand at most: 0.001 and four standard errors.
    assert sum(verdict is Verdict.FAIL for verdict in verdicts) / runs < 0.003
    colder = [default_sampling._judged(one + 1.0).verdict for one in spread[:200]]
    assert set(colder) == {Verdict.FAIL}


def test_another_model_behind_the_url_fails_on_the_text(room, tmp_path):
    other = harms.write_other(tmp_path / "other")
    first, second = FakeServer(room / "model"), FakeServer(other)
    with first.listening() as baseline, second.listening() as candidate:
        result = validate(room, tmp_path, candidate, baseline=baseline)
    assert "mean_kl" in failed(result)


def test_a_worker_that_serves_another_model_than_the_files_fails(room, tmp_path, monkeypatch):
    other = FakeServer(harms.write_other(tmp_path / "other"))

    with other.listening() as url:

        async def ask_another(job, batch, open_files):
            return serving_part._scored(job, batch, url, open_files())

        monkeypatch.setattr(serving_part, "_ask", ask_another)
        monkeypatch.setattr(serving_part, "_NAME", "tiny")
        monkeypatch.setattr(serving_part, "installed_platform", lambda: "cpu")
        result = validate(room, tmp_path, room / "w4", served=True)
    assert failed(result) == {"served_kl"}


def test_a_server_restarted_with_another_model_meanwhile_is_refused(room, servers, tmp_path):
    _, served, urls = servers
    asked = []

    def restart(path, body):
        asked.append(path)
        if len(asked) == 12:
            served.root = "/models/other"
        return body

    served.alter = restart
    with pytest.raises(
        CouldNotValidateError, match=r"root of its model was .* and is '/models/oth"
    ):
        validate(room, tmp_path, **urls)


def test_a_worker_of_half_the_speed_fails_by_its_latency(room, servers, tmp_path):
    first, second, urls = servers
    first.itl_s, second.itl_s = 0.01, 0.02
    (tmp_path / "p.yaml").write_text(
        (room / "p.yaml").read_text() + "latency: {itl_p50_ratio_at_most: 1.4}\n"
    )
    plan = LatencyPlan(requests=80, concurrency=(4,), prompt_tokens=8, output_tokens=4)
    result = validate(
        room, tmp_path, latency=True, latency_plan=plan, policy=tmp_path / "p.yaml", **urls
    )
    assert failed(result) == {"itl_p50_ratio"}


@pytest.mark.parametrize("kind", ["files", "servers"])
def test_a_model_against_itself_passes_for_twenty_seeds(room, servers, tmp_path, kind, monkeypatch):
    _, _, urls = servers
    monkeypatch.setattr(default_sampling, "PROMPTS", 8)
    where = urls if kind == "servers" else {"candidate": str(room / "model")}
    for seed in range(20):
        text = write_text(tmp_path / "text.txt", 120, seed=seed)
        result = validate(
            room, tmp_path, text=text, seed=seed, sequences=4, sequence_length=24, **where
        )
        assert result.verdict is Verdict.PASS, (seed, failed(result))
