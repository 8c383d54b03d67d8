"""``kill -9`` in the middle of ``taut shrink``: the next run goes on and repeats nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from taut_deploy.checkpoint import MANIFEST, verify
from taut_deploy.files import VOLATILE_FILES
from taut_deploy.recorded_hashes import RECORD

# The times of a run, which no two runs share.
VOLATILE = ("compress_seconds", "validate_seconds", "finished_at", "recorded")


KILL_AT = """
import signal

class Killing:
    \"\"\"Standard error that kills the process as soon as it has said a line that begins so.\"\"\"

    def __init__(self, stream):
        self.stream, self.begun = stream, ""

    def write(self, text):
        self.stream.write(text)
        self.stream.flush()
        *lines, self.begun = (self.begun + text).split("\\n")
        if any(line.startswith({line!r}) for line in lines):
            os.kill(os.getpid(), signal.SIGKILL)
        return len(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)

sys.stderr = Killing(sys.stderr)
"""


def content(directory: Path) -> dict[str, bytes]:
    """Every byte of a checkpoint but its log, its record and its verdict, which hold times."""
    found = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in {*VOLATILE_FILES, RECORD}
    }
    manifest = json.loads(found[MANIFEST])
    assert manifest.pop("validation")["verdict"] == "PASS"
    return found | {MANIFEST: json.dumps(manifest).encode()}


def without_times(room, output: str) -> list[dict]:
    return [
        {key: value for key, value in entry.items() if key not in VOLATILE}
        for entry in room.ledger(output)
    ]


@pytest.fixture
def undisturbed(room, run):
    """A run of this process, once for all tests; only what is killed needs one of its own."""
    if not (room.path / "undisturbed").exists():
        code, _, err = run(*room.command("middling", "undisturbed"))
        assert code == 0, err
    return "undisturbed"


# After w2's line in the ledger, in the middle of a compression, and of a comparison.
@pytest.mark.parametrize(
    "line", ["taut: w2: FAIL", "[1/2] w4: compressing model.layers.1", "[2/6] w8: compare"]
)
def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(room, run, fork_taut, undisturbed, line):
    output = f"killed-{line[1]}-{line.split()[1].rstrip(':')}"
    home = {"TAUT_HOME": str(room.path / "home")}
    words = room.command("middling", output)
    killed = fork_taut(room.path, *words, first=KILL_AT.format(line=line), env=home)
    assert killed.returncode == -signal.SIGKILL, f"never said {line!r}: {killed.stderr}"
    done = [entry["name"] for entry in room.ledger(output)]
    before = (room.path / output / "ledger.jsonl").read_bytes()
    code, _, err = run(*room.command("middling", output))
    assert code == 0, err
    assert (room.path / output / "ledger.jsonl").read_bytes().startswith(before)
    assert without_times(room, output) == without_times(room, undisturbed)
    for name in done:
        assert f"{name}: compressing" not in err
        assert f"{name}: compare" not in err
    if line.endswith("layers.1"):
        assert "w4: compressing model.layers.0" not in err, "block 0 was committed"
    if line.endswith("compare"):
        assert "w8: compressing" not in err, "the checkpoint was finished"
    assert room.tries(output) == room.tries(undisturbed)
    (found,) = [name for name in room.tries(output) if not name.startswith(".")]
    tries = [room.path / where / "tries" / found for where in (output, undisturbed)]
    verify(tries[0])
    assert content(tries[0]) == content(tries[1])
    frontiers = [
        json.loads((room.path / where / "frontier.json").read_text())
        for where in (output, undisturbed)
    ]
    assert [one["status"] for one in frontiers] == ["found", "found"]
