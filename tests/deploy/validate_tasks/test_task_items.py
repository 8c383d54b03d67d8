"""Task files, choosing by likelihood and matching of answers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from validate_setup import VOCABULARY, FakeServer, write_model

from taut_deploy.validate import CouldNotValidateError
from taut_deploy.validate.checkpoint_source import CheckpointSource
from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.generation import Generation
from taut_deploy.validate.server_connection import ServerConnection
from taut_deploy.validate.server_source import ServerSource
from taut_deploy.validate.tasks.answers import answer_item
from taut_deploy.validate.tasks.items import Item, read_task
from taut_deploy.validate.tasks.likelihood import choice_logprobs, encode_choices
from taut_deploy.validate.tasks.matching import is_right

CHOICE = {"prompt": "w1 w2", "choices": [" w3", " w4 w5"], "answer": 1}


def written(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("items") / "model")


def test_a_file_is_read_with_its_kind_and_hash(tmp_path):
    task = read_task(
        written(tmp_path / "arc.jsonl", CHOICE, "", {**CHOICE, "answer": " w3"}), "--task"
    )
    assert (task.name, task.kind, len(task.items)) == ("arc", "choices", 2)
    assert [item.right_choice for item in task.items] == [1, 0]
    file = written(tmp_path / "g.jsonl", {"prompt": "w1", "reference": ["w2", "w3"]})
    assert read_task(file, "--task").kind == "generated"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object"),
        ({"prompt": "p"}, "line 2: item: give 'choices' with 'answer', or 'reference'"),
        ({**CHOICE, "reference": "x"}, "line 2: item: give 'choices' with 'answer', or"),
        ({**CHOICE, "answer": 2}, "index of a choice, 0 to 1, or its text"),
        ({**CHOICE, "answer": "w9"}, "index of a choice, 0 to 1, or its text"),
        ({**CHOICE, "choices": [" a"]}, "'choices' needs two or more"),
        ({**CHOICE, "choices": [" a", " a"]}, "'choices' has one text twice"),
        ({**CHOICE, "anwser": 1}, "anwser: unknown key"),
        ({**CHOICE, "prompt": ""}, "prompt: "),
        ({"prompt": "p", "reference": "(", "match": "regex"}, "reference '\\('"),
        ({"prompt": "p", "reference": "a", "match": "fuzzy"}, "match: "),
        ({"prompt": "p", "reference": "a"}, "line 2: 'choices' and 'reference' in one file"),
        (CHOICE, "line 2: repeats line 1; give each once"),
        ({**CHOICE, "id": "b", "subtask": "s"}, "line 2: repeats line 1; give each once"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, problem):
    file = written(tmp_path / "t.jsonl", CHOICE, row)
    with pytest.raises(CouldNotValidateError, match=problem) as caught:
        read_task(file, "--task")
    assert str(caught.value).startswith(f"--task {file}")
    assert "\n" not in str(caught.value)


def test_an_empty_or_missing_file_is_named(tmp_path):
    with pytest.raises(CouldNotValidateError, match=r"--task .*empty.jsonl: the file is empty"):
        read_task(written(tmp_path / "empty.jsonl"), "--task")
    with pytest.raises(CouldNotValidateError, match=r"--task .*gone.jsonl: No such file"):
        read_task(tmp_path / "gone.jsonl", "--task")


@pytest.mark.parametrize("prompt", ["w1 w2", "w1 w2 "])
def test_choices_are_scored_by_the_models_own_log_probabilities(model, prompt):
    choices = ["w3" if prompt[-1] == " " else " w3", " w4 w5 w6"]
    tokenizer, source = CheckpointTokenizer(model), CheckpointSource(model, "baseline", "cpu")
    found = choice_logprobs(source, encode_choices(tokenizer, None, prompt, choices))
    reference = AutoModelForCausalLM.from_pretrained(model).double().eval()
    for logprob, words in zip(found, (["w3"], ["w4", "w5", "w6"]), strict=True):
        ids = [VOCABULARY[word] for word in ("w1", "w2", *words)]
        with torch.inference_mode():
            table = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = math.fsum(table[at - 1, ids[at]].item() for at in range(2, len(ids)))
        assert logprob == pytest.approx(expected, rel=1e-4)


def test_all_choices_are_scored_from_one_token_on():
    class Joins:
        """Joins 'ab' to one token, as merges over the end of a prompt do."""

        def encode(self, text, *, special):
            ids, at = [], 0
            while at < len(text):
                step = 2 if text[at : at + 2] == "ab" else 1
                ids.append(hash(text[at : at + step]) % 1000)
                at += step
            return ids

        def decode(self, ids):
            raise AssertionError

    encoded = encode_choices(Joins(), None, "xya", ["b", "c"])
    assert encoded.start == 2, "the prompt's last letter belongs to both choices"
    assert [len(row) for row in encoded.rows] == [3, 4]


def test_an_item_beyond_the_context_is_refused(model):
    item = Item(prompt=" ".join(["w1"] * 200), choices=(" w2", " w3"), answer=0)
    source = CheckpointSource(model, "candidate", "cpu")
    with pytest.raises(CouldNotValidateError, match="candidate: an item of 201 tokens is longer"):
        answer_item(source, CheckpointTokenizer(model), None, item)


@pytest.mark.parametrize(
    ("answer", "references", "match", "right"),
    [
        (" Paris \n", ("Paris",), "exact", True),
        ("Paris is", ("Paris",), "exact", False),
        ("in  New\nYork now", ("New York",), "contains", True),
        ("17", ("16", "17"), "exact", True),
        ("the answer is 42.", (r"\b42\b",), "regex", True),
        ("420", (r"\b42\b",), "regex", False),
    ],
)
def test_answers_are_matched(answer, references, match, right):
    assert is_right(answer, references, match) is right


def test_answers_end_where_the_context_does(model):
    source = CheckpointSource(model, "candidate", "cpu")
    fits = Item(prompt=" ".join(["w1"] * 120), reference="w2", max_tokens=50, stop=())
    assert len(answer_item(source, CheckpointTokenizer(model), None, fits).said.split()) <= 8
    full = Item(prompt=" ".join(["w1"] * 128), reference="w2")
    with pytest.raises(CouldNotValidateError, match="128 tokens leaves no room in its 128 posit"):
        answer_item(source, CheckpointTokenizer(model), None, full)


def test_a_server_is_asked_for_no_more_than_its_context_holds(model):
    server = FakeServer(model)
    with server.listening() as url:
        source = ServerSource(ServerConnection(url, "candidate", {}, 30.0), None, 5)
        source.write([2] * 120, Generation(50))
        assert server.requests[-1][1]["max_tokens"] == 8
        with pytest.raises(CouldNotValidateError, match="a prompt of 128 tokens leaves no room"):
            source.write([2] * 128, Generation(50))
