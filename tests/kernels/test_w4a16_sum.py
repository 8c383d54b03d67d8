"""The launch that adds the splits of a `wgmma` ring, and the reordering, in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INTERPRET = Path(__file__).with_name("interpret_w4a16_sum.py")


def test_sums_of_splits_in_the_interpreter(run_python: Any) -> None:
    process = run_python(str(INTERPRET), env={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.count(" ok\n") == 4
