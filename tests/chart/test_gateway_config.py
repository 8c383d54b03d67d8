"""The file in the gateway's ConfigMap is accepted by the real gateway and says what it should."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from chart_rendering import (
    CI_SETS,
    changed,
    gateway_config,
    needs_helm,
    of_kind,
    render,
    render_set,
    set_values,
    the,
)
from generate import CHART

from taut_service.config.settings import Settings, load_settings

pytestmark = needs_helm
CPU = set_values("cpu-minimal")


def loaded(rendered: list[dict[str, object]], folder: Path) -> Settings:
    path = folder / "gateway.yaml"
    path.write_text(the(rendered, "ConfigMap", "-gateway")["data"]["gateway.yaml"])
    return load_settings(path)


@pytest.mark.parametrize("name", CI_SETS)
def test_every_set_is_accepted(name: str, tmp_path: Path):
    settings = loaded(render_set(name), tmp_path)
    values = set_values(name)
    (model,) = settings.models
    assert model.name == values["model"]["name"]
    assert model.max_model_len == values["model"]["maxModelLen"]
    assert [(v.name, v.weight) for v in model.variants] == [
        (variant["name"], variant.get("weight", 1)) for variant in values["variants"]
    ]
    assert settings.admin is not None and settings.admin.is_loopback


@pytest.mark.parametrize("name", CI_SETS)
def test_workers_are_looked_for_where_their_services_are(name: str, tmp_path: Path):
    rendered = render_set(name)
    services = {doc["metadata"]["name"]: doc for doc in of_kind(rendered, "Service")}
    for variant in loaded(rendered, tmp_path).models[0].variants:
        assert variant.discover is not None
        if dns := variant.discover.dns:
            service, namespace, rest = dns.host.split(".", 2)
            assert (namespace, rest, dns.port) == ("ns", "svc.cluster.local.", 8000)
            assert services[service]["spec"]["ports"][0]["port"] == dns.port
        else:
            kubernetes = variant.discover.kubernetes
            assert kubernetes is not None and kubernetes.namespace == "ns"
            service = kubernetes.service
            assert services[service]["spec"]["ports"][0]["name"] == kubernetes.port
        assert services[service]["spec"]["clusterIP"] == "None"
        assert services[service]["spec"]["selector"]["taut/variant"] == variant.name


def test_sections_are_passed_on(tmp_path: Path):
    settings = loaded(render_set("one-gpu"), tmp_path)
    assert settings.limits.max_body_bytes == 8_388_608
    assert settings.admission.max_inflight_tokens == 1_000_000
    assert settings.tracing is not None and settings.tracing.ratio == 0.1
    assert settings.models[0].affinity.by == "prefix"
    assert settings.models[0].variants[0].price.completion_per_million == 0.4


def test_secrets_are_files_that_the_pod_mounts(tmp_path: Path):
    rendered = render_set("one-gpu")
    settings = loaded(rendered, tmp_path)
    assert settings.rate_limits.redis is not None and settings.listen.tls is not None
    files = [
        settings.api_keys_file,
        settings.rate_limits.redis.password_file,
        settings.listen.tls.certificate,
        settings.listen.tls.key,
    ]
    container, _ = the(rendered, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for path in files:
        assert path is not None and str(path.parent) in mounts
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env["TAUT_GATEWAY_TLS"] == "1"
    assert str(Path(env["TAUT_ADMIN_KEY_FILE"]).parent) in mounts


def test_weight_0_stays_0():
    weights = {
        v["name"]: v["weight"]
        for v in gateway_config(render_set("canary"))["models"][0]["variants"]
    }
    assert weights == {"baseline": 95, "w8a8": 5, "w4a16": 0}


def test_what_a_gateway_reads_once_rolls_the_gateway_and_no_worker():
    before = render(CPU)
    after = render(changed(CPU, "gateway.config", {"access_log": {"ratio": 0.5}}))
    template = [the(docs, "Deployment", "-gateway")["spec"]["template"] for docs in (before, after)]
    assert template[0] != template[1]
    workers = [the(docs, "Deployment", "-worker-w8a8") for docs in (before, after)]
    assert workers[0] == workers[1]


def test_chart_and_gateway_agree_on_what_is_read_once():
    from taut_service.config.reload import _FIXED

    text = (CHART / "templates" / "_gateway_config.tpl").read_text()
    (picked,) = re.findall(r'pick \(include "taut.gateway.config" . \| fromYaml\) (.*?) \|', text)
    assert tuple(json.loads(f"[{picked.replace(' ', ',')}]")) == _FIXED


def test_drain_fits_into_the_grace_period():
    rendered = render(changed(CPU, "gateway.drain", {"acceptSeconds": 20, "timeoutSeconds": 90}))
    spec = the(rendered, "Deployment", "-gateway")["spec"]["template"]["spec"]
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["taut-healthcheck", "drain", "--accept", "20", "--timeout", "90"]
    drain_timeout_s = gateway_config(rendered)["drain_timeout_s"]
    assert drain_timeout_s == 90
    assert spec["terminationGracePeriodSeconds"] > 20 + 90 + drain_timeout_s


def test_ports_of_the_file_the_pod_and_the_service_agree():
    rendered = render(CPU)
    config = gateway_config(rendered)
    container, _ = the(rendered, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env["TAUT_ADMIN_PORT"] == str(config["admin"]["port"])
    assert env["TAUT_GATEWAY_PORT"] == str(config["listen"]["port"])
    assert container["ports"] == [{"name": "http", "containerPort": config["listen"]["port"]}]
    (port,) = the(rendered, "Service", "-gateway")["spec"]["ports"]
    assert port["targetPort"] == "http"


def test_the_real_healthcheck_takes_the_hook():
    from taut_service.healthcheck import main

    spec = the(render(CPU), "Deployment", "-gateway")["spec"]["template"]["spec"]
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    with pytest.raises(SystemExit) as wrong:
        main([*hook[1:], "--unknown"])
    assert wrong.value.code == 2
    with pytest.raises(SystemExit) as fine:
        main([*hook[1:], "--help"])
    assert fine.value.code == 0


def test_passed_on_numbers_keep_their_type():
    text = the(render_set("one-gpu"), "ConfigMap", "-gateway")["data"]["gateway.yaml"]
    assert "e+0" not in text
    assert yaml.safe_load(text)["limits"]["max_body_bytes"] == 8_388_608
