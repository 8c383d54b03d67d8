"""The FastAPI application: models, health, metrics, documentation; what need not be quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Request
from fastapi.responses import Response

from taut_service.admit.auth import CALLER, Caller
from taut_service.built import how_built
from taut_service.config.reload import Reloader
from taut_service.errors import NotFoundError
from taut_service.http.api_errors import install_error_handlers
from taut_service.http.docs_page import add_docs
from taut_service.http.model_cards import ModelCard, ModelList, card_of, cards_of
from taut_service.http.openapi import ERROR, describe_routes
from taut_service.watch.drain import Drain
from taut_service.watch.families import taut_version
from taut_service.watch.health import add_health
from taut_service.watch.metrics import Metrics

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_api(reloader: Reloader, drain: Drain, metrics: Metrics, lifespan: Lifespan) -> FastAPI:
    """Build the application.

    Args:
        reloader: holds the configuration in force: models and workers.
        drain: for readiness.
        metrics: for the scrape.
        lifespan: starts and stops what runs beside requests.

    Returns:
        The application; errors have the OpenAI shape.
    """
    api = FastAPI(
        title="taut gateway",
        summary="OpenAI-compatible front door for compressed models",
        version=taut_version(),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from another host
        redoc_url=None,
    )
    _add_models(api, reloader)
    add_health(api, reloader, drain)

    @api.get("/version", include_in_schema=False)
    async def show_version() -> dict[str, str]:
        return {"version": api.version, "build": how_built()}

    @api.get(
        "/metrics",
        tags=["operations"],
        summary="Prometheus text format",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def read_metrics() -> Response:
        return Response(await metrics.text(), media_type=METRICS_TYPE)

    add_docs(api)
    install_error_handlers(api)
    describe_routes(api, reloader)
    return api


def _add_models(api: FastAPI, reloader: Reloader) -> None:
    created = int(time.time())

    @api.get("/v1/models", tags=["models"], summary="Models and how they were compressed")
    async def list_models(request: Request) -> ModelList:
        listed = cards_of(reloader.current, created)
        return ModelList(data=[card for card in listed.data if _may_see(request, card.id)])

    @api.get(
        "/v1/models/{name:path}",
        tags=["models"],
        summary="One model, by its name or an alias",
        responses={404: ERROR},
    )
    async def show_model(request: Request, name: str) -> ModelCard:
        model = reloader.current.names.get(name)
        if model is None or not _may_see(request, model.name):
            raise NotFoundError(
                f"the model {name[:100]!r} does not exist here",
                param="model",
                code="model_not_found",
            )
        return card_of(model, created)


def _may_see(request: Request, model: str) -> bool:
    """Whether the caller's key covers a model; without keys everybody sees all of them."""
    caller: Caller | None = request.scope.get(CALLER)
    return caller is None or caller.may_call(model)
