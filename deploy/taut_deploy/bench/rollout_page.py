"""Pictures of the operator's page, where there is a Chromium."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from taut_deploy.progress import Say

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 60
_SETTLED_MS = 8000
"""Of the page's own time: it asks for the state every two seconds."""


def photograph(url: str, file: Path, say: Say) -> bool:
    """Write a picture of a page; without a browser say so.

    Args:
        url: of the page.
        file: PNG to write.
        say: prints one line for the user.

    Returns:
        Whether there is a picture now.
    """
    browser = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if browser is None:
        say(f"no {file.name}: no Chromium here; apt-get install chromium")
        return False
    with tempfile.TemporaryDirectory(prefix="taut-browser-") as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += [f"--user-data-dir={profile}", "--window-size=1100,1400", "--hide-scrollbars"]
        command += [f"--virtual-time-budget={_SETTLED_MS}", f"--screenshot={file}", url]
        try:
            subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"no {file.name}: {type(error).__name__} of {browser}")
            return False
    return file.exists()
