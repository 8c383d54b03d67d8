"""The verdict in a checkpoint's manifest: written, signed, and required by a worker."""

from __future__ import annotations

import base64
import json
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from validate_setup import perturb, write_model, write_text

from taut_deploy import cli
from taut_deploy.attestation import PAYLOAD_TYPE
from taut_deploy.checkpoint import MANIFEST, Golden, Manifest, read_manifest, seal
from taut_deploy.errors import WorkerError
from taut_deploy.verdict_record import require_verdict
from taut_deploy.worker import WorkerSpec, launch

pytest.importorskip("securesystemslib", reason="securesystemslib (taut[sign]) is not installed")
LOOSE = "name: loose\nrequire: {perplexity_ratio: {max: 50}}\n"


def write_keys(folder, name, private):
    secret = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / f"{name}.key").write_bytes(secret)
    (folder / f"{name}.pub").write_bytes(public)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("signed")
    write_model(path / "baseline")
    write_text(path / "text.txt", 400)
    (path / "loose.yaml").write_text(LOOSE)
    (path / "strict.yaml").write_text(LOOSE.replace("max: 50", "max: 0.5"))
    write_keys(path, "ours", ed25519.Ed25519PrivateKey.generate())
    write_keys(path, "theirs", ed25519.Ed25519PrivateKey.generate())
    write_keys(path, "curve", ec.generate_private_key(ec.SECP256R1()))
    write_keys(path, "rsa", rsa.generate_private_key(65537, 2048))
    return path


@pytest.fixture
def checkpoint(folder, tmp_path):
    sealed = perturb(folder / "baseline", tmp_path / "sealed", lambda _, tensor: tensor)
    golden = Golden("a", "b", 1, 1.0)
    seal(sealed, Manifest("m", "W8A8", 8, {}, "sha256:r", {}, {}, [], golden, 128, {}))
    return sealed


@pytest.fixture
def taut(folder, tmp_path, monkeypatch, capfd):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["taut", *map(str, arguments)])
        code = cli.main()
        return code, capfd.readouterr().err

    def validate(checkpoint, *more, policy="loose.yaml"):
        arguments = ["validate", "--baseline", folder / "baseline", "--candidate", checkpoint]
        arguments += ["--policy", folder / policy, "--text", folder / "text.txt", "--no-served"]
        arguments += ["--output", tmp_path / "report", "--sequences", 4, "--sequence-length", 24]
        return call(*arguments, "--noise-sequences", 0, "--json", *more)

    call.validate = validate
    return call


def asked(checkpoint, trust=None):
    return require_verdict(checkpoint, read_manifest(checkpoint), "PASS", trust)


@pytest.mark.parametrize("key", ["ours", "curve", "rsa"])
def test_a_signed_verdict_is_believed_by_its_key_alone(folder, checkpoint, taut, key):
    assert taut.validate(checkpoint, "--sign", folder / f"{key}.key")[0] == 0
    said = asked(checkpoint, folder / f"{key}.pub")
    assert said.startswith("verdict PASS under policy ")
    assert asked(checkpoint) is not None
    with pytest.raises(WorkerError, match=r"not signed by --trust .*theirs.pub") as caught:
        asked(checkpoint, folder / "theirs.pub")
    assert "\n" not in str(caught.value)


def test_the_envelope_is_an_in_toto_statement(folder, checkpoint, taut):
    taut.validate(checkpoint, "--sign", folder / "ours.key")
    manifest = read_manifest(checkpoint)
    envelope = manifest.validation["envelope"]
    assert envelope["payloadType"] == PAYLOAD_TYPE == "application/vnd.in-toto+json"
    payload = base64.b64decode(envelope["payload"])
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [
        {"name": "m", "digest": {"sha256": manifest.digest.removeprefix("sha256:")}}
    ]
    assert statement["predicate"]["verdict"] == "PASS"
    # The signature is over DSSE's own encoding, checked here with the key alone.
    signed = b"DSSEv1 %d %b %d %b" % (
        len(PAYLOAD_TYPE),
        PAYLOAD_TYPE.encode(),
        len(payload),
        payload,
    )
    public = serialization.load_pem_public_key((folder / "ours.pub").read_bytes())
    public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)


def rewritten(checkpoint, change):
    data = json.loads((checkpoint / MANIFEST).read_text())
    change(data)
    (checkpoint / MANIFEST).write_text(json.dumps(data))


def test_a_verdict_does_not_speak_for_other_files(folder, checkpoint, taut, tmp_path):
    taut.validate(checkpoint, "--sign", folder / "ours.key")
    validation = read_manifest(checkpoint).validation
    other = perturb(folder / "baseline", tmp_path / "other", lambda _, tensor: tensor * 1.5)
    golden = Golden("a", "b", 1, 1.0)
    seal(
        other, Manifest("m", "W8A8", 8, {}, "", {}, {}, [], golden, 128, {}, validation=validation)
    )
    with pytest.raises(WorkerError, match="is about other files"):
        asked(other, folder / "ours.pub")
    with pytest.raises(WorkerError, match="its verdict is not about these files"):
        asked(other)


