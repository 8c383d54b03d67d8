"""Gives FastAPI's own errors the gateway's shape, in every application of this package."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request

from taut_service.errors import (
    GatewayError,
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
)


def install_error_handlers(api: FastAPI) -> None:
    """Answer every error of an application as ``{"error": {…}}``.

    Args:
        api: the application.
    """
    api.add_exception_handler(GatewayError, _on_gateway_error)
    api.add_exception_handler(HTTPException, _on_http_error)
    api.add_exception_handler(RequestValidationError, _on_invalid)


async def _on_gateway_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)  # noqa: S101 - registered for this class only
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers=headers, media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class only
    if error.status_code == 404:
        return await _on_gateway_error(
            request, NotFoundError(f"there is nothing at {request.url.path[:200]!r}")
        )
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET")
        return await _on_gateway_error(request, MethodNotAllowedError(request.method, allowed))
    if error.status_code == 400:
        # Starlette's words for a body that is not JSON at all.
        return await _on_gateway_error(request, RequestError(str(error.detail)[:200]))
    raise error


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this class only
    first = error.errors()[0]
    # The place begins with "body", "path" or "query".
    place = ".".join(str(part) for part in first["loc"][1:])
    text = str(first["msg"]).removeprefix("Value error, ")
    message = f"{place}: {text}" if place else text
    return await _on_gateway_error(
        request, RequestError(message[:500], param=place[:100] or None, code="invalid_value")
    )
