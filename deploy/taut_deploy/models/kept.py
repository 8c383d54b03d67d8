"""Files that are made out of what the index has, once, and kept."""

import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from taut_deploy.errors import ModelError
from taut_deploy.files import sha256_file, write_text_atomically


def kept_text(target: Path, digest: str, make: Callable[[Path], str], what: str) -> Path:
    """Return a file of text, made if it is not there as it should be.

    Args:
        target: where it is kept.
        digest: sha256 of the text in UTF-8, in hex.
        make: makes the text; gets a directory to work in. Of several processes one calls it.
        what: the text is, for the error's line.

    Raises:
        ModelError: it is another text than it should be; or what ``make`` raises.
    """
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{target.stem}.lock"):
        if target.is_file() and sha256_file(target) == digest:
            return target
        with tempfile.TemporaryDirectory(dir=folder) as work:
            text = make(Path(work))
        actual = sha256(text.encode()).hexdigest()
        if actual != digest:
            raise ModelError(f"{what} has sha256 {actual}, expected {digest}; nothing was kept")
        write_text_atomically(target, text)
    return target
