"""Makes items (:mod:`.items`) of published sets of questions: pure functions of bytes."""

import ast
import gzip
import io
import json
import re
import tokenize
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
_MOST_WRONG = 3
_CHANGED = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "+",
    "//": "*",
    "%": "//",
    "+=": "-=",
    "-=": "+=",
    "and": "or",
    "or": "and",
    "True": "False",
    "False": "True",
    "min": "max",
    "max": "min",
}


def _rows(content: bytes) -> Iterator[Row]:
    for line in content.splitlines():
        if line.strip():
            yield json.loads(line)


def last_number(content: bytes) -> Iterator[Row]:
    """Items of GSM8K: free text whose last number is to be the answer's.

    Source: Cobbe et al., Training verifiers to solve math word problems, 2021, for the set; the
    last number is what evaluations commonly take of an answer without a fixed form.
    """
    for number, row in enumerate(_rows(content)):
        value = row["answer"].rpartition("####")[2].strip().replace(",", "")
        yield {
            "id": str(number),
            "prompt": f"Question: {row['question'].strip()}\nAnswer:",
            "reference": ends_with_number(value),
            "match": "regex",
            "max_tokens": 256,
            "stop": ["\nQuestion:", "\n\n\n"],
        }


def ends_with_number(value: str) -> str:
    """A pattern for texts whose last number is this one, with or without commas and zeros.

    Args:
        value: digits, perhaps with a sign and a point.
    """
    sign = "-" if value.startswith("-") else ""
    whole, _, rest = value.removeprefix("-").partition(".")
    digits = whole[0] + "".join(
        (",?" if (len(whole) - i) % 3 == 0 else "") + digit for i, digit in enumerate(whole) if i
    )
    decimals = rest.rstrip("0")
    tail = rf"\.{decimals}0*" if decimals else r"(?:\.0+)?"
    before = r"(?<![\d.,])" + (r"-\s?\$?\s?" if sign else r"(?<!-)(?<!-\$)")
    return rf"{before}{digits}{tail}(?!\d)(?![.,]\d)\D*\Z"


def endings(content: bytes) -> Iterator[Row]:
    """Items of HellaSwag: which ending is likeliest (Zellers et al., 2019)."""
    for row in _rows(content):
        yield {
            "id": row["id"],
            "subtask": row["activity_label"],
            "prompt": row["ctx"],
            "choices": [f" {ending.strip()}" for ending in row["endings"]],
            "answer": row["expected_index"],
        }


def questions(content: bytes) -> Iterator[Row]:
    """Items of TruthfulQA's single choice (Lin, Hilton and Evans, 2022)."""
    for row in _rows(content):
        yield {
            "id": row["id"],
            "prompt": f"Q: {row['question'].strip()}\nA:",
            "choices": [f" {choice.strip()}" for choice in row["choices"]],
            "answer": row["expected_index"],
        }


def code_pairs(content: bytes) -> Iterator[Row]:
    """Items of HumanEval (Chen et al., 2021): the right body among some with one token changed.

    The set is meant to be run; what a model writes is not run here. Whether a model tells right
    code from almost right code is asked in the manner of minimal pairs. Functions in which no
    token of the list occurs give no item.
    """
    for row in _rows(gzip.decompress(content)):
        right = row["canonical_solution"].rstrip()
        wrong = list(almost_right(row["prompt"], right))[:_MOST_WRONG]
        if wrong:
            yield {
                "id": row["task_id"],
                "prompt": row["prompt"].rstrip(),
                "choices": [f"\n{body}" for body in (right, *wrong)],
                "answer": 0,
            }


def almost_right(prompt: str, body: str) -> Iterator[str]:
    """Yield bodies of a function in which one operator, name or number is another one.

    Args:
        prompt: head of the function.
        body: indented as it stands below.
    """
    before, lines = prompt.count("\n"), body.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(prompt + body).readline):
        line, column = token.start[0] - 1 - before, token.start[1]
        other = _CHANGED.get(token.string)
        if token.type == tokenize.NUMBER and re.fullmatch(r"\d+", token.string):
            other = str(int(token.string) + 1)
        if line < 0 or other is None or token.type in (tokenize.STRING, tokenize.COMMENT):
            continue
        text = lines[line]
        changed = f"{text[:column]}{other}{text[column + len(token.string) :]}"
        found = "\n".join([*lines[:line], changed, *lines[line + 1 :]])
        try:
            ast.parse(prompt + found)
        except SyntaxError:
            continue
        yield found
