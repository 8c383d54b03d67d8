"""``taut-gateway --config FILE``: read the configuration, bind, serve, drain, exit 0."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from taut_service.admit.hash_key import hash_key
from taut_service.admit.key_file import read_keys
from taut_service.config.settings import Settings, SettingsError, load_settings
from taut_service.config.worker_keys import read_worker_keys
from taut_service.http.tls import ServerTls

logger = logging.getLogger("taut_service")
GC_THRESHOLD = 20_000
"""Containers made between two looks for reference cycles: a request leaves none behind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; the process's own if None.

    Returns:
        0 after a drain or a successful ``--check``, 2 for a wrong configuration, 1 if the address
        cannot be bound.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["hash-key"]:
        return hash_key()
    if given[:1] == ["verify-audit"]:
        from taut_service.rollout.verify import verify_audit

        return verify_audit(given[1:])
    options = _parser().parse_args(arguments)
    try:
        settings = load_settings(options.config)
        if options.check:
            _check_files(settings)
    except SettingsError as error:
        return _complain(str(error), 2)
    if options.check:
        workers = sum(len(model.every_worker()) for model in settings.models)
        print(f"{options.config}: ok, {len(settings.models)} model(s), {workers} worker(s)")  # noqa: T201
        return 0
    host = settings.listen.host if options.host is None else options.host
    port = settings.listen.port if options.port is None else options.port
    return _serve(settings, options.config, host, port)


def _check_files(settings: Settings) -> None:
    """Read what the configuration points at; raises SettingsError."""
    if settings.api_keys_file is not None:
        read_keys(settings.api_keys_file)
    read_worker_keys(settings)
    if settings.listen.tls is not None:
        ServerTls(settings.listen.tls)
    if settings.rate_limits.redis is not None:
        # Imported late: it brings the metrics and the package redis with it.
        from taut_service.admit.limits.store import build_store

        build_store(settings.rate_limits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="taut-gateway",
        description="OpenAI-compatible gateway in front of vLLM workers",
        epilog="taut-gateway hash-key: read an API key from standard input, print its SHA-256; "
        "taut-gateway verify-audit FILE: check the log of a rollout",
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file; see docs/gateway-settings.md"
    )
    parser.add_argument("--host", help="listen here instead of listen.host")
    parser.add_argument("--port", type=_port, help="listen here instead of listen.port")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _serve(settings: Settings, path: Path, host: str, port: int) -> int:
    # FastAPI asks of each route whether its types are of pydantic 1, and imports all of that to
    # ask: 1.5 MB that nothing here uses. Where it is not there, it takes that for a no.
    sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type]
    # Imported late: --check and a wrong file need neither FastAPI nor uvicorn.
    import prometheus_client

    from taut_service.app import create_app
    from taut_service.built import how_built
    from taut_service.http.descriptors import raise_soft_limit
    from taut_service.http.server import GatewayServer, listen
    from taut_service.watch import logs

    logs.configure()
    # Half of the lines of a scrape, read by nobody.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    tls, admin = None, None
    try:
        opened = listen(host, port)
        if settings.admin is not None:
            host, port = settings.admin.host, settings.admin.port
            admin = listen(host, port)
        app = create_app(settings, path=path)
        if settings.listen.tls is not None:
            reloaded = partial(app.metrics.reloaded, "certificate")
            tls = ServerTls(settings.listen.tls, reloaded)
    except OSError as error:
        return _complain(f"cannot listen on {host}:{port}: {error.strerror or error}", 1)
    except SettingsError as error:
        return _complain("\n".join(f"{path}: {line}" for line in str(error).splitlines()), 2)
    server = GatewayServer(app, settings.drain_timeout_s, tls=tls, admin=admin)
    server.config.load()
    # What exists now stays: collections need not walk through it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    scheme = "https" if tls is not None else "http"
    logger.info("listening on %s://%s:%d", scheme, *opened.getsockname()[:2])
    if admin is not None:
        logger.info("admin API on http://%s:%d", *admin.getsockname()[:2])
    logger.info("hot path: %s", how_built())
    # Its line comes after those that name the ports: some wait for the first.
    raise_soft_limit()
    server.run(sockets=[opened])
    return 0


def _complain(text: str, code: int) -> int:
    for line in text.splitlines():
        print(f"taut-gateway: {line}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
