"""Lets the tests of this directory import ``harms``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
