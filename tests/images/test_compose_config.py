"""What the compose files say, before anything runs: profiles, overrides, hardening, reach."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from compose_files import (
    BIN,
    DOCKER,
    EVERY,
    PROFILES,
    ROOT,
    configuration,
    everything,
    needs_compose,
    run_compose,
    with_profiles,
)

pytestmark = needs_compose
FILES = [
    ROOT / "compose.yaml",
    DOCKER / "compose.yaml",
    *sorted((DOCKER / "compose").glob("*-*.yaml")),
]
WORKERS = ("worker", "worker-baseline", "worker-gpu", "worker-baseline-gpu")
TOOLBOX = ("prepare", "prepare-rollout", "validate", "promote")
SERVICES = (*WORKERS, *TOOLBOX, "gateway", "prometheus", "grafana")
LONG_LIVED = (*WORKERS, "gateway", "prometheus", "grafana")


def seconds(duration: str) -> int:
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert found is not None, duration
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + rest


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_follow_the_compose_specification(path):
    check = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("profiles", PROFILES, ids=lambda names: "+".join(names) or "default")
def test_profile_has_its_services_with_nothing_set(profiles):
    assert set(with_profiles(*profiles)["services"]) == PROFILES[profiles]


def test_variable_of_the_shell_replaces_the_default_profile():
    assert set(configuration(COMPOSE_PROFILES="gpu")["services"]) == PROFILES["gpu",]


def test_table_of_services_is_complete():
    assert set(everything()) == set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_hardened(name):
    service = everything()[name]
    uid, gid = service["user"].split(":")
    assert int(uid) > 0 and int(gid) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert int(service["mem_limit"]) > 0
    assert service["pids_limit"] > 0
    assert {"max-size", "max-file"} <= service["logging"]["options"].keys()
    (tmp,) = service["tmpfs"]
    assert tmp.startswith("/tmp:") and {"noexec", "nosuid", "size=1g"} <= set(tmp[5:].split(","))


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_from_the_checkout_is_read_only(name):
    for mount in everything()[name].get("volumes", ()):
        if mount["type"] == "bind":
            assert mount["read_only"] is True
            assert mount["source"].startswith(str(DOCKER))


@pytest.mark.parametrize("name", LONG_LIVED)
def test_service_comes_back_and_may_finish_what_it_does(name):
    service = everything()[name]
    assert service["restart"] == "unless-stopped"
    assert seconds(service["stop_grace_period"]) >= 30


def test_stopped_gateway_and_workers_get_longer_than_their_drains():
    services = everything()
    sections = yaml.safe_load((DOCKER / "compose" / "gateway.yaml").read_text())
    assert seconds(services["gateway"]["stop_grace_period"]) > sections["drain_timeout_s"]
    for name in WORKERS:
        # `taut worker` gives requests 30 s unless told otherwise.
        assert "--shutdown-timeout" not in services[name]["command"]
        assert seconds(services[name]["stop_grace_period"]) > 30


def test_gateway_is_stopped_before_its_workers():
    assert set(WORKERS) <= everything()["gateway"]["depends_on"].keys()


@pytest.mark.parametrize("name", (*WORKERS, "gateway"))
def test_healthcheck_is_one_word(name):
    test = everything()[name]["healthcheck"]["test"]
    assert test[0] == "CMD" and len(test) == 2 and " " not in test[1]


def test_ports_are_published_on_loopback_only_and_workers_not_at_all():
    published = {}
    for name, service in everything().items():
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1"
            published[name] = port["published"]
    assert published == {"gateway": "8000", "prometheus": "9090", "grafana": "3000"}


def test_workers_are_on_a_network_without_a_way_out_that_few_share():
    whole = with_profiles(*EVERY)
    assert whole["networks"]["workers"]["internal"] is True
    for name in WORKERS:
        assert set(whole["services"][name]["networks"]) == {"workers"}
    on_it = {
        name
        for name, service in whole["services"].items()
        if "workers" in service.get("networks", ())
    }
    assert on_it - set(WORKERS) == {"gateway", "validate", "prometheus"}


def test_gpu_workers_answer_to_the_names_of_the_others():
    services = everything()
    for name in ("worker", "worker-baseline"):
        gpu = services[f"{name}-gpu"]
        assert gpu["networks"]["workers"]["aliases"] == [name]
        shared = list(gpu["command"])
        assert [each for each in shared if not each.startswith(("--gpu-memory", "--tensor"))] == [
            each for each in services[name]["command"] if each not in ("--kv-cache-gib", "1")
        ]
        (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
        assert device["device_ids"] == ["0"]


def test_prometheus_looks_for_names_that_exist_and_meets_the_gateway_once():
    scraped = yaml.safe_load((DOCKER / "observability/prometheus/prometheus.yml").read_text())
    names = {
        name
        for job in scraped["scrape_configs"]
        for entry in job["dns_sd_configs"]
        for name in entry["names"]
    }
    services = everything()
    assert names == {"gateway", "worker", "worker-baseline"} and names <= services.keys()
    networks = {name: set(services[name]["networks"]) for name in ("gateway", "prometheus")}
    assert networks["gateway"] & networks["prometheus"] == {"workers"}


def test_grafana_finds_data_source_and_dashboards_where_they_are_mounted():
    mounts = {m["target"]: m.get("source") for m in everything()["grafana"]["volumes"]}
    provider = yaml.safe_load(
        (DOCKER / "observability/grafana/provisioning/dashboards/taut.yml").read_text()
    )
    for entry in provider["providers"]:
        assert mounts[entry["options"]["path"]] == str(DOCKER / "observability/grafana/dashboards")
    assert "/etc/grafana/provisioning" in mounts
    source = yaml.safe_load(
        (DOCKER / "observability/grafana/provisioning/datasources/prometheus.yml").read_text()
    )
    assert [entry["url"] for entry in source["datasources"]] == ["http://prometheus:9090"]
    assert "obs" in everything()["prometheus"]["networks"]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="NO promtool HERE: apt-get install prometheus"
)
def test_promtool_accepts_the_folder_that_prometheus_gets():
    (mount,) = (
        mount
        for mount in everything()["prometheus"]["volumes"]
        if mount["target"] == "/etc/prometheus"
    )
    checked = ["promtool", "check", "config", f"{mount['source']}/prometheus.yml"]
    done = subprocess.run(checked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "3 rule files found" in done.stdout


IMAGES = {
    "TAUT_GATEWAY_IMAGE": ("gateway",),
    "TAUT_WORKER_IMAGE": ("worker", "worker-baseline"),
    "TAUT_CUDA_WORKER_IMAGE": ("worker-gpu", "worker-baseline-gpu"),
    "TAUT_TOOLBOX_IMAGE": TOOLBOX,
    "TAUT_PROMETHEUS_IMAGE": ("prometheus",),
    "TAUT_GRAFANA_IMAGE": ("grafana",),
}


def test_every_image_can_be_replaced():
    given = {variable: f"mine/{variable.lower()}:1" for variable in IMAGES}
    services = with_profiles(*EVERY, **given)["services"]
    wanted = {name: given[variable] for variable, names in IMAGES.items() for name in names}
    assert {name: service["image"] for name, service in services.items()} == wanted


def test_our_images_are_built_from_the_dockerfiles_that_are_there():
    for name in (*WORKERS, *TOOLBOX, "gateway"):
        build = everything()[name]["build"]
        assert build["context"] == str(ROOT)
        assert (ROOT / build["dockerfile"]).is_file()


def test_tags_are_the_projects_version():
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    for name in (*WORKERS, *TOOLBOX, "gateway"):
        assert everything()[name]["image"].rsplit(":", 1)[1] == version[1]


SIZES = {
    "TAUT_GATEWAY_MEMORY": ("1g", "gateway", "mem_limit", str(1 << 30)),
    "TAUT_WORKER_MEMORY": ("9g", "worker-baseline", "mem_limit", str(9 << 30)),
    "TAUT_WORKER_PIDS": ("77", "worker", "pids_limit", 77),
    "TAUT_WORKER_CPUS": ("1.5", "worker", "cpus", 1.5),
    "TAUT_WORKER_SHM": ("2g", "worker", "shm_size", str(2 << 30)),
    "TAUT_CUDA_WORKER_MEMORY": ("64g", "worker-gpu", "mem_limit", str(64 << 30)),
    "TAUT_CUDA_WORKER_PIDS": ("99", "worker-gpu", "pids_limit", 99),
    "TAUT_CUDA_WORKER_SHM": ("16g", "worker-gpu", "shm_size", str(16 << 30)),
    "TAUT_PREPARE_MEMORY": ("16g", "prepare", "mem_limit", str(16 << 30)),
    "TAUT_VALIDATE_MEMORY": ("5g", "validate", "mem_limit", str(5 << 30)),
    "TAUT_PROMOTE_MEMORY": ("1g", "promote", "mem_limit", str(1 << 30)),
    "TAUT_PROMETHEUS_MEMORY": ("2g", "prometheus", "mem_limit", str(2 << 30)),
    "TAUT_GRAFANA_MEMORY": ("1g", "grafana", "mem_limit", str(1 << 30)),
}


@pytest.mark.parametrize("variable", SIZES)
def test_size_can_be_replaced(variable):
    value, name, key, expected = SIZES[variable]
    services = with_profiles(*EVERY, **{variable: value})["services"]
    assert services[name][key] == expected


def test_arguments_of_workers_and_validation_can_be_replaced():
    services = with_profiles(
        "cpu",
        "validate",
        TAUT_MAX_MODEL_LEN="2048",
        TAUT_KV_CACHE_GIB="3",
        TAUT_VLLM_ARGS="--enforce-eager --seed 1",
        TAUT_POLICY="aggressive",
        TAUT_VALIDATE_ARGS="--no-latency",
    )["services"]
    for name in ("worker", "worker-baseline"):
        words = shlex.join(services[name]["command"])
        assert "--max-model-len 2048" in words and "--kv-cache-gib 3" in words
        assert words.endswith(" -- --enforce-eager --seed 1")
    assert services["prepare"]["environment"]["TAUT_MAX_MODEL_LEN"] == "2048"
    words = shlex.join(services["validate"]["command"])
    assert "--policy aggressive " in words and words.endswith(" --no-latency")


@pytest.mark.parametrize("variable", ["TAUT_MODEL", "TAUT_RECIPE", "TAUT_MAX_MODEL_LEN"])
def test_another_model_or_recipe_makes_all_that_serve_it_anew(variable):
    def hashes(**variables: str) -> dict[str, str]:
        done = run_compose("--profile", "cpu", "config", "--hash", "*", **variables)
        return dict(line.split() for line in done.stdout.splitlines())

    before, after = hashes(), hashes(**{variable: "7777"})
    assert before.keys() == PROFILES["cpu",]
    assert {name for name in before if before[name] != after[name]} == PROFILES["cpu",]


def test_empty_optional_arguments_leave_no_empty_words():
    for name in (*WORKERS, "validate"):
        assert all(everything()[name]["command"])
        assert "--max-model-len" not in everything()[name]["command"]


def test_api_keys_are_a_secret_of_the_gateway_alone():
    overridden = configuration(
        *("-f", "compose.yaml", "-f", "docker/compose/api-keys.yaml"),
        TAUT_API_KEYS_FILE="/somewhere/keys.yaml",
    )
    holders = {name for name, service in overridden["services"].items() if "secrets" in service}
    assert holders == {"gateway"}
    (secret,) = overridden["services"]["gateway"]["secrets"]
    told = overridden["services"]["prepare"]["environment"]["TAUT_API_KEYS_PATH"]
    assert told == f"/run/secrets/{secret['target']}"
    assert overridden["secrets"]["api-keys"]["file"] == "/somewhere/keys.yaml"


def test_hub_token_is_a_secret_of_the_prepare_job_alone():
    overridden = configuration(
        *("-f", "compose.yaml", "-f", "docker/compose/hub-token.yaml"),
        TAUT_HUB_TOKEN_FILE="/somewhere/token",
    )
    holders = {name for name, service in overridden["services"].items() if "secrets" in service}
    assert holders == {"prepare"}


@pytest.mark.parametrize("name", ["api-keys", "hub-token"])
def test_override_without_its_file_says_which_variable_is_missing(name):
    done = run_compose("-f", "compose.yaml", "-f", f"docker/compose/{name}.yaml", "config")
    assert done.returncode != 0
    assert re.search(r"TAUT_(API_KEYS|HUB_TOKEN)_FILE", done.stderr)


def test_nothing_that_looks_like_a_secret_is_in_the_files():
    text = json.dumps(with_profiles(*EVERY))
    assert not re.search(r"password|passwd|token\W+\w{8}|sk-\w", text, re.IGNORECASE)


def environment(service: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = service.get("environment") or {}
    return found


def test_settings_of_the_package_index_are_taken_over_only_where_they_are_set():
    assert environment(everything()["prepare"]).get("PIP_INDEX_URL") is None
    given = configuration(PIP_INDEX_URL="http://mirror.example/simple")
    environments = {name: environment(service) for name, service in given["services"].items()}
    assert environments["prepare"]["PIP_INDEX_URL"] == "http://mirror.example/simple"
    assert all(
        "PIP_INDEX_URL" not in found for name, found in environments.items() if name != "prepare"
    )


def test_the_gateway_of_a_rollout_waits_for_its_file_and_has_the_journal():
    services = with_profiles("rollout")["services"]
    job = services["prepare-rollout"]
    # After the other job: both write the gateway's file, and the last one is in force.
    assert set(job["depends_on"]) == {"prepare"}
    assert job["environment"] == {**services["prepare"]["environment"], "TAUT_ROLLOUT": "yes"}
    waits = services["gateway"]["depends_on"]["prepare-rollout"]
    assert waits == {"condition": "service_completed_successfully", "required": False}
    assert "TAUT_ROLLOUT" not in services["prepare"]["environment"]
    mounts = {m["target"]: m for m in services["gateway"]["volumes"]}
    journal = mounts["/var/lib/taut/rollout"]
    assert journal["type"] == "volume" and not journal.get("read_only")
    assert "/var/lib/taut/rollout" in (DOCKER / "gateway.Dockerfile").read_text()


def test_promote_reaches_the_admin_port_that_nobody_else_does():
    promote = everything()["promote"]
    assert promote["network_mode"] == "service:gateway"
    assert promote["entrypoint"][-2:] == ["taut", "promote"] and promote["command"] == ["status"]
    assert "ports" not in promote


def test_sections_of_a_rollout_can_be_replaced():
    given = with_profiles("rollout", TAUT_ROLLOUT_CONFIG="/mine/rollout.yaml")["services"]
    for name in ("prepare", "prepare-rollout"):
        (mount,) = [
            m for m in given[name]["volumes"] if m["target"] == "/etc/taut-compose/rollout.yaml"
        ]
        assert mount["source"] == "/mine/rollout.yaml" and mount["read_only"] is True
