"""Slices inside a whole validation, and that harm of one kind moves its slice."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner
from validate_setup import WORDS, FakeServer, add_noise, job_for, write_model, write_text

from taut_deploy.cli import app
from taut_deploy.validate import CouldNotValidateError, Verdict, run_validation
from taut_deploy.validate.generation import Answer
from taut_deploy.validate.slices import measures
from taut_deploy.validate.slices.measured import likelihood_metrics, ratio, share
from taut_deploy.validate.slices.prompts import read_prompts

LOOSE = "name: loose\nrequire: {perplexity_ratio: {max: 1000}}\n"
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}w1 {% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("slices")
    write_model(path / "baseline")
    config = json.loads((path / "baseline" / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (path / "baseline" / "tokenizer_config.json").write_text(json.dumps(config))
    add_noise(path / "baseline", path / "candidate", 0.1)
    write_text(path / "text.txt", 400)
    texts = [{"language": w, "text": f"{w} w1 w2 {w} w3"} for w in WORDS[:6]]
    (path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return path


def validate(folder, output, policy="", **changes):
    file = output.parent / "p.yaml"
    file.write_text(LOOSE + policy)
    defaults = {"policy": file, "output": output, "noise_sequences": 0, "bootstrap": 200}
    return run_validation(job_for(folder, **(defaults | changes)))


ALL = ("structured", "tools", "long_context=", "code", "languages", "chat")


def test_every_slice_runs_on_directories_and_equal_models_pass(folder, tmp_path):
    policy = """
slices:
  structured: {valid_difference: {min: -0.5}}
  tools: {valid_difference: {min: -0.5}, same_tool: {min: 0.5}}
  long_context: {needle_difference: {min: -0.5}, perplexity_ratio: {max: 1.01}, tokens: 64}
  code: {parses_difference: {min: -0.5}, perplexity_ratio: {max: 1.01}, mean_kl: {max: 0.01}}
  languages: {perplexity_ratio: {max: 1.01}, mean_kl: {max: 0.01}}
  chat: {length_ratio: {min: 0.9, max: 1.1}, loop_difference: {max: 0.5}, same_finish: {min: 0.5}}
