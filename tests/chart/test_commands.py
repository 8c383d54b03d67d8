"""What the pods run exists: arguments the real commands take, scripts that do what they say."""

from __future__ import annotations

import datetime
import http.server
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer.main
from chart_rendering import (
    CI_SETS,
    Document,
    every_container,
    executable,
    needs_helm,
    pod_templates,
    render_set,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from generate import CHART

FILES = CHART / "files"


def commands(program: str, *first: str) -> list[list[str]]:
    """Arguments of every rendered container that runs ``program first…``."""
    found: list[list[str]] = []
    for name in CI_SETS:
        for _, pod in pod_templates(render_set(name)):
            for container in every_container(pod):
                arguments = container.get("args", [])
                if executable(container) == program and arguments[: len(first)] == list(first):
                    found.append(arguments)
    return found


def parse(arguments: list[str]) -> Any:
    """Let the real ``taut`` parse a command line, without running it."""
    from taut_deploy.cli import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("taut", list(arguments[:1]), resilient_parsing=True)
    command, rest = group, list(arguments)
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    return command.make_context(command.name, rest, parent=context)


@needs_helm
@pytest.mark.parametrize(
    "first",
    [("model", "fetch"), ("model", "list"), ("compress",), ("validate",), ("cache", "warm")],
)
def test_jobs_call_taut_as_it_is(first: tuple[str, ...]):
    found = commands("taut", *first)
    assert found, first
    for arguments in found:
        parse(arguments)


@needs_helm
def test_recipes_and_policies_of_the_sets_exist():
    from taut_deploy.recipe import load_recipe
    from taut_deploy.validate.policy import load_policy

    recipes = {parse(arguments).params["recipe"] for arguments in commands("taut", "compress")}
    policies = {parse(arguments).params["policy"] for arguments in commands("taut", "validate")}
    assert recipes and policies
    for recipe in recipes:
        load_recipe(recipe)
    for policy in policies:
        load_policy(policy)


@needs_helm
def test_workers_call_taut_as_it_is():
    found = commands("taut", "worker")
    assert found
    for arguments in found:
        parameters = parse(arguments).params
        assert parameters["port"] == 8000
        # The pod's own address, which Kubernetes puts in for the variable.
        assert parameters["host"] == "$(POD_IP)"


class Answers(http.server.BaseHTTPRequestHandler):
    """A gateway of two variants, in as much as the scripts need one."""

    text = "Paris"
    answered_by = ""
    seen: list[dict[str, str]]

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        variant = self.headers.get("x-taut-variant")
        self.seen.append({"model": body["model"], "key": self.headers.get("authorization", "")})
        known = variant in (None, "a", "b")
        self.send_response(200 if known else 400)
        self.send_header("x-taut-variant", self.answered_by or variant or "a")
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"text": self.text}]}).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Stay silent."""


@contextmanager
def server(
    tls: tuple[Path, Path] | None = None, **fields: object
) -> Iterator[tuple[str, type[Answers]]]:
    handler = type("Handler", (Answers,), {"seen": [], **fields})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            running.socket = context.wrap_socket(running.socket, server_side=True)
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            scheme = "https" if tls else "http"
            yield f"{scheme}://127.0.0.1:{running.server_port}", handler
        finally:
            running.shutdown()
            thread.join()


def script(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FILES / name, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=env,
    )


def test_smoke_asks_once_and_each_variant():
    with server() as (url, handler):
        done = script("smoke.py", url, "m", "5", "a", "b", TAUT_API_KEY="secret")
    assert (done.returncode, done.stdout) == (0, "any variant: ok\na: ok\nb: ok\n")
    assert handler.seen == [{"model": "m", "key": "Bearer secret"}] * 3


@pytest.mark.parametrize(
    ("fields", "variant", "says"),
    [
        ({"text": " "}, "a", "a: an answer without text"),
        ({"answered_by": "b"}, "a", "a: answered by the variant 'b'"),
        ({}, "c", "c: status 400"),
    ],
)
def test_smoke_fails(fields: Document, variant: str, says: str):
    with server(**fields) as (url, _):
        done = script("smoke.py", url, "m", "5", variant)
    assert done.returncode == 1
    assert says in done.stdout


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed pair for ``llm.example``, as a Secret would hold it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llm.example")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    crt, pem = folder / f"{name}.crt", folder / f"{name}.key"
    crt.write_bytes(signed.public_bytes(Encoding.PEM))
    pem.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return crt, pem


def test_smoke_trusts_the_gateway_s_own_certificate_and_no_other(tmp_path: Path):
    mine, other = certificate(tmp_path, "mine"), certificate(tmp_path, "other")
    with server(mine) as (url, handler):
        done = script("smoke.py", url, "m", "5", TAUT_CERTIFICATE=str(mine[0]))
        refused = script(
            "smoke.py", url, "m", "5", TAUT_CERTIFICATE=str(other[0]), TAUT_API_KEY="k"
        )
    assert done.returncode == 0, done.stdout
    assert refused.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in refused.stdout
    assert [seen["key"] for seen in handler.seen] == [""]


def test_smoke_fails_without_a_gateway():
    done = script("smoke.py", "http://127.0.0.1:1", "m", "5")
    assert done.returncode == 1
    assert "URLError" in done.stdout


def test_waiting_ends_when_all_are_there_or_the_time_is_over():
    with server() as (url, _):
        assert script("wait_ready.py", "5", url, url).returncode == 0
        late = script("wait_ready.py", "0.1", url, "http://127.0.0.1:1")
    assert late.returncode == 1
    assert late.stderr == "not ready after 0.1 s: http://127.0.0.1:1\n"
