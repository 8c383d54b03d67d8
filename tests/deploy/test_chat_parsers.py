"""Which parser of vLLM's a model's chat template asks for."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from taut_deploy.errors import ModelError
from taut_deploy.worker import chat_parsers
from taut_deploy.worker.chat_parsers import parser_options, reasoning_parser, tool_parser
from taut_service.http.worker_refusals import refusal_of

# The marks are those that each family's own template writes.
LLAMA3 = "{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>' }}{{ tools }}{% endif %}"
HERMES = '{% if tools %}{{ tools | tojson }}<tool_call>\n{"name": …}\n</tool_call>{% endif %}'
THINKING = HERMES + "{{ '<think>\\n\\n</think>\\n\\n' }}"
DIALECTS = [
    ("llama", LLAMA3, "llama3_json"),
    ("qwen2", HERMES, "hermes"),
    ("qwen3", THINKING, "hermes"),
    ("llama", HERMES, "hermes"),  # SmolLM2-1.7B
    (
        "qwen3_moe",
        "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>{% endif %}",
        "qwen3_coder",
    ),
    (
        "mistral",
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]",
        "mistral",
    ),
    ("gpt_oss", "{% if tools %}namespace functions{% endif %}", "openai"),
    ("glm4_moe", "{% if tools %}<tool_call>f\n<arg_key>k</arg_key>{% endif %}", "glm45"),
    ("deepseek_v3", "tools<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json", "deepseek_v3"),
    ("deepseek_v3", "tools<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}", "deepseek_v31"),
    (
        "phi3",
        "{% if 'tools' in message %}<|tool|>{{ message['tools'] }}<|/tool|>",
        "phi4_mini_json",
    ),
    ("kimi_k2", "tools<|tool_calls_section_begin|>", "kimi_k2"),
    # Neither knows of tools: a call would be read that nobody taught.
    ("llama", "{{ '<|im_start|>' + message['role'] }}", None),
    ("gpt_oss", "", None),
    ("qwen2", "<tool_call>", None),
]


@pytest.mark.parametrize(("family", "template", "expected"), DIALECTS)
def test_the_template_decides_who_reads_tool_calls(family, template, expected):
    assert tool_parser(family, template) == expected


@pytest.mark.parametrize(
    ("family", "template", "expected"),
    [
        ("qwen3", THINKING, "qwen3"),
        ("llama", "{{ '<｜Assistant｜><think>\\n' }}", "deepseek_r1"),
        ("qwen2", "<｜Assistant｜>{{ content.split('</think>')[-1] }}", "deepseek_r1"),
        ("gpt_oss", "", "openai_gptoss"),
        ("glm4_moe", "<think><arg_key>", "glm45"),
        ("qwen2", HERMES, None),
        ("llama", LLAMA3, None),
    ],
)
def test_the_template_decides_who_reads_reasoning(family, template, expected):
    assert reasoning_parser(family, template) == expected


def test_every_parser_named_is_one_of_the_installed_vllm():
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed: the parsers' names are not compared with its source")
    for folder, rules in (
        ("tool_parsers", chat_parsers._TOOL_RULES),
        ("reasoning", chat_parsers._REASONING_RULES),
    ):
        source = (Path(spec.origin).parent / folder / "__init__.py").read_text()
        known = set(re.findall(r'^    "([\w-]+)": \(', source, re.MULTILINE))
        assert len(known) > 20
        assert {rule.parser for rule in rules} <= known


def test_gateway_knows_how_the_installed_vllm_says_that_it_has_no_tool_parser():
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed: its words are not compared with its source")
    folder = Path(spec.origin).parent
    files = [
        file for part in ("renderers", "entrypoints") for file in (folder / part).rglob("*.py")
    ]
    source = "\n".join(file.read_text() for file in files)
    # A message in pieces, each a literal; f-strings are filled in.
    said = re.findall(r"create_error_response\(\s*((?:f?[\"'].*[\"']\s*)+)\)", source)
    messages = ["".join(re.findall(r"[\"'](.*)[\"']", text)) for text in said]
    found = [message for message in messages if "--tool-call-parser" in message]
    assert len(found) >= 2
    for message in found:
        refusal = refusal_of("m", json.dumps({"error": {"message": message}}).encode())
        assert refusal is not None, message
        assert "the model 'm' takes no tools" in refusal.message


def model(directory: Path, family: str = "qwen2", **tokenizer: object) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": family}))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def test_the_template_is_found_where_checkpoints_keep_it(tmp_path):
    assert parser_options(model(tmp_path, chat_template=HERMES), ()) == TOOLS
    several = [{"name": "default", "template": ""}, {"name": "tool_use", "template": HERMES}]
    assert parser_options(model(tmp_path, chat_template=several), ()) == TOOLS
    assert parser_options(model(tmp_path), ()) == []
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    assert parser_options(model(tmp_path, "qwen3"), ()) == [*TOOLS, "--reasoning-parser", "qwen3"]


def test_a_template_that_is_given_to_vllm_is_the_one_that_counts(tmp_path):
    given = tmp_path / "mine.jinja"
    given.write_text(HERMES)
    (tmp_path / "m").mkdir()
    model(tmp_path / "m", chat_template="")
    for extra in (
        ("--chat-template", str(given)),
        (f"--chat-template={given}",),
        # vLLM reads both spellings, and takes the last of two.
        ("--chat-template", "other.jinja", "--chat_template", str(given)),
    ):
        assert parser_options(tmp_path / "m", extra) == TOOLS
    given.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"mine\.jinja: no chat template"):
        parser_options(tmp_path / "m", ("--chat-template", str(given)))


@pytest.mark.parametrize(
    "extra",
    [
        ("--tool-call-parser", "pythonic", "--enable-auto-tool-choice"),
        ("--tool_call_parser=pythonic",),
        ("--no-enable-auto-tool-choice",),
    ],
)
def test_what_the_user_says_about_tools_stands(tmp_path, extra):
    assert parser_options(model(tmp_path, chat_template=HERMES), extra) == []


def test_what_the_user_says_about_reasoning_stands(tmp_path):
    directory = model(tmp_path, "qwen3", chat_template=THINKING)
    assert parser_options(directory, ("--reasoning-parser", "deepseek_r1")) == TOOLS
