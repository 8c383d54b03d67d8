"""What several tests of the pipeline work on."""

from __future__ import annotations

import pytest
from tiny_models import write_calibration_text, write_llama


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` (fp32, K 64 and 128) and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model")
    write_calibration_text(path / "text.txt")
    return path
