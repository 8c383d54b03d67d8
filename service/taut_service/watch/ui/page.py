"""Serves the page. Its files hold no secret; what it shows and does goes through the admin API.

They are answered without a key, since a browser sends none with an address that is typed in; the
page asks for one and keeps it in the tab's memory. Nothing is loaded from anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES: Mapping[str, tuple[str, str]] = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
    "/ui/tokens.js": ("tokens.js", "text/javascript; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
}
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_ui(admin: FastAPI) -> None:
    """Serve the page; not through FastAPI's routes, whose dependency asks for a key."""
    for path, (name, kind) in _FILES.items():
        admin.router.routes.append(Route(path, _answer(name, kind), methods=["GET"]))


def _answer(name: str, kind: str) -> Callable[[Request], Response]:
    def answer(_: Request) -> Response:
        data = resources.files(__package__).joinpath(name).read_bytes()
        return Response(data, media_type=kind, headers=dict(HEADERS))

    return answer
