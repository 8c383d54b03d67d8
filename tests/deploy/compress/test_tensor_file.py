"""Files of tensors: what is written reads back, and costs no second copy in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from taut_deploy.compress.tensor_file import write_rows, write_tensors
from taut_deploy.compress.trial import peak_memory_bytes

MEGABYTE = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_written_in_batches_read_back_as_one_tensor(dtype, tmp_path):
    rows = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    # A batch that is no contiguous memory, and one of another size than the rest.
    batches = [rows[:3], rows[3:6].mT.contiguous().mT, rows[6:]]
    write_rows(tmp_path / "r.safetensors", 7, iter(batches))
    read = load_file(tmp_path / "r.safetensors")
    assert list(read) == ["rows"]
    assert read["rows"].dtype == dtype
    assert torch.equal(read["rows"], rows)


@pytest.mark.parametrize(
    ("rows", "second", "reason"),
    [
        (5, torch.zeros(2, 3), "4 rows instead of 5"),
        (4, torch.zeros(2, 4), "rows of"),
        (4, torch.zeros(2, 3, dtype=torch.float64), "rows of"),
    ],
)
def test_batches_that_do_not_make_the_tensor_leave_no_file(rows, second, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        write_rows(tmp_path / "r.safetensors", rows, [torch.zeros(2, 3), second])
    assert not list(tmp_path.iterdir())


def grown_peak(before: int) -> int:
    return (peak_memory_bytes() - before) // MEGABYTE


def forget_peak() -> int:
    """Let the peak begin at what is held now, which is returned."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        pytest.skip("this system tells no peak of memory that can be reset")
    reset.write_text("5")
    return peak_memory_bytes()


def test_a_shard_is_written_from_the_tensors_own_memory(tmp_path):
    tensors = {f"t{i}": torch.ones(16 * MEGABYTE) for i in range(3)}  # 64 MB each
    before = forget_peak()
    write_tensors(tmp_path / "s.safetensors", tensors)
    assert grown_peak(before) < 32
    read = load_file(tmp_path / "s.safetensors")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_of_rows_a_batch_is_held(tmp_path):
    before = forget_peak()
    # 40 MB each: what is smaller the C library keeps for a while after it was freed.
    batches = (torch.full((1, 10 * MEGABYTE), float(i)) for i in range(8))
    write_rows(tmp_path / "r.safetensors", 8, batches)
    assert grown_peak(before) < 2 * 40 + 40
    assert load_file(tmp_path / "r.safetensors")["rows"][:, -1].tolist() == [*range(8)]
