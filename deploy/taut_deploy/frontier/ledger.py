"""What was tried: one line of JSON for each try, only ever appended to.

A line that a killed run left half-written is dropped; every other line has to be read, or the
search would repeat what it paid for.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from taut_deploy.documents import parse_json
from taut_deploy.errors import OutputError
from taut_deploy.files import disk_errors_named, fsync_path, place_not_finite
from taut_deploy.models.store import ModelRecord
from taut_deploy.strict_yaml import validate_mapping

LEDGER = "ledger.jsonl"
Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "REFUSED"]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Key(_Line):
    """What a verdict depends on, each as a digest.

    Attributes:
        model: of the base model's files.
        recipe: of recipe, texts, device and versions: what determines the checkpoint.
        data: of the judged text and how much of it is compared how.
        versions: of what computes and serves the comparison.
        policy: of the limits.
    """

    model: str
    recipe: str
    data: str
    versions: str
    policy: str

    @property
    def measured(self) -> tuple[str, str, str, str]:
        """All but the policy: what the measured figures depend on."""
        return (self.model, self.recipe, self.data, self.versions)


class Try(_Line):
    """One candidate, compressed and judged.

    Attributes:
        key: what its verdict depends on.
        name: of the candidate.
        recipe: as plain data.
        outcome: the verdict, or ``REFUSED`` where it could not be made or judged.
        reason: why it was refused, empty otherwise.
        predicted_bytes: size of its weights before it was made.
        bytes: size of its weight files.
        checkpoint_digest: of its files.
        metrics: measured, each with its interval, by name.
        rules: the policy's limits, judged.
        beyond: what the policy asked beyond the metrics of the text: its tasks and slices.
        sequences: that were compared.
        policy: the policy as plain data.
        versions: of what computed.
        compress_seconds: that making it took.
        validate_seconds: that comparing it took.
        rejudged: whether an earlier try's figures were judged by another policy.
        recorded: the verdict as the checkpoint's manifest has it.
        finished_at: UTC.
    """

    key: Key
    name: str
    recipe: dict[str, Any]
    outcome: Outcome
    reason: str = ""
    predicted_bytes: int
    bytes: int | None = None
    checkpoint_digest: str | None = None
    metrics: dict[str, dict[str, Any]] = {}
    rules: list[dict[str, Any]] = []
    beyond: dict[str, Any] = {}
    sequences: int
    policy: dict[str, Any]
    versions: dict[str, str]
    compress_seconds: float
    validate_seconds: float
    rejudged: bool = False
    recorded: dict[str, Any] = {}
    finished_at: str


class Ledger:
    """The tries of one model.

    Args:
        file: the ledger; need not exist.
        model: whose tries it holds.

    Raises:
        OutputError: a line is none of a ledger's, or of another model.
    """

    def __init__(self, file: Path, model: ModelRecord) -> None:
        self._file = file
        self._tries: list[Try] = []
        content = file.read_bytes() if file.is_file() else b""
        # Up to the last line end: what follows is what a killed run was writing.
        self._size = content.rfind(b"\n") + 1
        for number, line in enumerate(content[: self._size].splitlines(), 1):
            origin = f"{file}:{number}"
            data = parse_json(line, origin, OutputError)
            if not isinstance(data, dict):
                raise OutputError(f"{origin}: no line of 'taut shrink'; move the file away")
            found = validate_mapping(Try, data, origin, OutputError)
            if found.key.model != model.digest:
                raise OutputError(
                    f"{origin}: is of another model ({found.key.model[:19]}) than {model.name} "
                    f"({model.digest[:19]}); choose another --output"
                )
            self._tries.append(found)

    def judged(self, key: Key) -> Try | None:
        """The last try with this very key."""
        return next((one for one in reversed(self._tries) if one.key == key), None)

    def measured(self, key: Key) -> Try | None:
        """The last try whose figures are those that a try with this key would measure."""
        return next(
            (
                one
                for one in reversed(self._tries)
                if one.key.measured == key.measured and one.metrics
            ),
            None,
        )

    def append(self, entry: Try) -> None:
        """Add a try; it is on the disk when this returns.

        Raises:
            OutputError: it holds NaN or infinity, or the disk cannot take it.
        """
        plain = entry.model_dump(mode="python")
        if (place := place_not_finite(plain)) is not None:
            raise OutputError(f"{self._file}: {place} of {entry.name} is not a finite number")
        text = json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        with disk_errors_named(self._file), self._file.open("ab") as sink:
            sink.truncate(self._size)
            sink.write(text.encode())
            sink.flush()
            os.fsync(sink.fileno())
        fsync_path(self._file.parent)
        self._size += len(text.encode())
        self._tries.append(entry)
