"""The operator's API: what is going on, and the few things that may be changed while it runs.

It listens on an address of its own, by default on loopback, and is never reachable on the public
port. Where API keys are configured, it needs one with the scope ``admin``. Browsers are kept out,
since any page they show could send requests to a loopback address: a request with an ``Origin``
other than this API's own is refused, and so is one whose ``Host`` is a name other than
``localhost`` or the configured one (DNS rebinding).

What is changed here lasts until the next reload or restart; the file stays the truth.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from taut_service.admit.admission import Admission
from taut_service.admit.auth import ApiKeys
from taut_service.config.reload import Reloader
from taut_service.config.settings import GuardSettings, SettingsError
from taut_service.errors import ConflictError, ForbiddenError, NotFoundError, RequestError
from taut_service.http.api_errors import install_error_handlers
from taut_service.http.docs_page import add_docs
from taut_service.http.openapi import ERROR, own_document
from taut_service.route.variants import Model, UnknownVariantError
from taut_service.watch.admin_playground import add_playground
from taut_service.watch.admin_rollout import RolloutControls, add_rollout, operator_of
from taut_service.watch.admin_state import GatewayState, WorkerReport, describe, worker_report
from taut_service.watch.drain import Drain
from taut_service.watch.families import taut_version
from taut_service.watch.key_usage import KeyUsage
from taut_service.watch.metrics import Metrics
from taut_service.watch.ui.page import add_ui
from taut_service.watch.usage_report import UsageReport
from taut_service.worker.discovery.supervisor import Supervisor
from taut_service.worker.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Controls:
    """What the operator may look at and change.

    Args:
        reloader: the configuration in force.
        admission: what runs and waits.
        discovery: the watches.
        drain: the door.
        keys: who may use this API.
        usage: what each key has used.
        metrics: how variants fare.
        host: the configured host of this API.
        rollout: the guard and the rollouts; None without a guard.
    """

    reloader: Reloader
    admission: Admission
    discovery: Supervisor
    drain: Drain
    keys: ApiKeys
    usage: KeyUsage
    metrics: Metrics
    host: str
    rollout: RolloutControls | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Weights(_Body):
    """New shares of some variants; those not named keep theirs."""

    weights: Annotated[
        dict[str, Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]],
        Field(min_length=1),
    ]


class DrainRequest(_Body):
    """How long new requests are still served while readiness already says no."""

    accept_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.0


class DrainReport(BaseModel):
    """Whether new requests are refused, and how many are under way."""

    draining: bool
    live: int


class Generation(BaseModel):
    """The configuration in force."""

    generation: int


def create_admin(controls: Controls) -> FastAPI:
    """Build the admin application.

    Args:
        controls: what it acts on.

    Returns:
        The application; it has no lifespan of its own.
    """

    async def check(request: Request) -> None:
        _refuse_browsers(request, controls.host)
        caller = controls.keys.caller_of(_values(request, b"authorization"))
        if caller is not None and not caller.is_admin:
            raise ForbiddenError("this key has no scope 'admin'")
        request.state.operator = None if caller is None else caller.name

    admin = FastAPI(
        title="taut gateway: admin",
        summary="State and control of one gateway process",
        dependencies=[Depends(check)],
        responses=dict.fromkeys((400, 401, 403, 404, 409), ERROR),
        version=taut_version(),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    add_docs(admin)
    install_error_handlers(admin)
    _add_state(admin, controls)
    _add_usage(admin, controls.usage)
    _add_workers(admin, controls)
    _add_configuration(admin, controls)
    _add_drain(admin, controls)
    if controls.rollout is not None:
        add_rollout(admin, controls.rollout)
    guard = controls.reloader.current.settings.guard
    add_playground(admin, controls.reloader, guard or GuardSettings())
    add_ui(admin)
    document = own_document(admin)
    # FastAPI's documented way to replace the document.
    admin.openapi = lambda: document  # type: ignore[method-assign]
    return admin


def _record(request: Request, text: str, *values: object) -> None:
    """Write down who changed what."""
    logger.info(f"admin %s: {text}", operator_of(request), *values)  # noqa: G004


def _values(request: Request, wanted: bytes) -> list[bytes]:
    return [value for name, value in request.scope["headers"] if name == wanted]


def _refuse_browsers(request: Request, configured: str) -> None:
    authority = request.headers.get("host", "")
    for origin in _values(request, b"origin"):
        # Its own page at /ui is of the same origin; no other page is.
        if origin.decode("latin-1") not in (f"http://{authority}", f"https://{authority}"):
            raise ForbiddenError("the admin API takes no requests from web pages")
    name = _host_name(authority)
    if name not in ("localhost", configured) and not _is_address(name):
        raise ForbiddenError(f"the admin API is not known as {name[:100]!r}; use its address")


def _host_name(authority: str) -> str:
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _add_state(admin: FastAPI, controls: Controls) -> None:
    @admin.get("/admin/state", summary="Configuration, models, variants, workers, live streams")
    async def show_state() -> GatewayState:
        return describe(
            controls.reloader.current,
            controls.admission,
            controls.discovery,
            controls.drain,
            controls.metrics,
            guarded=controls.rollout is not None,
        )


def _add_usage(admin: FastAPI, usage: KeyUsage) -> None:
    @admin.get(
        "/admin/usage",
        summary="Requests, tokens and cost by key and model, since the process began",
        response_model=UsageReport,
        responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
    )
    async def show_usage(
        shape: Annotated[Literal["json", "csv"], Query(alias="format")] = "json",
    ) -> UsageReport | Response:
        report = usage.report()
        if shape == "json":
            return report
        return Response(report.csv(), media_type="text/csv")


def _add_workers(admin: FastAPI, controls: Controls) -> None:
    def workers_named(name: str) -> list[Worker]:
        found = [w for _, _, w in controls.reloader.current.workers() if w.name == name]
        if not found:
            raise NotFoundError(f"there is no worker {name[:100]!r}", code="worker_not_found")
        return found

    def told(
        request: Request, name: str, change: Callable[[Worker], None], what: str
    ) -> WorkerReport:
        found = workers_named(name)
        for worker in found:
            change(worker)
        _record(request, f"worker %s is {what}", name)
        return worker_report(found[0])

    @admin.post("/admin/workers/{name:path}/drain", summary="Give a worker no more requests")
    async def drain_worker(request: Request, name: str) -> WorkerReport:
        return told(request, name, Worker.drain, "drained")

    @admin.post("/admin/workers/{name:path}/undrain", summary="Give it requests again")
    async def undrain_worker(request: Request, name: str) -> WorkerReport:
        return told(request, name, Worker.undrain, "no longer drained")


def _add_configuration(admin: FastAPI, controls: Controls) -> None:
    def model_named(name: str) -> Model:
        model = controls.reloader.current.names.get(name)
        if model is None:
            raise NotFoundError(f"there is no model {name[:100]!r}", code="model_not_found")
        return model

    @admin.put("/admin/models/{name:path}/weights", summary="Move traffic between variants")
    async def set_weights(request: Request, name: str, body: Weights) -> Weights:
        model = model_named(name)
        try:
            model.check_weights(body.weights)
        except UnknownVariantError as error:
            raise NotFoundError(str(error), param="weights", code="variant_not_found") from error
        except ValueError as error:
            raise RequestError(str(error), param="weights", code="invalid_value") from error
        if controls.rollout is not None and controls.rollout.commands is not None:
            await controls.rollout.commands.overridden(model.name, operator_of(request))
        model.set_weights(body.weights)
        _record(request, "weights of %s are %s", model.name, model.weights)
        return Weights(weights=model.weights)

    @admin.post("/admin/reload", summary="Read the configuration file again")
    async def reload_configuration(request: Request) -> Generation:
        _record(request, "reload")
        try:
            generation = await controls.reloader.reload()
        except SettingsError as error:
            raise ConflictError(str(error), code="configuration_refused") from error
        return Generation(generation=generation.number)


def _add_drain(admin: FastAPI, controls: Controls) -> None:
    @admin.post("/admin/drain", summary="Take this gateway out of service; it does not end")
    async def begin_drain(request: Request, body: DrainRequest | None = None) -> DrainReport:
        controls.drain.begin(body.accept_s if body is not None else 0.0)
        _record(request, "draining, %d live", controls.drain.live)
        return DrainReport(draining=True, live=controls.drain.live)

    @admin.post("/admin/undrain", summary="Put it back into service")
    async def end_drain(request: Request) -> DrainReport:
        if not controls.drain.reopen():
            raise ConflictError("the gateway is ending", code="ending")
        _record(request, "no longer draining")
        return DrainReport(draining=False, live=controls.drain.live)