"""
    result = validate(folder, tmp_path / "r", policy, candidate=str(folder / "baseline"))
    judged = {(rule.subject, rule.metric): rule.verdict for rule in result.rules if rule.subject}
    assert set(judged.values()) == {Verdict.PASS}
    assert len(judged) == 13
    assert result.report["verdicts"]["slices"] == "PASS"
    sections = result.report["slices"]
    assert [sections[name]["items"] for name in sections] == [20, 16, 12, 16, 16, 20]
    assert sections["languages"]["metrics"]["mean_kl"]["estimate"] == 0.0
    assert sections["chat"]["metrics"]["length_ratio"]["estimate"] == 1.0
    assert set(sections["languages"]["parts"]) >= {"de", "ko", "ar"}
    # The tokenizer of this model parts texts at spaces.
    assert sections["languages"]["not_measured"] == {"texts": "one unknown token: ja, zh"}
    text = result.report_markdown.read_text()
    assert "## Slices" in text
    assert "long_context: needle difference" in text


def test_servers_measure_what_directories_do(folder, tmp_path):
    slices = {"slices": (f"languages={folder / 'words.jsonl'}", "long_context")}
    policy = "slices: {long_context: {tokens: 64}}"
    local = validate(folder, tmp_path / "a", policy, **slices).report["slices"]
    baseline, candidate = FakeServer(folder / "baseline"), FakeServer(folder / "candidate")
    with baseline.listening() as first, candidate.listening() as second:
        urls = {"baseline": first, "candidate": second, "latency": False}
        served = validate(folder, tmp_path / "b", policy, **slices, **urls).report["slices"]
    for name in ("languages", "long_context"):
        ours, theirs = (one[name]["metrics"]["perplexity_ratio"] for one in (local, served))
        assert theirs["estimate"] == pytest.approx(ours["estimate"], rel=1e-4)
        assert ours["estimate"] != 1.0
    assert served["long_context"]["values"]["needles"] == local["long_context"]["values"]["needles"]
    assert served["languages"]["metrics"]["mean_kl"]["is_lower_bound"] is True


def test_what_a_model_does_not_offer_stays_undecided_where_required(folder, tmp_path):
    write_model(tmp_path / "bare")
    policy = (
        "slices: {chat: {same_finish: {min: 0.1}}, tools: {same_tool: {min: 0.1}, required: false}}"
    )
    both = {"baseline": str(tmp_path / "bare"), "candidate": str(tmp_path / "bare")}
    result = validate(folder, tmp_path / "r", policy, **both)
    assert result.verdict is Verdict.INCONCLUSIVE
    (rule,) = [rule for rule in result.rules if rule.subject]
    assert (rule.subject, rule.verdict) == ("chat", Verdict.INCONCLUSIVE)
    assert "no chat template" in rule.reason
    assert result.report["slices"]["tools"]["measured"] is False
    assert "no chat template" in result.report_markdown.read_text()


def test_a_server_without_a_tool_parser_is_not_judged_on_tools(folder, tmp_path):
    server = FakeServer(folder / "baseline")
    server.alter = lambda path, body: 400 if path == "/v1/chat/completions" else body
    with server.listening() as url:
        urls = {"baseline": url, "candidate": url, "latency": False, "slices": ("tools",)}
        report = validate(folder, tmp_path / "r", **urls).report
    assert report["slices"]["tools"]["measured"] is False
    assert (
        "404" in report["slices"]["tools"]["why_not"]
        or "400" in report["slices"]["tools"]["why_not"]
    )


def test_a_short_text_leaves_the_last_quarter_unmeasured(folder, tmp_path):
    policy = "slices: {long_context: {perplexity_ratio: {max: 2}, tokens: 96}}"
    result = validate(folder, tmp_path / "r", policy, sequences=4)
    (rule,) = [rule for rule in result.rules if rule.subject]
    assert rule.verdict is Verdict.INCONCLUSIVE
    assert (
        "two windows of 96"
        in result.report["slices"]["long_context"]["not_measured"]["perplexity_ratio"]
    )


@pytest.mark.parametrize(
    ("slices", "policy", "problem"),
    [
        (("jsn",), "", "--slice jsn: give one of structured, tools"),
        (("chat=",), "", "--slice chat=: give one of"),
        (("chat=gone.jsonl",), "", "--slice gone.jsonl: No such file"),
        ((), "slices: {chat: {file: gone.jsonl}}", "slices.chat.file .*gone.jsonl: No such file"),
        ((), "slices: {chats: {}}", "slices.chats: unknown key.*'chat'"),
        ((), "slices: {chat: {same_finish: {max: 90}}}", "same_finish.max: 90, .* 90 % is 0.9"),
        ((), "slices: {chat: {lenght_ratio: {max: 2}}}", "unknown key.*'length_ratio'"),
    ],
)
def test_wrong_slices_are_said_before_a_model_is_loaded(folder, tmp_path, slices, policy, problem):
    models = {"baseline": str(folder / "text.txt"), "candidate": str(folder / "text.txt")}
    with pytest.raises(CouldNotValidateError, match=problem) as caught:
        validate(folder, tmp_path / "r", policy, slices=slices, **models)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_is_put_twice_is_refused(tmp_path):
    file = tmp_path / "twice.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}) + "\n" * 2)
    with pytest.raises(CouldNotValidateError, match="one prompt says nothing"):
        read_prompts("chat", file, "--slice")
    file.write_text(file.read_text() * 2)
    with pytest.raises(CouldNotValidateError, match=r"--slice .*, line 3: repeats line 1"):
        read_prompts("chat", file, "--slice")


class Scripted:
    """Answers every conversation with the next of its lines."""

    role, max_positions = "scripted", None

    def __init__(self, *answers):
        self._answers = iter(answers)

    def converse(self, messages, tools, generation):
        return next(self._answers)


def setting(baseline, candidate):
    return measures.Setting(
        Scripted(*baseline),
        Scripted(*candidate),
        None,
        None,
        (),
        200,
        0,
        lambda items, ask: [ask(item) for item in items],
    )


@pytest.mark.parametrize(("prompts", "bounded"), [(5, False), (6, True)])
def test_a_few_answers_of_one_length_bound_no_ratio_of_lengths(prompts, bounded):
    answers = [Answer("w1 w2", 160, "length")] * prompts
    items = read_prompts("chat", None, "--slice").items[:prompts]
    found = measures.chat(setting(answers, answers), items, None)
    assert ("length_ratio" in found.metrics) == bounded
    assert ("5 answers of one length" in found.not_measured.get("length_ratio", "")) != bounded


def test_a_model_that_no_longer_stops_moves_the_chat_slice():
    prompts = read_prompts("chat", None, "--slice").items
    good = [Answer(f"answer {i}", 10, "stop") for i, _ in enumerate(prompts)]
    bad = [Answer("so it is. " * 16, 160, "length") if i % 2 else one for i, one in enumerate(good)]
    found = measures.chat(setting(good, bad), prompts, None)
    assert found.metrics["length_ratio"].estimate == pytest.approx((10 * 10 + 10 * 160) / 200)
    assert found.metrics["loop_difference"].estimate == 0.5
    assert found.metrics["loop_difference"].low > 0
    assert found.metrics["same_finish"].estimate == 0.5


def test_a_broken_tool_call_template_moves_the_tool_slice():
    prompts = read_prompts("tools", None, "--slice").items
    calls = [
        {
            "name": item.tools[0]["function"]["name"],
            "arguments": {
                key: {"string": "x", "integer": 1, "number": 1.5, "boolean": True}[kind["type"]]
                for key, kind in item.tools[0]["function"]["parameters"]["properties"].items()
            },
        }
        for item in prompts
    ]
    good = [Answer(f"<tool_call>{json.dumps(call)}</tool_call>", 20, "stop") for call in calls]
    bad = [Answer(f"<tool_cal>{json.dumps(call)}</tool_call>", 20, "stop") for call in calls]
    found = measures.tools(setting(good, bad), prompts, None)
    assert found.values["valid"] == {"baseline": 1.0, "candidate": 0.0}
    assert found.metrics["valid_difference"].high < -0.5
    assert found.metrics["same_tool"].estimate == 0.0
    same = measures.tools(setting(good, good), prompts, None)
    assert same.metrics["same_tool"].estimate == 1.0


def test_ratios_of_nothing_are_left_out():
    assert ratio([1.0, 2.0], [0.0, 0.0], resamples=200, seed=0) is None
    assert share([True, True, False, True]).estimate == 0.75


def test_the_likelihood_of_texts_counts_tokens_not_texts():
    import numpy as np

    from taut_deploy.validate.divergence import Comparison

    def text(tokens, delta, kl):
        zeros = np.zeros(tokens)
        return Comparison(zeros + 1, zeros + 1 + delta, zeros + kl, zeros, zeros, False)

    metrics = likelihood_metrics([text(30, 0.1, 0.2), text(10, 0.5, 0.0)], resamples=200, seed=0)
    assert metrics["perplexity_ratio"].estimate == pytest.approx(np.exp((30 * 0.1 + 10 * 0.5) / 40))
    assert metrics["mean_kl"].estimate == pytest.approx(30 * 0.2 / 40)
    assert metrics["mean_kl"].low >= 0


def test_the_command_takes_slices(folder, tmp_path):
    (tmp_path / "p.yaml").write_text(LOOSE)
    arguments = ["validate", f"--baseline={folder / 'baseline'}", f"--policy={tmp_path / 'p.yaml'}"]
    arguments += [f"--candidate={folder / 'baseline'}", f"--text={folder / 'text.txt'}", "--json"]
    arguments += [f"--output={tmp_path / 'r'}", "--no-served", "--sequences=4"]
    arguments += ["--sequence-length=24", "--noise-sequences=0"]
    arguments += [f"--slice=languages={folder / 'words.jsonl'}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["slices"]["languages"]["items"] == 6
