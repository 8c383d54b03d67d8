"""The FastAPI application: models, health, metrics, documentation; what need not be quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request

from taut_service.call import ROUTES
from taut_service.drain import Drain
from taut_service.errors import GatewayError, MethodNotAllowedError, NotFoundError
from taut_service.metrics import Metrics
from taut_service.pool import Worker, WorkerPool, WorkerState
from taut_service.settings import ModelSettings, Settings

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_api(
    settings: Settings, pool: WorkerPool, drain: Drain, metrics: Metrics, lifespan: Lifespan
) -> FastAPI:
    """Build the application.

    Args:
        settings: for the list of models.
        pool: for readiness.
        drain: for readiness.
        metrics: for the scrape.
        lifespan: starts and stops what runs beside requests.

    Returns:
        The application; errors have the OpenAI shape.
    """
    api = FastAPI(
        title="taut gateway",
        summary="OpenAI-compatible front door for compressed models",
        version=_version(),
        lifespan=lifespan,
        redirect_slashes=False,
    )
    _add_models(api, settings)
    _add_health(api, pool, drain)

    @api.get("/metrics", tags=["operations"], summary="Prometheus text format")
    async def read_metrics() -> Response:
        return Response(metrics.exposition(), media_type=METRICS_TYPE)

    api.add_exception_handler(GatewayError, _on_gateway_error)
    api.add_exception_handler(HTTPException, _on_http_error)
    _describe_worker_routes(api)
    return api


def _version() -> str:
    try:
        return version("taut")
    except PackageNotFoundError:
        return "0"


def _add_models(api: FastAPI, settings: Settings) -> None:
    created = int(time.time())
    cards = {model.name: _model_card(model, created) for model in settings.models}

    @api.get("/v1/models", tags=["models"], summary="Models and how they were compressed")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(cards.values())}

    @api.get("/v1/models/{name:path}", tags=["models"], summary="One model")
    async def show_model(name: str) -> dict[str, Any]:
        if name not in cards:
            raise NotFoundError(
                f"the model {name[:100]!r} does not exist here",
                param="model",
                code="model_not_found",
            )
        return cards[name]


def _model_card(model: ModelSettings, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "taut",
        "max_model_len": model.max_model_len,
        "taut": model.provenance,
    }


def _add_health(api: FastAPI, pool: WorkerPool, drain: Drain) -> None:
    @api.get("/health/live", tags=["operations"], summary="The process answers")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @api.get("/health/ready", tags=["operations"], summary="Every model has a ready worker")
    async def ready() -> JSONResponse:
        report = readiness(pool, drain)
        return JSONResponse(report, status_code=200 if report["status"] == "ready" else 503)


def readiness(pool: WorkerPool, drain: Drain) -> dict[str, Any]:
    """Say how each worker is.

    Args:
        pool: the workers.
        drain: whether the gateway is ending.

    Returns:
        ``status`` (``ready``, ``not_ready`` or ``draining``) and, per model, its workers with
        ``state``, ``since`` (UTC) and ``detail``.
    """
    models: dict[str, dict[str, Any]] = {}
    for model, worker in pool.all():
        entry = models.setdefault(model, {"ready": False, "workers": []})
        entry["ready"] = entry["ready"] or worker.ready
        entry["workers"].append(_describe(worker, draining=drain.draining))
    status = "ready" if all(entry["ready"] for entry in models.values()) else "not_ready"
    return {"status": "draining" if drain.draining else status, "models": models}


def _describe(worker: Worker, *, draining: bool) -> dict[str, Any]:
    state = WorkerState.DRAINING if draining and worker.ready else worker.state
    return {
        "name": worker.name,
        "state": state.value,
        "since": datetime.fromtimestamp(worker.since, UTC).isoformat(timespec="milliseconds"),
        "detail": worker.detail,
        "outstanding": worker.outstanding,
    }


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
    raise error


def _describe_worker_routes(api: FastAPI) -> None:
    """Add to the OpenAPI document the routes that the front answers without FastAPI."""

    def describe() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = get_openapi(
                title=api.title, version=api.version, summary=api.summary, routes=api.routes
            )
            for route in ROUTES:
                document["paths"][route.path] = {"post": _operation(route.summary, route.required)}
            api.openapi_schema = document
        return api.openapi_schema

    # FastAPI's documented way to extend the document.
    api.openapi = describe  # type: ignore[method-assign]


def _operation(summary: str, required: tuple[str, ...]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["model", required[0]],
        "properties": {"model": {"type": "string"}, required[0]: {}},
        "additionalProperties": True,
    }
    return {
        "tags": ["inference"],
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The worker's answer, unchanged"},
            "4XX": {"description": "The request is wrong, or there are too many: {'error': {…}}"},
            "5XX": {"description": "No worker could answer: {'error': {…}}"},
        },
    }
