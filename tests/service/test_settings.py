"""The configuration file: defaults, and one line a mistake that names the place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taut_service.config.settings import Settings, SettingsError, load_settings

MINIMAL = """
models:
  - name: m
    max_model_len: 64
    workers:
      - {name: w0, url: "http://127.0.0.1:8101"}
"""
FULL = """
listen: {host: 127.0.0.1, port: 8000}
models:
  - name: smollm2-135m-instruct
    max_model_len: 2048
    golden: {prompt: "The capital of France is", expected_text: " Paris"}
    provenance:
      {method: W8A8, bits: 8, size_bytes: 1, recipe_hash: "sha256:0", date: 2026-11-21}
    workers:
      - {name: worker-0, url: "http://127.0.0.1:8101"}
admission: {max_inflight: 64, max_queued: 256, queue_timeout_s: 30}
timeouts: {connect_s: 2, first_byte_s: 300, idle_s: 120, total_s: 1800}
limits: {max_body_bytes: 4194304}
api_keys: []
drain_timeout_s: 30
access_log: true
"""


def load(folder: Path, text: str) -> Settings:
    file = folder / "gateway.yaml"
    file.write_text(text)
    return load_settings(file)


def test_defaults_are_the_written_ones(tmp_path: Path) -> None:
    minimal, full = load(tmp_path, MINIMAL), load(tmp_path, FULL)
    for section in ("listen", "admission", "timeouts", "limits", "api_keys", "drain_timeout_s"):
        assert getattr(minimal, section) == getattr(full, section)
    assert minimal.access_log.enabled is True
    assert full.models[0].provenance["date"] == "2026-11-21"
    assert (full.models[0].workers[0].host, full.models[0].workers[0].port) == ("127.0.0.1", 8101)


def test_workers_alone_are_one_variant(tmp_path: Path) -> None:
    (variant,) = load(tmp_path, FULL).models[0].every_variant()
    assert (variant.name, variant.weight) == ("default", 1)
    assert variant.served_name == "smollm2-135m-instruct"
    assert variant.golden is not None and variant.golden.expected_text == " Paris"
    assert variant.provenance["method"] == "W8A8"


def test_variant_keeps_what_it_says_itself(tmp_path: Path) -> None:
    text = VARIANTS.replace("name: a,", "name: a, served_name: s, provenance: {bits: 4},")
    text = text.replace("64", "64\n    provenance: {bits: 8}")
    first, second = load(tmp_path, text).models[0].every_variant()
    assert (first.served_name, first.provenance) == ("s", {"bits": 4})
    assert (second.served_name, second.provenance) == ("m", {"bits": 8})


def test_settings_survive_being_written_down(tmp_path: Path) -> None:
    text = VARIANTS + "    brown_out: {from: a, to: b}\n"
    settings = load(tmp_path, text)
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings


def test_settings_are_frozen(tmp_path: Path) -> None:
    settings = load(tmp_path, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        settings.access_log = False


VARIANTS = """
models:
  - name: m
    max_model_len: 64
    variants:
      - {name: a, weight: 9, workers: [{name: w0, url: "http://h:1"}]}
      - {name: b, weight: 0, workers: [{name: w1, url: "http://h:2"}]}
