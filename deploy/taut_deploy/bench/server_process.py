"""The process of a server on this machine."""

import ipaddress
from itertools import pairwise
from pathlib import PurePath
from urllib.parse import urlsplit

import psutil


def server_at(url: str) -> psutil.Process | None:
    """Find the process that listens where a URL points, or the ``taut serve`` that started it.

    Behind the gateway of a ``taut serve`` its workers compute, which are no children of it.

    Args:
        url: of a server.

    Returns:
        Its process; None where it runs elsewhere, or belongs to somebody else.
    """
    parts = urlsplit(url)
    if not _is_loopback(parts.hostname or ""):
        return None
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    try:
        sockets = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    listening = (one for one in sockets if one.status == psutil.CONN_LISTEN)
    pids = {one.pid for one in listening if one.laddr[1:] == (port,) and one.pid is not None}
    # Several where children inherited the socket: the oldest started them.
    found = min(map(psutil.Process, pids), key=psutil.Process.create_time, default=None)
    starter = None if found is None else found.parent()
    return starter if starter is not None and _is_taut_serve(starter) else found


def _is_taut_serve(process: psutil.Process) -> bool:
    try:
        words = [PurePath(word).name for word in process.cmdline()]
    except psutil.Error:
        return False
    named = ("taut", "taut_deploy")
    return any(word in named and after == "serve" for word, after in pairwise(words))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
