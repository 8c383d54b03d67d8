"""Have this pod's gateway read its file again when it changes: reload_config.py FOLDER HASH.

A file that also changes what a gateway reads only at its start says so by another ``fixed`` than
HASH: this pod is about to be replaced then, and its gateway is left alone.
"""

from __future__ import annotations

import http.client
import os
import signal
import sys
import time
from pathlib import Path

POLL_S = 2.0
TIMEOUT_S = 10.0


def reload() -> tuple[int, str]:
    """Ask the admin API of this pod.

    Returns:
        The status, 0 if nobody answers, and what was said.
    """
    headers = {}
    if path := os.environ.get("TAUT_ADMIN_KEY_FILE"):
        try:
            headers["authorization"] = f"Bearer {Path(path).read_text(encoding='ascii').strip()}"
        except (OSError, UnicodeError) as error:
            return 0, f"TAUT_ADMIN_KEY_FILE: {path}: {error}"
    port = int(os.environ.get("TAUT_ADMIN_PORT", "8001"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/admin/reload", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return 0, f"127.0.0.1:{port}: {error}"
    finally:
        connection.close()


def read(folder: Path, fixed: str) -> bytes | None:
    """Return the file, or None while it is being replaced or is not for this pod."""
    try:
        before = (folder / "fixed").read_text().strip()
        content = (folder / "gateway.yaml").read_bytes()
        after = (folder / "fixed").read_text().strip()
    except OSError:
        return None
    return content if before == after == fixed else None


def main(folder: Path, fixed: str) -> None:
    """Look for ever; SIGTERM ends it at once."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Which content the gateway began with is not known, so the first look counts as a change.
    in_force: bytes | None = None
    said = ""
    while True:
        content = read(folder, fixed)
        if content is not None and content != in_force:
            status, text = reload()
            line = f"reload: {status} {text}"
            if line != said:
                print(line, flush=True)  # noqa: T201
                said = line
            # A refused file stays refused (409); anything else may be better in a moment.
            if status in (200, 409):
                in_force = content
                said = ""
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
