"""A real profile on the CPU: the schedule, the trace file and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from taut_bench.instruments import profile
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.profile import Schedule
from taut_bench.instruments.subject import Subject
from taut_bench.instruments.trace import read_trace

CPU = torch.device("cpu")


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) @ w


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> profile.Profile:
    path = tmp_path_factory.mktemp("profile") / "new" / "trace.json.gz"
    subject = Subject("step", step, (torch.ones(64, 64), torch.ones(64, 64)), CPU)
    return profile.record(subject, path, Schedule(wait=1, warmup=1, active=3))


def test_only_active_steps_are_recorded(recorded: profile.Profile) -> None:
    assert len(recorded.step_micros) == 3
    calls = {row.name: row.calls for row in recorded.rows}
    assert calls["aten::mm"] == 2
    assert calls["aten::relu"] == 1


def test_table_is_sorted_and_its_shares_add_up(recorded: profile.Profile) -> None:
    times = [row.micros for row in recorded.rows]
    assert times == sorted(times, reverse=True)
    assert sum(row.share for row in recorded.rows) == pytest.approx(1.0)


def test_trace_is_one_that_viewers_open(recorded: profile.Profile) -> None:
    assert recorded.trace.read_bytes()[:2] == b"\x1f\x8b"
    assert [span.name for span in read_trace(recorded.trace).steps] == [
        f"ProfilerStep#{i}" for i in (2, 3, 4)
    ]


def test_text_says_what_a_cpu_cannot_show(recorded: profile.Profile) -> None:
    text = profile.text(recorded, rows=1)
    assert "no kernel of a GPU in the trace" in text
    assert f"{len(recorded.rows) - 1} more in the trace" in text
    json.dumps(recorded.as_json())


@pytest.mark.parametrize("wrong", [{"active": 0}, {"wait": -1}, {"warmup": -1}])
def test_schedules_that_record_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InstrumentError):
        Schedule(**wrong)


@pytest.mark.parametrize("content", ["no json", "[]", "{}"])
def test_what_is_no_trace_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(InstrumentError, match=r"trace\.json: not a"):
        read_trace(path)


def test_places_that_cannot_be_written_are_named_before_a_step_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "trace.json.gz").mkdir()
    subject = Subject("step", lambda: pytest.fail("a step ran"), (), CPU)
    with pytest.raises(InstrumentError, match="file: cannot be made"):
        profile.record(subject, tmp_path / "file" / "trace.json")
    with pytest.raises(InstrumentError, match=r"trace\.json\.gz: cannot be written: Is a dir"):
        profile.record(subject, tmp_path / "trace.json.gz")


@pytest.mark.gpu
def test_kernels_of_a_gpu_have_an_occupancy(tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    subject = Subject("step", step, (torch.ones(512, 512, device=cuda),) * 2, cuda)
    found = profile.record(subject, tmp_path / "trace.json", Schedule(active=3))
    assert found.not_looked_at == ()
    # Two products and relu; a product may take more than one kernel (split K: five seen).
    assert sum(row.calls for row in found.rows) >= 3
    assert any(row.occupancy for row in found.rows)
