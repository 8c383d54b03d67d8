"""Puts the compiled hot path into a wheel that is built with ``TAUT_COMPILE=1``.

Where mypy or a C compiler is missing, without that wish, and in an editable installation
(``service/compile.py`` compiles for that one), the wheel is Python alone and runs everywhere.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ASKED = "TAUT_COMPILE"


class CompiledHotPath(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled files to what goes into the wheel.

        Args:
            version: of the wheel's kind: ``standard`` or ``editable``.
            build_data: hatchling's; changed.
        """
        if version == "editable" or os.environ.get(ASKED) != "1":
            return
        room = Path(self.root) / "service"
        compiling = _module(room / "compile.py")
        if not compiling.is_current():
            missing = compiling.what_is_missing()
            if missing is not None:
                self.app.display_info(f"gateway: python, not compiled: {missing}")
                return
            try:
                compiling.build()
            except subprocess.CalledProcessError:
                compiling.remove()
                self.app.display_warning("gateway: python, not compiled, for the reason above")
                return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for file in compiling.outputs():
            build_data["force_include"][str(file)] = str(file.relative_to(room))


def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("taut_compile", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
