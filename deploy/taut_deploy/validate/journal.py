"""Every answer of a validation as it comes, so that one that was cut goes on where it stood.

``answers.jsonl`` lies beside the place of the report while a validation runs: a head with the
digests of all that the answers depend on, then a line for each answer. A line that was cut off is
dropped. Floats are written in full: what is read back is what was measured, bit by bit. A run that
ends takes the file away.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from taut_deploy.files import disk_errors_named
from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.generation import Answer
from taut_deploy.validate.output import JOURNAL_NAME, JOURNAL_SCHEMA, is_journal
from taut_deploy.validate.tasks.answers import ItemScore

_VERSION = 1
_T = TypeVar("_T")
_FLOATS = ("baseline_nll", "candidate_nll", "kl")
_TOKENS = ("baseline_top1", "candidate_top1")


class Journal:
    """Answers by stage and place; each is asked for once, however often a validation is begun.

    Args:
        output: directory of the report.
        inputs: digests by name; of an earlier run with others nothing is taken.
        resume: True refuses where there is nothing to go on with, False begins anew, None goes on
            where the inputs are the same and begins anew otherwise.

    Raises:
        CouldNotValidateError: ``resume`` is True, and no earlier answers are of these inputs.
    """

    def __init__(self, output: Path, inputs: Mapping[str, str], resume: bool | None) -> None:
        self._file, self._inputs = output / JOURNAL_NAME, dict(inputs)
        self._known: dict[tuple[str, int], Any] = {}
        differs = self._read() if resume is not False else "--no-resume was given"
        if differs is not None and resume:
            raise CouldNotValidateError(f"--resume: {differs}; leave it out to begin anew")
        self._begun = differs is None
        if differs is not None:
            self._known.clear()

    @property
    def continues(self) -> bool:
        """Whether there are answers of an earlier run."""
        return bool(self._known)

    def known(self, stage: str, at: int) -> Any:
        """An answer of an earlier run; None where there is none."""
        return self._known.get((stage, at))

    def once(self, stage: str, at: int, ask: Callable[[], _T]) -> _T:
        """The answer that is known, or that ``ask`` gives now.

        Args:
            stage: what is being done.
            at: place of the answer in it.
            ask: gives it; a comparison, an answer, a score, or tuples of those and plain values.
        """
        known: _T | None = self._known.get((stage, at))
        if known is not None:
            return known
        found = ask()
        self._append({"stage": stage, "at": at, "value": _plain(found)})
        return found

    def remove(self) -> None:
        """Take the file away: the report has what it led to."""
        with disk_errors_named(self._file):
            self._file.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        with disk_errors_named(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if not self._begun:
                head = {
                    "schema": JOURNAL_SCHEMA,
                    "schema_version": _VERSION,
                    "inputs": self._inputs,
                }
                self._file.write_text(json.dumps(head, allow_nan=False) + "\n", encoding="utf-8")
                self._begun = True
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line, allow_nan=False) + "\n")

    def _read(self) -> str | None:
        """Take what is there; says in words why nothing is taken."""
        if not is_journal(self._file):
            return f"{self._file}: no answers of an earlier run are there"
        text = self._file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        head, *lines = whole.decode("utf-8").splitlines()
        described = json.loads(head)
        if described.get("schema_version") != _VERSION:
            return f"{self._file}: of another version of taut"
        before = described.get("inputs", {})
        other = [name for name, value in self._inputs.items() if before.get(name) != value]
        if other:
            return f"{self._file}: of another validation ({', '.join(other)} differ)"
        try:
            for line in lines:
                entry = json.loads(line)
                self._known[entry["stage"], entry["at"]] = _restored(entry["value"])
        except (ValueError, LookupError, TypeError) as error:
            raise CouldNotValidateError(
                f"{self._file}: line {len(self._known) + 2} is damaged; remove the file"
            ) from error
        if len(whole) < len(text):
            self._file.write_bytes(whole)
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, Comparison):
        arrays = {name: getattr(value, name).tolist() for name in (*_FLOATS, *_TOKENS)}
        return {"is": "comparison", **arrays, "kl_is_lower_bound": value.kl_is_lower_bound}
    if isinstance(value, Answer):
        return {"is": "answer", **asdict(value)}
    if isinstance(value, ItemScore):
        return {"is": "score", **asdict(value)}
    if isinstance(value, tuple):
        return {"is": "tuple", "of": [_plain(one) for one in value]}
    return value


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.pop("is")
    if kind == "tuple":
        return tuple(_restored(one) for one in value["of"])
    if kind == "score":
        return ItemScore(**value)
    if kind == "answer":
        calls = value.pop("tool_calls")
        made = None if calls is None else tuple((name, arguments) for name, arguments in calls)
        return Answer(**value, tool_calls=made)
    arrays: dict[str, Any] = {name: np.array(value[name], dtype=np.float64) for name in _FLOATS}
    arrays |= {name: np.array(value[name], dtype=np.int64) for name in _TOKENS}
    return Comparison(**arrays, kl_is_lower_bound=value["kl_is_lower_bound"])