def test_a_changed_payload_is_refused(folder, checkpoint, taut):
    assert taut.validate(checkpoint, "--sign", folder / "ours.key", policy="strict.yaml")[0] == 1
    with pytest.raises(WorkerError, match="its verdict is FAIL"):
        asked(checkpoint, folder / "ours.pub")

    def forge(data):
        envelope = data["validation"]["envelope"]
        payload = base64.b64decode(envelope["payload"]).replace(b'"FAIL"', b'"PASS"')
        envelope["payload"] = base64.b64encode(payload).decode()
        data["validation"]["verdict"] = "PASS"

    rewritten(checkpoint, forge)
    with pytest.raises(WorkerError, match="changed after it was signed"):
        asked(checkpoint, folder / "ours.pub")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda v: v.pop("envelope"), "its verdict is not signed; run taut validate --sign"),
        (lambda v: v.update(envelope={"payload": "e30="}), "envelope is damaged"),
        (lambda v: v["envelope"].update(signatures=[]), "not signed by --trust"),
        (
            lambda v: v["envelope"].update(signatures=[{"keyid": "a", "sig": "!"}]),
            "damaged|not signed",
        ),
        (lambda v: v["envelope"].update(payload=7), "envelope is damaged"),
    ],
)
def test_a_damaged_envelope_is_one_line(folder, checkpoint, taut, change, problem):
    taut.validate(checkpoint, "--sign", folder / "ours.key")
    rewritten(checkpoint, lambda data: change(data["validation"]))
    with pytest.raises(WorkerError, match=problem) as caught:
        asked(checkpoint, folder / "ours.pub")
    assert "\n" not in str(caught.value)


def test_a_worker_starts_nothing_without_its_verdict(folder, checkpoint, taut, monkeypatch):
    monkeypatch.setattr(launch, "installed_platform", lambda: "cpu")
    required = ("--require-verdict", "PASS")
    code, error = taut("worker", checkpoint, *required)
    assert (code, "it has no verdict; run taut validate on it first" in error) == (2, True)
    code, error = taut("worker", folder / "baseline", *required)
    assert (code, "it has no verdict" in error) == (2, True)
    code, error = taut("worker", checkpoint, "--require-verdict", "FAIL")
    assert (code, "--require-verdict FAIL: use PASS" in error) == (2, True)
    code, error = taut("worker", checkpoint, "--trust", folder / "ours.pub")
    assert (code, "goes with --require-verdict PASS" in error) == (2, True)
    taut.validate(checkpoint)
    code, error = taut("worker", checkpoint, *required, "--trust", folder / "ours.pub")
    assert (code, "not signed; run taut validate --sign" in error) == (2, True)
    taut.validate(checkpoint, "--sign", folder / "ours.key")
    code, error = taut("worker", checkpoint, *required, "--trust", folder / "ours.key")
    assert (code, "not a public key in PEM" in error) == (2, True)


class StartedError(Exception):
    """The worker went on to its kernels."""


def test_a_worker_goes_on_with_a_signed_verdict(folder, checkpoint, taut, monkeypatch, capfd):
    taut.validate(checkpoint, "--sign", folder / "ours.key")

    def started(*_):
        raise StartedError

    monkeypatch.setattr(launch, "installed_platform", lambda: "cpu")
    monkeypatch.setattr(launch, "check_kernels", started)
    spec = WorkerSpec(checkpoint, require_verdict="PASS", trust=folder / "ours.pub")
    with pytest.raises(StartedError):
        launch.exec_worker(spec)
    assert "taut: verdict PASS under policy" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("gone.key", "--sign .*gone.key: No such file"),
        ("ours.pub", "--sign .*ours.pub: not a private key in PEM"),
        ("text.txt", "--sign .*text.txt: not a private key in PEM"),
    ],
)
def test_a_wrong_key_is_said_before_anything_is_measured(
    folder, checkpoint, taut, tmp_path, key, problem
):
    import re

    code, error = taut.validate(checkpoint, "--sign", folder / key)
    assert code == 3
    assert re.search(problem, error)
    assert not (tmp_path / "report").exists()


def test_what_is_no_checkpoint_is_not_signed(folder, taut, tmp_path):
    code, error = taut.validate(folder / "baseline", "--sign", folder / "ours.key")
    assert (code, "is no checkpoint of taut's" in error) == (3, True)


def test_a_missing_library_is_one_line(folder, checkpoint, taut, monkeypatch):
    from taut_deploy import attestation

    monkeypatch.setattr(attestation.importlib.util, "find_spec", lambda _: None)
    code, error = taut.validate(checkpoint, "--sign", folder / "ours.key")
    assert (code, "pip install 'taut[sign]'" in error) == (3, True)


def test_a_manifest_that_changes_on_the_way_gets_no_verdict(folder, checkpoint, taut, monkeypatch):
    from taut_deploy.commands import validate as command

    run = command.run_validation

    def changing(job, say):
        result = run(job, say)
        rewritten(checkpoint, lambda data: data.update(name="another"))
        return result

    monkeypatch.setattr(command, "run_validation", changing)
    code, error = taut.validate(checkpoint, "--sign", folder / "ours.key")
    assert (code, "its manifest changed during the validation" in error) == (3, True)
    assert read_manifest(checkpoint).validation is None


def test_a_second_validation_replaces_the_first(folder, checkpoint, taut):
    taut.validate(checkpoint, "--sign", folder / "ours.key")
    assert taut.validate(checkpoint, policy="strict.yaml")[0] == 1
    with pytest.raises(WorkerError, match="its verdict is FAIL"):
        asked(checkpoint)
