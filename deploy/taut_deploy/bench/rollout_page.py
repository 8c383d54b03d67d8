"""Pictures of pages, where there is a Chromium: the operator's, and reports."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

from taut_deploy.progress import Say

Scheme = Literal["dark", "light"]
_SCHEMES: tuple[Scheme, ...] = ("dark", "light")
"""In the order of the browser's own numbers for them."""
_SIZE = 1100, 1400
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 60
_SETTLED_MS = 8000
"""Of the page's own time: it asks for the state every two seconds."""


def photograph(
    url: str,
    file: Path,
    say: Say,
    *,
    scheme: Scheme = "light",
    size: tuple[int, int] = _SIZE,
) -> bool:
    """Write a picture of a page; without a browser say so.

    Args:
        url: of the page.
        file: PNG to write.
        say: prints one line for the user.
        scheme: the colours that the page is asked for.
        size: of the window: width and height in pixels.

    Returns:
        Whether there is a picture now.
    """
    browser = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if browser is None:
        say(f"no {file.name}: no Chromium here; apt-get install chromium")
        return False
    with tempfile.TemporaryDirectory(prefix="taut-browser-") as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += [f"--user-data-dir={profile}", "--hide-scrollbars"]
        command += ["--window-size={},{}".format(*size)]
        command += [f"--blink-settings=preferredColorScheme={_SCHEMES.index(scheme)}"]
        command += [f"--virtual-time-budget={_SETTLED_MS}", f"--screenshot={file}", url]
        try:
            subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"no {file.name}: {type(error).__name__} of {browser}")
            return False
    return file.exists()
