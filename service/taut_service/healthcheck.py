"""``taut-healthcheck [live|ready|drained|drain]``: what probes and stop hooks of a container run.

``live`` and ``ready`` ask once: exit 0 if the gateway on this machine says so, 1 if not.
``drained`` waits until no request is under way; ``drain`` first tells the admin API to begin.
Standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 3.0
POLL_S = 0.2
DEFAULT_PORT = "8000"
DEFAULT_ADMIN_PORT = "8001"
DEFAULT_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Address:
    port: int
    tls: bool = False
    key: str = ""


class _WrongUseError(Exception):
    """An argument or a variable is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the gateway at ``127.0.0.1:$TAUT_GATEWAY_PORT``, over TLS if ``$TAUT_GATEWAY_TLS`` is 1.

    ``drain`` also uses ``127.0.0.1:$TAUT_ADMIN_PORT`` and, where the gateway knows API keys, the
    key in the file ``$TAUT_ADMIN_KEY_FILE``.

    Args:
        arguments: without the program's name; the process's own if None.

    Returns:
        0 for yes, 1 for no, for no answer or for a wait that was too long, 2 for a wrong argument
        or variable.
    """
    options = _parser().parse_args(arguments)
    try:
        gateway = _Address(_port("TAUT_GATEWAY_PORT", DEFAULT_PORT), _is_set("TAUT_GATEWAY_TLS"))
        if options.what in ("live", "ready"):
            return _ask_once(gateway, f"/health/{options.what}")
        if options.what == "drain":
            admin = _Address(_port("TAUT_ADMIN_PORT", DEFAULT_ADMIN_PORT), key=_admin_key())
            body = json.dumps({"accept_s": options.accept}).encode()
            if code := _ask_once(admin, "/admin/drain", "POST", body):
                return code
            # Until then requests are served, so being empty means nothing yet.
            time.sleep(options.accept)
    except _WrongUseError as error:
        return _complain(str(error), 2)
    return _wait_until_empty(gateway, options.timeout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="taut-healthcheck", description=__doc__)
    parser.add_argument(
        "what", nargs="?", default="live", choices=("live", "ready", "drained", "drain")
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=DEFAULT_WAIT_S, help="longest wait of drained and drain"
    )
    parser.add_argument(
        "--accept",
        type=_seconds,
        default=0.0,
        help="drain: seconds in which requests are still served while readiness says no",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _port(variable: str, default: str) -> int:
    text = os.environ.get(variable, default)
    if not text.isdigit() or not 0 < int(text) <= 65535:
        raise _WrongUseError(f"{variable}: {text!r} is not a port")
    return int(text)


def _is_set(variable: str) -> bool:
    text = os.environ.get(variable, "0")
    if text not in ("0", "1"):
        raise _WrongUseError(f"{variable}: {text!r} is neither 0 nor 1")
    return text == "1"


def _admin_key() -> str:
    path = os.environ.get("TAUT_ADMIN_KEY_FILE")
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise _WrongUseError(f"TAUT_ADMIN_KEY_FILE: {path}: cannot be read") from error


def _request(
    address: _Address, path: str, method: str = "GET", body: bytes = b""
) -> tuple[int, bytes]:
    connection: http.client.HTTPConnection
    if address.tls:
        # The certificate names the public host; what answers here is this machine itself.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            "127.0.0.1", address.port, timeout=TIMEOUT_S, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=TIMEOUT_S)
    headers = {"content-type": "application/json"} if body else {}
    if address.key:
        headers["authorization"] = f"Bearer {address.key}"
    try:
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _ask_once(address: _Address, path: str, method: str = "GET", body: bytes = b"") -> int:
    where = f"127.0.0.1:{address.port}{path}"
    try:
        status, _ = _request(address, path, method, body)
    except (OSError, http.client.HTTPException) as error:
        return _complain(f"{where}: {error}", 1)
    return 0 if status == 200 else _complain(f"{where}: status {status}", 1)


def _wait_until_empty(address: _Address, timeout_s: float) -> int:
    """Return 0 as soon as no request is under way, or when a gateway that answered is gone."""
    where = f"127.0.0.1:{address.port}/health/drain"
    deadline = time.monotonic() + timeout_s
    answered = False
    said = "no answer"
    while True:
        try:
            status, body = _request(address, "/health/drain")
        except (OSError, http.client.HTTPException) as error:
            if answered:
                return 0
            return _complain(f"{where}: {error}", 1)
        if status == 200:
            return 0
        answered = status == 503
        said = body.decode("utf-8", "replace")[:200]
        if time.monotonic() >= deadline or not answered:
            return _complain(f"{where}: status {status} {said}", 1)
        time.sleep(POLL_S)


def _complain(text: str, code: int) -> int:
    print(text, file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
