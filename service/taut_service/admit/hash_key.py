"""``taut-gateway hash-key``: the SHA-256 of an API key, read from standard input.

So nobody has to write a key on a command line, where other users of the machine and the shell's
history would see it.
"""

from __future__ import annotations

import getpass
import hashlib
import re
import sys

_KEY = re.compile(r"[\x21-\x7e]{1,4096}")


def hash_key() -> int:
    """Read one key, print its hash for ``api_keys[].sha256`` or a file of keys.

    Returns:
        0, or 2 if what was read is not a key.
    """
    if sys.stdin.isatty():
        key = getpass.getpass("API key: ", sys.stderr).strip()
    else:
        key = sys.stdin.read(8192).strip()
    if _KEY.fullmatch(key) is None:
        text = "a key is one line of 1 to 4096 visible ASCII characters, on standard input"
        print(f"taut-gateway hash-key: {text}", file=sys.stderr)  # noqa: T201
        return 2
    print(hashlib.sha256(key.encode()).hexdigest())  # noqa: T201
    return 0
