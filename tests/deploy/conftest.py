"""Makes the modules beside the tests importable (pytest's importlib mode adds no folder to the
path), and keeps the tiny models of these tests on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """On tensors this small a second thread only waits, and for long on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
