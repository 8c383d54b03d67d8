"""``taut shrink --sign``: a worker that trusts the key believes what passed."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from taut_deploy.checkpoint import read_manifest
from taut_deploy.errors import WorkerError
from taut_deploy.verdict_record import require_verdict

pytest.importorskip("securesystemslib", reason="securesystemslib (taut[sign]) is not installed")


def write_keys(folder, name):
    private = ed25519.Ed25519PrivateKey.generate()
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / f"{name}.key").write_bytes(private.private_bytes(pem, pkcs8, plain))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    (folder / f"{name}.pub").write_bytes(private.public_key().public_bytes(pem, public))


def test_what_passed_is_signed_and_stays_so(room, run):
    for name in ("ours", "theirs"):
        write_keys(room.path, name)
    code, _, err = run(*room.command("loose", "signed", "--sign", "ours.key"))
    assert code == 0, err
    (place,) = [name for name in room.tries("signed") if not name.startswith(".")]
    checkpoint = room.path / "signed" / "tries" / place

    def believed(key):
        return require_verdict(checkpoint, read_manifest(checkpoint), "PASS", room.path / key)

    believed("ours.pub")
    with pytest.raises(WorkerError):
        believed("theirs.pub")
    code, _, err = run(*room.command("loose", "signed"))
    assert code == 0, err
    believed("ours.pub")  # the ledger knows the same verdict, so its signature is left there
    code, _, _ = run(*room.command("loose", "signed", "--sign", "theirs.key"))
    assert code == 0
    believed("theirs.pub")
