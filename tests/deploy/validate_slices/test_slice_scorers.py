"""What counts as valid JSON, a valid tool call, a loop, code, a found needle: answers by hand."""

from __future__ import annotations

import json

import pytest

from taut_deploy.validate import CouldNotValidateError
from taut_deploy.validate.bounds import SLICE_NAMES
from taut_deploy.validate.generation import Answer, cut_at_stop
from taut_deploy.validate.slices.haystack import is_found, prompt_with_needle
from taut_deploy.validate.slices.loops import ends_in_loop
from taut_deploy.validate.slices.prompts import read_prompts
from taut_deploy.validate.slices.python_code import completion_parses
from taut_deploy.validate.slices.structured import is_valid_json
from taut_deploy.validate.slices.tool_calls import calls_of, is_valid_call, named

AGE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
GOOD = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"name": "Lena", "age": 34}', True),
        ('\n```json\n{"name": "Lena", "age": 34}\n```\n', True),
        ('Sure: {"name": "Lena", "age": 34}', False),
        ('{"name": "Lena", "age": 34} I hope this helps', False),
        ('{"name": "Lena", "age": "34"}', False),
        ('{"name": "Lena"}', False),
        ('{"name": "Lena", "age": 34, "x": 1}', False),
        ('{"name": "Lena", "age": 34', False),
        ('{"name": "Lena", "age": NaN}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_is_valid_as_a_whole_or_not(text, valid):
    assert is_valid_json(text, AGE) is valid


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (f"<tool_call>\n{GOOD}\n</tool_call>", True),
        (f"Let me look.<tool_call>{GOOD}</tool_call><tool_call>{GOOD}", True),
        (f"[TOOL_CALLS][{GOOD}]", True),
        ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}', True),
        (GOOD, True),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', True),
        ('{"name": "get_time", "arguments": {"city": "Oslo"}}', False),
        ('{"name": "get_weather", "arguments": {"town": "Oslo"}}', False),
        ('{"name": "get_weather"}', False),
        ("<tool_call>{get_weather}</tool_call>", False),
        ("It is sunny.", False),
        ("42", False),
    ],
)
def test_tool_calls_are_read_from_text(text, valid):
    calls = calls_of(Answer(text, 9, "stop"))
    assert is_valid_call(calls, TOOLS) is valid
    if valid:
        assert set(named(calls)) == {"get_weather"}


def test_tool_calls_of_a_server_are_taken_as_parsed():
    answer = Answer("", 9, "stop", (("get_weather", '{"city": "Oslo"}'),))
    assert is_valid_call(calls_of(answer), TOOLS)
    assert not is_valid_call(calls_of(Answer("", 9, "stop", (("get_weather", "{"),))), TOOLS)


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("I am a model. " * 6, True),
        ("First a sentence, then " + "the same " * 12, True),
        ("aAaaaaaaaaaaaaaaaaaaaaaaaaaa", True),
        ("人工智能" * 12, True),
        ("ha ha ha ha", False),
        ("One fish, two fish, red fish, blue fish swim in the sea.", False),
        ("the same the same the same and then an end", False),
        ("", False),
    ],
)
def test_loops_are_seen_at_the_end(text, loop):
    assert ends_in_loop(text) is loop


@pytest.mark.parametrize(
    ("completion", "cut_off", "parses"),
    [
        ("    return a + b\n", False, True),
        ("    return a + b\n\nprint(add(1, 2", False, True),
        ("    return a + b\n    x = (1,", True, True),
        ("    return a + b\n    x = (1,", False, False),
        ("    return a +\n", False, False),
        ("return a + b\n", False, False),
        ("\n\n", False, False),
        ("  retur", True, False),
        ("    return '\0'", False, False),
    ],
)
def test_completions_are_code_or_not(completion, cut_off, parses):
    assert completion_parses("def add(a, b):\n", completion, cut_off=cut_off) is parses


def test_the_needle_stands_at_its_depth():
    ids = prompt_with_needle([1, 2, 3], [90, 91], [80], length=13, depth=0.5)
    assert ids == [1, 2, 3, 1, 2, 90, 91, 3, 1, 2, 3, 1, 80]
    assert prompt_with_needle([1], [90], [80], length=5, depth=0.0) == [90, 1, 1, 1, 80]
    assert prompt_with_needle([1], [90, 91], [80], length=2, depth=1.0) == [90, 91, 80]


@pytest.mark.parametrize(
    ("answer", "found"),
    [(" 63.", True), ('"63"', True), (" 630", False), (" pier 63", False), ("Amber", False)],
)
def test_a_needle_is_found_at_the_start_of_the_answer(answer, found):
    assert is_found(answer, "63") is found


def test_text_is_cut_at_the_first_stop():
    assert cut_at_stop("one\ntwo;three", (";", "\n")) == "one"
    assert cut_at_stop("one", ("\n",)) is None


@pytest.mark.parametrize("name", SLICE_NAMES)
def test_shipped_prompts_are_read_and_their_own_answers_are_good(name):
    prompts = read_prompts(name, None, "--slice")
    assert len({item.id for item in prompts.items}) == len(prompts.items) >= 12
    if name == "code":
        for item in prompts.items:
            assert completion_parses(item.prompt, item.solution, cut_off=False)
    if name == "long_context":
        for item in prompts.items:
            assert item.answer in item.needle


@pytest.mark.parametrize(
    ("name", "rows", "problem"),
    [
        (
            "structured",
            [{"messages": [{}], "schema": {"type": "thing"}}],
            "line 1: .*no JSON schema",
        ),
        ("structured", [{"messages": [{}], "scheme": {}}], "line 1: scheme: unknown key"),
        ("tools", [{"messages": [{}], "tools": [{"name": "f"}]}], "line 1: .*every tool has 'func"),
        ("chat", [{"messages": []}], "line 1: messages"),
        ("chat", [{"messages": [{}]}], "one prompt says nothing"),
        ("languages", [{"language": "de", "text": ""}], "line 1: text"),
        ("code", [], "the file is empty"),
    ],
)
def test_a_wrong_prompt_is_named(tmp_path, name, rows, problem):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(CouldNotValidateError, match=problem) as caught:
        read_prompts(name, file, "--slice")
    assert "\n" not in str(caught.value)
