"""``taut-gateway --config FILE``: read the configuration, bind, serve, drain, exit 0."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from taut_service.settings import Settings, SettingsError, load_settings

logger = logging.getLogger("taut_service")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; the process's own if None.

    Returns:
        0 after a drain or a successful ``--check``, 2 for a wrong configuration, 1 if the address
        cannot be bound.
    """
    options = _parser().parse_args(arguments)
    try:
        settings = load_settings(options.config)
    except SettingsError as error:
        return _complain(str(error), 2)
    if options.check:
        workers = sum(len(model.workers) for model in settings.models)
        print(f"{options.config}: ok, {len(settings.models)} model(s), {workers} worker(s)")  # noqa: T201
        return 0
    host = settings.listen.host if options.host is None else options.host
    port = settings.listen.port if options.port is None else options.port
    return _serve(settings, host, port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="taut-gateway", description="OpenAI-compatible gateway in front of vLLM workers"
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file; see service/README.md"
    )
    parser.add_argument("--host", help="listen here instead of listen.host")
    parser.add_argument("--port", type=_port, help="listen here instead of listen.port")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _serve(settings: Settings, host: str, port: int) -> int:
    # Imported late: --check and a wrong file need neither FastAPI nor uvicorn.
    import prometheus_client

    from taut_service import logs
    from taut_service.app import create_app
    from taut_service.server import GatewayServer, listen

    logs.configure()
    try:
        opened = listen(host, port)
    except OSError as error:
        return _complain(f"cannot listen on {host}:{port}: {error.strerror or error}", 1)
    # Half of the lines of a scrape, read by nobody.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    server = GatewayServer(create_app(settings), settings.drain_timeout_s)
    server.config.load()
    # What exists now stays: collections need not walk through it again and again.
    gc.collect()
    gc.freeze()
    logger.info("listening on http://%s:%d", host, opened.getsockname()[1])
    server.run(sockets=[opened])
    return 0


def _complain(text: str, code: int) -> int:
    for line in text.splitlines():
        print(f"taut-gateway: {line}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
