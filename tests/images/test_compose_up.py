"""The whole ``cpu`` profile up: prepare job, two real vLLM workers, gateway; and down again.

The tests share one project and go through its life in the order of this file. Compilation is off
(``--enforce-eager``), which saves minutes a start; images are built by ``container_engine``. Served
are SmolLM2's first blocks, from a directory: ``test_toolbox_image.py`` fetches the model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from built_images import image, model_packages, quick_recipe, shallow_model
from compose_files import needs_compose
from compose_project import Project, project
from compose_rollout import (
    SECTIONS,
    ask_until_ended,
    harm_candidate,
    promote,
    sections_file,
    worker_states,
)
from compose_rollout import status as rollout_status
from container_engine import EngineError, engine, wait_for

from taut_deploy.ports import free_port

pytestmark = [
    needs_compose,
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
]
MODEL = "smollm2-135m-instruct"
BASELINE = f"{MODEL}-baseline"
GIVEN = f"/given/{MODEL}"
"""Where the containers find it."""
CONTEXT = 2048
PROMPT = "One, two, three, four, five, six, seven,"
"""One of those that ``taut compress`` takes its known answer from."""
ASK = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
START_TIMEOUT_S = 1500
PROMETHEUS = shutil.which("prometheus")
QUICK = (
    "--noise-sequences 1 --bootstrap 500 --latency-requests 29 --latency-concurrency 4 "
    "--latency-prompt-tokens 16 --latency-output-tokens 2"
)
"""The least of which an interval is computed: the verdict is about the command, not the model."""
# Compose compares ids of networks, where podman 4.3 gives names: without --no-recreate or --no-deps
# it would make running containers anew.
AS_IT_IS = "--no-recreate"
# Nor --rm, with which podman's API loses the exit code; `down --remove-orphans` does it.
VALIDATE = ("run", "--no-TTY", "--no-deps", "validate")
VERDICTS = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project after ``docker compose up -d``, its gateway ready."""
    host = engine()
    variables = {
        "TAUT_GATEWAY_IMAGE": image("gateway"),
        "TAUT_WORKER_IMAGE": image("worker-cpu"),
        "TAUT_TOOLBOX_IMAGE": image("toolbox"),
        # Prometheus is Debian's, run by the compose service of that name.
        "TAUT_PROMETHEUS_IMAGE": image("gateway"),
        "TAUT_PROMETHEUS_PORT": str(free_port()),
        "TAUT_MAX_MODEL_LEN": str(CONTEXT),
        "TAUT_MODEL": GIVEN,
        "TAUT_VLLM_ARGS": "--enforce-eager",
    }
    folder = tmp_path_factory.mktemp("compose")
    # Calibrated on little text: that it answers is asked of the model, not how well.
    variables["TAUT_RECIPE"] = "/recipe.yaml"
    given = f"{shallow_model()}:{GIVEN}:ro"
    # No index is asked: the packages of texts lie in a folder.
    packages = {
        "environment": {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/packages"},
        "volumes": [
            *(given, f"{model_packages()}:/packages:ro"),
            f"{quick_recipe(folder)}:/recipe.yaml:ro",
        ],
    }
    binary = {"entrypoint": [PROMETHEUS], "volumes": [f"{PROMETHEUS}:{PROMETHEUS}:ro"]}
    jobs = {
        "prepare": packages,
        "prepare-rollout": {"volumes": packages["volumes"]},
        "worker-baseline": {"volumes": [given]},
    }
    override = {"services": {**jobs, **({"prometheus": binary} if PROMETHEUS else {})}}
    with project(host, folder, free_port(), override, variables) as mine:
        started = time.monotonic()
        done = mine.compose("up", "--detach", timeout_s=START_TIMEOUT_S)
        assert done.returncode == 0, done.stdout[-2000:] + mine.logs()
        prepared = time.monotonic() - started
        for model in (MODEL, BASELINE):
            body = {**ASK, "model": model, "max_tokens": 1}
            wait_for(lambda: mine.post(body)[0] == 200, START_TIMEOUT_S, mine.logs)  # noqa: B023
        assert mine.readiness() == 200
        print(f"prepared in {prepared:.0f} s, serving after {time.monotonic() - started:.0f} s")
        yield mine


def checkpoint(running: Project) -> list[Any]:
    """Where the compressed checkpoint lies and when it was finished, as a worker sees it."""
    code = """
import json, os
path = "/models/serving/compressed/taut.json"
print(json.dumps([os.path.realpath(path), os.stat(path).st_mtime_ns]))
"""
    found: list[Any] = json.loads(running.python("worker", code))
    return found


@pytest.fixture(scope="module")
def known(running: Project) -> str:
    """What the compressed model answers to PROMPT, as its manifest says."""
    code = "print(open('/models/serving/compressed/taut.json').read())"
    golden = json.loads(running.python("worker", code))["golden"]
    assert golden["prompt"] == PROMPT
    answer: str = golden["expected_text"]
    return answer


def test_prepare_job_ended_and_the_rest_runs(running):
    assert running.state("prepare")["Status"] == "exited"
    assert running.state("prepare")["ExitCode"] == 0
    up = {name for name in running.containers() if running.state(name)["Running"]}
    assert up == {"worker", "worker-baseline", "gateway"}


def test_completion_equals_the_known_answer(running, known):
    status, answer = running.post(ASK)
    assert status == 200, answer
    assert answer["choices"][0]["text"].startswith(known)
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("model", [MODEL, BASELINE])
def test_streamed_completion_equals_the_whole_one(running, known, model):
    _, whole = running.post({**ASK, "model": model})
    with running.stream({**ASK, "model": model}) as events:
        streamed = "".join(event["choices"][0]["text"] for event in events)
    assert streamed == whole["choices"][0]["text"]
    assert streamed.startswith(known)


def test_models_tell_where_they_come_from(running):
    status, body = running.get("/v1/models")
    assert status == 200
    models = {entry["id"]: entry["taut"] for entry in json.loads(body)["data"]}
    assert set(models) == {MODEL, BASELINE}
    assert (models[MODEL]["method"], models[MODEL]["bits"]) == ("W8A8", 8)
    assert models[MODEL]["base_model"] == MODEL
    assert models[MODEL]["recipe_hash"].startswith("sha256:")
    assert models[BASELINE] == {"method": "none", "bits": 16}


@pytest.mark.parametrize("service", ["gateway", "worker", "worker-baseline"])
def test_health_check_says_yes(running, service):
    done = running.engine.podman("healthcheck", "run", running.containers()[service], check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("service", ["gateway", "worker"])
def test_container_has_no_rights(running, service):
    code = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found = {name: status[name].strip() for name in ("CapEff", "CapBnd", "NoNewPrivs")}
found["uid"] = os.getuid()
for folder in ("/", "/etc", "/opt"):
    try:
        open(folder + "/x", "w")
        found["root"] = "writable at " + folder
    except OSError as error:
        found.setdefault("root", error.strerror)
print(json.dumps(found))
"""
    found = json.loads(running.python(service, code))
    assert int(found["CapEff"], 16) == int(found["CapBnd"], 16) == 0
    assert (found["NoNewPrivs"], found["uid"]) == ("1", 10001)
    assert found["root"] == "Read-only file system"
    assert running.inspect(service)["HostConfig"]["Memory"] > 0


def test_workers_are_reached_by_the_gateway_only_and_reach_nobody_outside(running):
    code = "print(*(line.split()[1] for line in open('/proc/net/route')))"
    default = "00000000"
    assert default not in running.python("worker", code).split()
    assert default in running.python("gateway", code).split()
    ask = "import socket; socket.create_connection(('{}', 8000), 5); print('reached')"
    assert running.python("gateway", ask.format("worker")) == "reached\n"
    address = running.inspect("worker")["NetworkSettings"]["Networks"][f"{running.name}_workers"]
    stranger = running.engine.podman(
        *("run", "--rm", "--network", f"{running.name}_front", "--entrypoint", "python3"),
        *(image("gateway"), "-c", ask.format(address["IPAddress"])),
        check=False,
    )
    assert "reached" not in stranger.stdout
    assert stranger.returncode != 0


@pytest.mark.skipif(
    PROMETHEUS is None, reason="NO prometheus HERE: the obs profile is NOT run; apt-get install it"
)
def test_prometheus_of_the_obs_profile_scrapes_gateway_and_workers_once(running):
    done = running.compose("--profile", "obs", "up", "--detach", "--no-deps", "prometheus")
    assert done.returncode == 0, done.stdout

    def query(path: str) -> Any:
        url = f"http://127.0.0.1:9090{path}"
        ask = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=10).read().decode())"
        try:
            return json.loads(running.python("prometheus", ask))["data"]
        except EngineError:
            return None

    def scraped() -> bool:
        found = query("/api/v1/query?query=up")
        return found is not None and sorted(
            (entry["metric"]["job"], entry["value"][1]) for entry in found["result"]
        ) == [("taut-gateway", "1"), ("taut-worker", "1"), ("taut-worker", "1")]

    wait_for(scraped, 120, running.logs)
    rules = [rule for group in query("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 25
    assert [rule["name"] for rule in rules if rule.get("lastError")] == []
    assert running.compose("--profile", "obs", "rm", "-sf", "prometheus").returncode == 0


def test_validate_prints_its_verdict_and_ends_with_its_code(running):
    done = running.compose(
        *VALIDATE,
        timeout_s=START_TIMEOUT_S,
        TAUT_VALIDATE_SEQUENCES="4",
        TAUT_VALIDATE_SEQUENCE_LENGTH="128",
        TAUT_VALIDATE_ARGS=QUICK,
    )
    found = re.search(r"^# Validation: (\w+)", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout[-3000:]
    verdict = found[1]
    assert done.returncode == VERDICTS[verdict], done.stdout[-3000:]
    print(f"verdict on 4 x 128 tokens: {verdict}")


@pytest.mark.parametrize("service", ["worker", "worker-baseline"])
def test_eager_workers_gave_log_probabilities_without_a_compiler(running, service):
    code = "import glob; print(*glob.glob('/cache/**/*.cpp', recursive=True))"
    assert running.python(service, code).split() == []


def test_validate_that_cannot_run_ends_with_3(running):
    done = running.compose(*VALIDATE, TAUT_POLICY="no-such-policy")
    assert done.returncode == 3, done.stdout[-3000:]
    assert "no-such-policy" in done.stdout
    assert "Traceback" not in done.stdout


def test_second_up_finds_everything_done(running):
    before, containers = checkpoint(running), running.containers()
    done = running.compose("up", "--detach", AS_IT_IS, timeout_s=START_TIMEOUT_S)
    assert done.returncode == 0, done.stdout
    wait_for(lambda: not running.state("prepare")["Running"], 60, running.logs)
    assert checkpoint(running) == before
    assert running.containers() == containers
    said = running.compose("logs", "--no-color", "prepare").stdout
    assert said.count("compressing into") == 1
    assert said.count("reusing") == 1
    assert running.post(ASK)[0] == 200


def test_killed_worker_is_answered_for_honestly_and_comes_back(running, known):
    pid = running.state("worker")["Pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: running.post(ASK)[0] == 503, 60, running.logs)
    assert running.post({**ASK, "model": BASELINE})[0] == 200
    wait_for(lambda: running.post(ASK)[0] == 200, START_TIMEOUT_S, running.logs)
    assert running.state("worker")["Pid"] != pid
    assert running.post(ASK)[1]["choices"][0]["text"].startswith(known)


@pytest.mark.long  # tests/e2e has the same by processes
def test_rollout_profile_moves_all_traffic_to_the_candidate(running, tmp_path):
    """As docker/README.md says it, by real containers; workers go on as they are."""
    before = {name: running.state(name)["Pid"] for name in ("worker", "worker-baseline")}
    settings = str(sections_file(tmp_path))
    for command in (
        ("run", "--no-TTY", "--no-deps", "prepare-rollout"),
        ("up", "--detach", "--no-deps", "--force-recreate", "gateway"),
    ):
        done = running.compose("--profile", "rollout", *command, TAUT_ROLLOUT_CONFIG=settings)
        assert done.returncode == 0, done.stdout[-2000:]
    wait_for(lambda: running.readiness() == 200, 120, running.logs)
    assert rollout_status(running, MODEL)["weights"] == {"baseline": 1, "w8a8": 0}
    promote(running, "start", MODEL, "w8a8")
    ended, asked = ask_until_ended(running, MODEL, 600)
    assert (ended["phase"], ended["percent"]) == ("complete", 100), ended
    assert ended["weights"] == {"baseline": 0, "w8a8": 1}
    assert asked >= 3 * SECTIONS["rollout"]["min_answers"]
    told = promote(running, "history")
    assert [share for share in ("0 %", "50 %", "100 %") if share in told] == [
        "0 %",
        "50 %",
        "100 %",
    ]
    assert {name: running.state(name)["Pid"] for name in before} == before


@pytest.mark.long
def test_a_harmed_candidate_is_rolled_back_and_clients_notice_nothing(running, known):
    """The same containers; the candidate's worker alone starts anew, from wrong scales."""
    assert rollout_status(running, MODEL)["phase"] == "complete", "the test above has run"
    promote(running, "rollback", MODEL)
    assert harm_candidate(running) >= 7
    wait_for(lambda: running.readiness() == 200, 120, running.logs)
    wait_for(lambda: worker_states(running)["w8a8"] == "ready", START_TIMEOUT_S, running.logs)
    promote(running, "start", MODEL, "w8a8", "--force")
    ended, asked = ask_until_ended(running, MODEL, 300)
    assert (ended["phase"], ended["percent"]) == ("rolled_back", 0), ended
    assert ended["weights"] == {"baseline": 1, "w8a8": 0}
    assert ended["evidence"][0]["verdict"] == "FAIL", ended
    told = promote(running, "history")
    assert "harm: " in told and "is allowed" in told, told
    assert asked <= 60
    assert running.post(ASK)[1]["choices"][0]["text"].startswith(known)


def tokens_that_take(running: Project, seconds: float) -> int:
    """How many a stream of some seconds has: CPUs differ by ten."""
    tokens, started = 24, time.monotonic()
    status, answer = running.post({**ASK, "max_tokens": tokens, "ignore_eos": True})
    assert status == 200, answer
    most = CONTEXT - 64  # room for the prompt
    return max(tokens, min(most, round(seconds * tokens / (time.monotonic() - started))))


def test_stop_lets_a_running_stream_finish(running):
    tokens = tokens_that_take(
        running, 12
    )  # longer than a stop takes to arrive, shorter than drains
    body = {
        **ASK,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    with running.stream(body) as events:
        next(events)
        stopping = running.start("stop")
        wait_for(lambda: running.readiness() != 200, 60, running.logs)
        seen = list(events)
    assert seen[-1]["usage"]["completion_tokens"] == tokens
    assert not any("error" in event for event in seen)
    output, _ = stopping.communicate(timeout=120)
    assert stopping.returncode == 0, output
    assert running.state("gateway")["ExitCode"] == 0
    for worker in ("worker", "worker-baseline"):
        assert running.state(worker)["Status"] == "exited"
        assert running.state(worker)["ExitCode"] != 137


def test_down_leaves_nothing(running):
    removed = ("down", "--volumes", "--remove-orphans")
    done = running.compose("--profile", "*", *removed, timeout_s=120)
    assert done.returncode == 0, done.stdout
    assert running.leftovers() == {}
