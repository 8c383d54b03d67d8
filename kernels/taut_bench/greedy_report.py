"""Where greedy answers part: ours from stock's, held against stock's from themselves."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Answers = list[list[int]]
_SURE = 0.05


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sets of answers to the same prompts.

    Attributes:
        first: whose, and how many prompts at a time.
        second: likewise.
        answers: prompts.
        equal: answers without any difference.
        tokens: compared, each answer up to and including its first difference.
    """

    first: str
    second: str
    answers: int
    equal: int
    tokens: int

    @property
    def partings(self) -> int:
        """Answers that part somewhere."""
        return self.answers - self.equal


def compare(first: str, a: Answers, second: str, b: Answers) -> Comparison:
    """Compare two sets of answers.

    Args:
        first: name of ``a``.
        a: token numbers of each answer.
        second: name of ``b``.
        b: likewise, in the same order.
    """
    equal = tokens = 0
    for left, right in zip(a, b, strict=True):
        pairs = enumerate(zip(left, right, strict=True))
        parted = next((index for index, (x, y) in pairs if x != y), None)
        equal += parted is None
        tokens += len(left) if parted is None else parted + 1
    return Comparison(first, second, len(a), equal, tokens)


def chance_of_as_many(ours: Comparison, floor: Comparison) -> float:
    """Return the chance of at least our partings, were tokens to part at the floor's rate.

    Fisher's exact test, one-sided, over tokens that part and tokens that do not.

    Args:
        ours: our kernels against stock.
        floor: stock against itself.
    """
    parted = ours.partings + floor.partings
    whole = ours.tokens + floor.tokens
    ways = math.comb(whole, parted)
    most = min(parted, ours.tokens)
    tail = (
        math.comb(ours.tokens, count) * math.comb(floor.tokens, parted - count)
        for count in range(ours.partings, most + 1)
    )
    return sum(tail) / ways


def verdict(ours: Comparison, floor: Comparison) -> str:
    """Return one line about a mode.

    Args:
        ours: its answers against stock's.
        floor: stock against itself.
    """
    chance = chance_of_as_many(ours, floor)
    inside = "within the A/A noise floor" if chance > _SURE else "NOT within the A/A noise floor"
    return (
        f"{ours.first}: {inside}: {ours.partings} of {ours.answers} answers part in {ours.tokens} "
        f"tokens, stock's own {floor.partings} in {floor.tokens} ({floor.first} : {floor.second}; "
        f"p = {chance:.3f})"
    )


def floors_of(mode: str) -> tuple[str, ...]:
    """Name the floors of a mode of ours: those that exchange no more than it does.

    Args:
        mode: one of :data:`MODES`.
    """
    floors = {
        frozenset(): ("off+products",),
        frozenset({"fused"}): ("off+products", "off+ops"),
        frozenset({"attention"}): ("off+products", "off+triton"),
        frozenset({"fused", "attention"}): ("off+products", "off+triton", "off+others"),
    }
    return floors[frozenset(mode.split("+")[1:])]


def report(
    answers: dict[str, dict[str, Answers]], directory: Path, facts: str, name: str = "greedy"
) -> bool:
    """Compare what the modes answered, write the files, and print them.

    Args:
        answers: by mode and set; ``off`` is stock.
        directory: for the files.
        facts: machine, versions and date.
        name: of the files.

    Returns:
        Whether every mode is within the noise floor and answers the same again, of answers that
        show something.
    """
    stock = answers["off"]
    floors = {"off": compare("off, all", stock["all"], "off, few", stock["few"])}
    for other in (mode for mode in answers if mode.startswith("off+")):
        theirs = answers[other]["all"]
        floors[other] = compare(f"{other}, all", theirs, "off, all", stock["all"])
    pairs, lines, right = [*floors.values()], [facts], True
    for mode, sets in answers.items():
        pairs.append(compare(f"{mode}, all", sets["all"], f"{mode}, again", sets["again"]))
        if not mode.startswith("off"):
            ours = compare(f"{mode}, all", sets["all"], "off, all", stock["all"])
            pairs += [ours, compare(f"{mode}, all", sets["all"], f"{mode}, few", sets["few"])]
            its = [floors[name] for name in ("off", *floors_of(mode)) if name in floors]
            floor = max(its, key=lambda pair: pair.partings / pair.tokens)
            lines.append(verdict(ours, floor))
            right &= chance_of_as_many(ours, floor) > _SURE
            right &= sets["all"] == sets["again"]
    tokens = {token for answer in stock["all"] for token in answer}
    if len(tokens) < len(stock["all"]):
        lines.append(f"shows nothing: stock's answers hold {len(tokens)} different tokens")
        right = False
    _write(pairs, lines, directory, name)
    return right


def _write(pairs: Sequence[Comparison], lines: Sequence[str], directory: Path, name: str) -> None:
    with (directory / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(pairs[0])))
        writer.writeheader()
        writer.writerows(asdict(pair) for pair in pairs)
    table = ["| | and | answers | equal | tokens until they part |", "|---|---|---|---|---|"]
    table += [
        f"| {pair.first} | {pair.second} | {pair.answers} | {pair.equal} | {pair.tokens} |"
        for pair in pairs
    ]
    text = "\n".join([*table, "", *(f"- {line}" for line in lines), ""])
    (directory / f"{name}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
