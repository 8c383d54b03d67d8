"""TLS: real handshakes; a renewed certificate is used, a bad one is not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from certificates import Authority
from gateway_harness import Client, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.config.settings import TlsFiles
from taut_service.http.tls import ServerTls, TlsError


@pytest.fixture
def authority() -> Authority:
    return Authority()


def files(paths: tuple[Path, Path]) -> TlsFiles:
    return TlsFiles(certificate=paths[0], key=paths[1])


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "ca.crt")


async def common_name(port: int, context: ssl.SSLContext) -> str:
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="127.0.0.1"
    )
    subject = writer.get_extra_info("peercert")["subject"]
    writer.close()
    return str(subject[0][0][1])


async def test_streams_go_through_tls_and_renewal_leaves_them_alone(
    tmp_path: Path, authority: Authority
) -> None:
    authority.write(tmp_path)
    told: list[bool] = []
    tls = ServerTls(files(authority.issue(tmp_path)), told.append)
    faults = Faults(tokens=20, interval_s=0.02)
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url), tls=tls) as harness,
    ):
        trust = trusting(tmp_path)
        client = Client(
            *await asyncio.open_connection(
                "127.0.0.1", harness.port, ssl=trust, server_hostname="localhost"
            )
        )
        await client.begin_stream()
        assert await common_name(harness.port, trust) == "tls"
        renewed = authority.issue(tmp_path, "renewed")
        for new, old in zip(renewed, (tmp_path / "tls.crt", tmp_path / "tls.key"), strict=True):
            new.replace(old)
        assert tls.check()
        assert not tls.check(), "nothing changed since"
        assert await common_name(harness.port, trust) == "renewed"
        text = b"".join([chunk async for chunk in client.chunks()])
        assert text.count(b" tok") == 20
        client.close()
        assert told == [True]


async def test_a_half_renewal_changes_nothing(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    authority.write(tmp_path)
    told: list[bool] = []
    tls = ServerTls(files(authority.issue(tmp_path)), told.append)
    async with MockEngine() as engine, gateway(settings_for(engine.url), tls=tls) as harness:
        trust = trusting(tmp_path)
        crt, key = authority.issue(tmp_path, "renewed")
        shutil.copy(crt, tmp_path / "tls.crt")
        with caplog.at_level(logging.ERROR, "taut_service.http.tls"):
            assert not tls.check()
            assert not tls.check()
        assert len(caplog.records) == 1, "said once, not at every look"
        assert await common_name(harness.port, trust) == "tls"
        shutil.copy(key, tmp_path / "tls.key")
        assert tls.check()
        assert await common_name(harness.port, trust) == "renewed"
        (tmp_path / "tls.key").unlink()
        assert not tls.check()
        assert await common_name(harness.port, trust) == "renewed"
        assert told == [False, True, False]


async def test_old_protocols_are_refused(tmp_path: Path, authority: Authority) -> None:
    authority.write(tmp_path)
    tls = ServerTls(files(authority.issue(tmp_path)))
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
    async with MockEngine() as engine, gateway(settings_for(engine.url), tls=tls) as harness:
        old = trusting(tmp_path)
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await common_name(harness.port, old)
        # Plain HTTP on the same port is closed, not served.
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n")
        assert b"200" not in await reader.read(100)
        writer.close()


@pytest.mark.parametrize("what", ["absent", "garbage", "mismatch"])
def test_files_that_cannot_be_used_are_one_line(
    tmp_path: Path, authority: Authority, what: str
) -> None:
    crt, key = authority.issue(tmp_path)
    if what == "absent":
        key.unlink()
    elif what == "garbage":
        crt.write_text("not a certificate")
    else:
        key = authority.issue(tmp_path, "other")[1]
    with pytest.raises(TlsError) as failure:
        ServerTls(files((crt, key)))
    text = str(failure.value)
    assert text.startswith("listen.tls")
    assert "\n" not in text
    assert str(key if what == "absent" else crt) in text


def test_the_process_serves_https_and_its_health_check_asks_so(
    tmp_path: Path, authority: Authority
) -> None:
    authority.write(tmp_path)
    crt, key = authority.issue(tmp_path)
    settings = settings_for("http://127.0.0.1:1").model_dump(mode="json")
    settings["listen"]["tls"] = {"certificate": str(crt), "key": str(key)}
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings))
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "taut_service", "--config", str(file), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stderr is not None
        said = json.loads(process.stderr.readline())["message"]
        assert said.startswith("listening on https://127.0.0.1:")
        environment["TAUT_GATEWAY_PORT"] = said.rsplit(":", 1)[1]

        def health(**extra: str) -> int:
            probe = [sys.executable, "-m", "taut_service.healthcheck", "live"]
            return subprocess.run(
                probe, env={**environment, **extra}, timeout=20, check=False, capture_output=True
            ).returncode

        assert health(TAUT_GATEWAY_TLS="1") == 0
        assert health() == 1
        assert health(TAUT_GATEWAY_TLS="maybe") == 2
    finally:
        process.terminate()
        process.communicate(timeout=20)
    checked = subprocess.run([*command, "--check"], capture_output=True, check=False, timeout=20)
    assert checked.returncode == 0
    key.write_text("garbage")
    checked = subprocess.run([*command, "--check"], capture_output=True, check=False, timeout=20)
    assert (checked.returncode, b"listen.tls" in checked.stderr) == (2, True)
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("taut-gateway: ")
    assert "listen.tls" in result.stderr


async def test_watch_takes_a_new_certificate_by_itself(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taut_service.http.tls.CHECK_EVERY_S", 0.01)
    told: list[bool] = []
    tls = ServerTls(files(authority.issue(tmp_path)), told.append)
    watching = asyncio.create_task(tls.run())
    authority.issue(tmp_path)
    await eventually(lambda: True in told)
    watching.cancel()