"""


def with_line(line: str) -> str:
    return MINIMAL + line + "\n"


ROWS = [
    ("", "expected a mapping with at least the key 'models'"),
    ("[]", "expected a mapping"),
    ("models: []", "models: "),
    ("{}", "models: Field required"),
    ("models: [", "gateway.yaml:1:10: "),
    ("a: 1\na: 2", "gateway.yaml:2:1: the key 'a' is given twice"),
    pytest.param("[" * 50_000, "nested deeper than 64 levels", id="brackets"),
    pytest.param("a: " + "9" * 5_000, "a number of 5000 characters", id="digits"),
    ("a: &a [*a]", "an alias stands inside its own anchor"),
    ("a: !!int b", "not valid YAML"),
    (with_line("speed: 9"), "speed: Extra inputs are not permitted"),
    (with_line("admission: {max_inflght: 9}"), "admission.max_inflght: Extra inputs"),
    (with_line("admission: {max_inflight: 0}"), "admission.max_inflight: "),
    (with_line("admission: {max_inflight: '9'}"), "admission.max_inflight: "),
    (with_line("admission: {queue_timeout_s: .inf}"), "admission.queue_timeout_s: "),
    (with_line("timeouts: {connect_s: -1}"), "timeouts.connect_s: "),
    (with_line("listen: {port: 70000}"), "listen.port: "),
    (with_line("access_log: maybe"), "access_log: "),
    (with_line("drain_timeout_s: -1"), "drain_timeout_s: "),
    (with_line("api_keys: [{name: a, sha256: abc}]"), "api_keys[0].sha256: "),
    (MINIMAL.replace("64", "0"), "models[0].max_model_len: "),
    (MINIMAL.replace("64", "64\n    golden: {prompt: ''}"), "models[0].golden.prompt: "),
    (MINIMAL.replace("64", "64\n    provenance: {a: [1]}"), "models[0].provenance.a."),
    (MINIMAL.replace("name: m", "name: 7"), "models[0].name: "),
    (MINIMAL.replace("name: m", "name: 'a b'"), "models[0].name: "),
    (MINIMAL.replace("http://127.0.0.1:8101", "127.0.0.1:8101"), "models[0].workers[0].url: "),
    (MINIMAL.replace("http:", "https:"), "models[0].workers[0].url: "),
    (MINIMAL.replace(":8101", ":0"), "models[0].workers[0].url: "),
    (MINIMAL.replace(":8101", ":99999"), "models[0].workers[0].url: "),
    (MINIMAL.replace(":8101", ":8101/v1"), "models[0].workers[0].url: "),
    (MINIMAL.replace("//", "//user:pw@"), "models[0].workers[0].url: "),
    (MINIMAL + MINIMAL.replace("models:", ""), "two entries share the model name 'm'"),
    (MINIMAL.replace("64", "64\n    aliases: [m]"), "two entries share the model name 'm'"),
    (MINIMAL.replace("64", "64\n    sticky: ip"), "models[0].sticky: "),
    (
        VARIANTS
        + "    brown_out: {from: a, to: b, at_queue_fraction: 0.3, until_queue_fraction: 0.3}\n",
        "until_queue_fraction must be smaller than at_queue_fraction",
    ),
    (MINIMAL.replace("64", "64\n    affinity: {by: moon}"), "models[0].affinity.by: "),
    (MINIMAL.replace("64", "64\n    affinity: {max_load_ratio: 0.5}"), "models[0].affinity.max_l"),
    (VARIANTS.replace("weight: 9", "weight: 0"), "models[0]: the weights of 'variants' are all 0"),
    (VARIANTS.replace("weight: 9", "weight: -1"), "models[0].variants[0].weight: "),
    (VARIANTS.replace("name: b", "name: a"), "models[0]: two entries share the variant name 'a'"),
    (VARIANTS.replace("name: b", "name: 'a b'"), "models[0].variants[1].name: "),
    (VARIANTS.replace("w1", "w0"), "two entries share the worker name 'w0'"),
    (
        VARIANTS + '    workers: [{name: x, url: "http://h:1"}]\n',
        "models[0]: give either 'workers' or 'variants', with at least one entry",
    ),
    (
        VARIANTS.replace('workers: [{name: w1, url: "http://h:2"}]', "price: {}"),
        "models[0].variants[1]: give either 'workers' or 'discover'",
    ),
    (
        VARIANTS + "    brown_out: {from: a, to: c}\n",
        "models[0]: brown_out names the variant 'c', which is not listed",
    ),
    (VARIANTS + "    brown_out: {from: a, to: a}\n", "models[0]: brown_out goes from a variant to"),
    (with_line("routing: {retries: {max_tries: 0}}"), "routing.retries.max_tries: "),
    (with_line("routing: {breaker: {failure_ratio: 2}}"), "routing.breaker.failure_ratio: "),
    (with_line("routing: {hedge: {after_s: 0}}"), "routing.hedge.after_s: "),
    (with_line("routing: {session_header: 'X Y'}"), "routing.session_header: "),
    (with_line("timeouts: {gap_s: 0}"), "timeouts.gap_s: "),
    (
        MINIMAL + MINIMAL.replace("models:", "").replace("name: m", "name: n"),
        "two entries share the worker name 'w0'",
    ),
]


@pytest.mark.parametrize(("text", "message"), ROWS)
def test_mistake_is_one_line_naming_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, text)
    lines = str(refused.value).splitlines()
    assert any(message in line for line in lines), lines
    assert all(line.startswith(str(tmp_path / "gateway.yaml")) for line in lines)


def test_a_file_of_no_sensible_size_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    with file.open("wb") as stream:
        stream.truncate(2**24 + 1)
    with pytest.raises(SettingsError, match=f"^{file}: larger than 16777216 bytes$"):
        load_settings(file)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_unreadable_file_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "gateway.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        load_settings(file)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "arguments", "code"),
    [
        (FULL, ["--check"], 0),
        (with_line("speed: 9\nspeeds: 9"), ["--check"], 2),
        (with_line("speed: 9"), [], 2),
        (FULL, ["--port", "x"], 2),
    ],
)
def test_command_never_shows_a_traceback(
    tmp_path: Path, text: str, arguments: list[str], code: int
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    command = [sys.executable, "-m", "taut_service", "--config", str(file), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    if code == 0:
        assert result.stdout == f"{file}: ok, 1 model(s), 1 worker(s)\n"
    elif "--port" not in arguments:
        assert all("gateway.yaml: speed" in line for line in result.stderr.splitlines())
