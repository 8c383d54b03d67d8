"""API keys: who is let in, for what; and the command that hashes one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_harness import CHAT, COMPLETION, MODEL, eventually, gateway, settings_for
from mock_engine import MockEngine

from taut_deploy.ports import free_port
from taut_service.__main__ import main as gateway_main
from taut_service.admit.auth import ApiKeys, Caller
from taut_service.admit.fair_queue import Priority
from taut_service.admit.key_file import KeyFileWatch, read_keys
from taut_service.config.settings import ApiKey, SettingsError
from taut_service.errors import ForbiddenError, RequestError, UnauthorizedError


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": sha256(key), **fields}


def caller(**fields: Any) -> Caller:
    return Caller(ApiKey.model_validate(entry("team", "k", **fields)))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_each_key_is_its_own_caller_in_either_case_of_its_hash() -> None:
    upper = {"name": "b", "sha256": sha256("k-b").upper()}
    keys = ApiKeys(settings_for("http://h:1", api_keys=[entry("a", "k-a"), upper]))
    for name in ("a", "b"):
        found = keys.caller_of([f"Bearer k-{name}".encode()])
        assert found is not None
        assert found.name == name
    for wrong in (b"Bearer k-c", b"Bearer ", b"Basic k-a", b"k-a", b"Bearer k-a\x00"):
        with pytest.raises(UnauthorizedError):
            keys.caller_of([wrong])
    with pytest.raises(UnauthorizedError, match="the request holds several API keys"):
        keys.caller_of([b"Bearer k-a", b"Bearer k-a"])


def test_found_key_is_compared_in_full() -> None:
    """The table only proposes: an entry under the wrong hash lets nobody in."""
    keys = ApiKeys(settings_for("http://h:1", api_keys=[entry("a", "k-a")]))
    right, wrong = bytes.fromhex(sha256("k-a")), bytes.fromhex(sha256("k-b"))
    keys._callers = {wrong: keys._callers[right]}
    with pytest.raises(UnauthorizedError):
        keys.caller_of([b"Bearer k-b"])


def test_scope_decides_which_models_may_be_called() -> None:
    caller().check_model("any")
    limited = caller(scopes=["models:a", "models:b"])
    limited.check_model("b")
    for refused in (limited, caller(scopes=["admin"])):
        with pytest.raises(ForbiddenError):
            refused.check_model("c")


def test_scopes_allow_what_they_name_and_nothing_else() -> None:
    plain, all_of_them = caller(), caller(scopes=["inference", "variant:pin", "admin"])
    assert (plain.may_pin, plain.is_admin, plain.brown_out) == (False, False, False)
    assert (all_of_them.may_pin, all_of_them.is_admin) == (True, True)


def test_priority_may_fall_but_rises_only_with_the_scope() -> None:
    normal = caller()
    assert normal.priority_for(None) is Priority.NORMAL
    assert normal.priority_for(b"Low") is Priority.LOW
    with pytest.raises(ForbiddenError):
        normal.priority_for(b"high")
    with pytest.raises(RequestError):
        normal.priority_for(b"urgent")
    assert caller(scopes=["inference", "priority:high"]).priority_for(b"high") is Priority.HIGH
    assert caller(priority="high").priority_for(None) is Priority.HIGH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scopes": ["inferences"]}, "'inferences' is not a scope"),
        ({"scopes": ["models:"]}, "'models:' is not a scope"),
        ({"scopes": ["inference", "models:a"]}, "'inference' covers every model"),
        ({"scopes": []}, "scopes"),
        ({"priority": "urgent"}, "priority"),
        ({"weight": 0}, "weight"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_minute": -1}, "tokens_per_minute"),
        ({"token": "secret"}, "token"),
    ],
)
def test_wrong_entry_is_one_line_that_names_the_field(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(str([entry("a", "k", **fields)]))
    with pytest.raises(SettingsError) as refused:
        read_keys(file)
    lines = str(refused.value).splitlines()
    assert all(line.startswith(f"{file}: [0].") for line in lines)
    assert message in str(refused.value)


def test_two_names_for_one_key_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"b {sha256('k-a')}\n")
    settings = settings_for("http://h:1", api_keys=[entry("a", "k-a")], api_keys_file=str(file))
    with pytest.raises(SettingsError, match="'a' and 'b' are the same key"):
        ApiKeys(settings)


def test_empty_file_locks_everybody_out(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("")
    keys = ApiKeys(settings_for("http://h:1", api_keys_file=str(file)))
    with pytest.raises(UnauthorizedError):
        keys.caller_of([b"Bearer anything"])


def test_failed_change_of_configuration_changes_nothing(tmp_path: Path) -> None:
    keys = ApiKeys(settings_for("http://h:1", api_keys=[entry("a", "k-a")]))
    with pytest.raises(SettingsError):
        keys.apply(settings_for("http://h:1", api_keys_file=str(tmp_path / "absent")))
    assert keys.caller_of([b"Bearer k-a"]) is not None
    assert keys.file is None


KEYS = [
    entry("plain", "k-plain"),
    entry("one", "k-one", scopes=[f"models:{MODEL}"]),
    entry("other", "k-other", scopes=["models:other"]),
    entry("low", "k-low", priority="low"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_key_without_the_model_gets_403(stream: bool) -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=KEYS)) as harness,
    ):
        body = {**COMPLETION, "stream": stream}
        assert (await harness.post(body, **bearer("k-one"))).status == 200
        refused = await harness.post(body, **bearer("k-other"))
        assert (refused.status, refused.error["code"]) == (403, "permission_denied")
        assert refused.error["param"] == "model"
        assert engine.started == 1
        assert await harness.metric('taut_rejected_total{reason="forbidden"}') == 1


async def test_key_sees_the_models_it_may_call() -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=KEYS)) as harness,
    ):
        for key, names in (("k-plain", [MODEL]), ("k-one", [MODEL]), ("k-other", [])):
            listed = await harness.request("GET", "/v1/models", headers=bearer(key))
            assert [card["id"] for card in listed.json["data"]] == names
            one = await harness.request("GET", f"/v1/models/{MODEL}", headers=bearer(key))
            assert one.status == (200 if names else 404)


async def test_key_never_reaches_a_worker() -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=KEYS)) as harness,
    ):
        for headers in (bearer("k-plain"), {"x-api-key": "k-plain"}):
            assert (await harness.post(CHAT, "/v1/chat/completions", **headers)).status == 200
        assert all("k-plain" not in str(seen.headers) for seen in engine.seen)


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [
        ("k-plain", {"x-taut-priority": "low"}, 200),
        ("k-plain", {"x-taut-priority": "high"}, 403),
        ("k-plain", {"x-taut-priority": "urgent"}, 400),
        ("k-plain", {"x-request-timeout": "5"}, 200),
        ("k-plain", {"x-request-timeout": "0"}, 400),
        ("k-plain", {"x-request-timeout": "nan"}, 400),
        ("k-plain", {"x-request-timeout": "soon"}, 400),
        ("k-plain", {"x-request-timeout": "-1"}, 400),
        ("k-low", {"x-taut-priority": "normal"}, 403),
    ],
)
async def test_headers_of_a_request_are_checked(
    key: str, headers: dict[str, str], status: int
) -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=KEYS)) as harness,
    ):
        answer = await harness.post(COMPLETION, **bearer(key), **headers)
        assert answer.status == status
        assert engine.started == (1 if status == 200 else 0)


async def test_file_of_keys_changes_while_the_gateway_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyFileWatch.__init__, "__defaults__", (0.02,))
    file = tmp_path / "keys"
    file.write_text(f"a {sha256('old')}\n")
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys_file=str(file))) as harness,
    ):
        assert (await harness.post(COMPLETION)).status == 401
        assert (await harness.post(COMPLETION, **bearer("old"))).status == 200
        file.write_text(f"a {sha256('new')}\nb {sha256('more')}\n")

        async def accepted() -> bool:
            return (await harness.post(COMPLETION, **bearer("new"))).status == 200

        await eventually(accepted)
        assert (await harness.post(COMPLETION, **bearer("old"))).status == 401
        assert await harness.metric("taut_api_keys") == 2


@pytest.mark.parametrize(
    ("given", "code", "printed"),
    [
        ("k-plain\n", 0, sha256("k-plain") + "\n"),
        ("k-plain", 0, sha256("k-plain") + "\n"),
        ("", 2, ""),
        ("two words\n", 2, ""),
        ("two\nlines\n", 2, ""),
    ],
)
def test_hash_key_reads_standard_input(given: str, code: int, printed: str) -> None:
    command = [sys.executable, "-m", "taut_service", "hash-key"]
    result = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (code, printed)
    assert "Traceback" not in result.stderr


def test_hash_key_asks_at_a_terminal_where_nobody_sees_what_is_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def typed(prompt: str, stream: Any) -> str:
        asked.append(prompt)
        assert stream is sys.stderr
        return " k-plain "

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("getpass.getpass", typed)
    assert gateway_main(["hash-key"]) == 0
    assert (asked, capsys.readouterr().out) == (["API key: "], sha256("k-plain") + "\n")


def test_check_reads_the_file_of_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("broken\n")
    worker = '{name: w, url: "http://127.0.0.1:1"}'
    file = tmp_path / "gateway.yaml"
    file.write_text(
        f"models: [{{name: m, max_model_len: 8, workers: [{worker}]}}]\n"
        f"api_keys_file: {tmp_path / 'keys'}\n"
        f"listen: {{port: {free_port()}}}\n"
    )
    for arguments in ([], ["--check"]):
        command = [sys.executable, "-m", "taut_service", "--config", str(file), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 2
        assert result.stderr.splitlines()[-1].endswith("keys:1: expected 'NAME SHA256'")
