"""Signed statements about a checkpoint: an in-toto statement in a DSSE envelope.

Formats: in-toto Attestation Framework, Statement v1, and Dead Simple Signing Envelope v1. Signing
and verifying are securesystemslib's (extra ``taut[sign]``); keys are PEM files: Ed25519, ECDSA or
RSA.
"""

import copy
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taut_deploy.errors import AttestationError

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_ALGORITHM = "sha256"
_LARGEST_KEY = 1 << 16


def read_signer(path: Path, flag: str) -> "CryptoSigner":
    """The signer of a private key.

    Args:
        path: PEM file without a password.
        flag: named in errors.

    Raises:
        AttestationError: securesystemslib is missing, or the file is no such key.
    """
    _require_library(flag)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        return CryptoSigner(load_pem_private_key(_read_key(path, flag), None))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AttestationError(
            f"{flag} {path}: not a private key in PEM without a password (Ed25519, ECDSA or RSA)"
        ) from error


def signed(
    name: str,
    digest: str,
    predicate_type: str,
    predicate: Mapping[str, Any],
    signer: "CryptoSigner",
) -> dict[str, Any]:
    """A statement about files, in a signed envelope.

    Args:
        name: of what it is about.
        digest: of it, ``sha256:`` and hex digits.
        predicate_type: URI of what is said.
        predicate: what is said, plain data.
        signer: of the private key.

    Returns:
        The envelope, ready for JSON.
    """
    from securesystemslib.dsse import Envelope

    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {_ALGORITHM: _hex(digest)}}],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    written = json.dumps(statement, sort_keys=True, separators=(",", ":"), allow_nan=False)
    payload = written.encode()
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(signer)
    found: dict[str, Any] = envelope.to_dict()
    return found


def verified(
    envelope: Mapping[str, Any], key: Path, digest: str, predicate_type: str, flag: str
) -> dict[str, Any]:
    """What an envelope says, once its signature and its subject are found right.

    Args:
        envelope: from :func:`signed`.
        key: public key that must have signed it, PEM.
        digest: of the files it must be about.
        predicate_type: what it must say.
        flag: named in errors, for the key.

    Returns:
        The predicate.

    Raises:
        AttestationError: no such key, a signature by another, a changed payload, or a statement
            about other files.
    """
    _require_library(flag)
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError

    public = _read_public(key, flag)
    try:
        # from_dict changes what it is given.
        parsed = Envelope.from_dict(copy.deepcopy(dict(envelope)))
        parsed.verify([public], 1)
    except VerificationError as error:
        raise AttestationError(
            f"the verdict is not signed by {flag} {key}, or was changed after it was signed"
        ) from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise AttestationError(
            "the verdict's envelope is damaged; validate and sign again"
        ) from error
    return _predicate(parsed.payload_type, parsed.payload, digest, predicate_type)


def _predicate(
    payload_type: str, payload: bytes, digest: str, predicate_type: str
) -> dict[str, Any]:
    damaged = AttestationError("the signed statement is not one of a verdict; validate again")
    if payload_type != PAYLOAD_TYPE:
        raise damaged
    try:
        statement = json.loads(payload)
        (subject,) = statement["subject"]
        of, said = subject["digest"][_ALGORITHM], statement["predicate"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged from error
    if statement.get("_type") != STATEMENT_TYPE or not isinstance(said, dict):
        raise damaged
    if statement.get("predicateType") != predicate_type:
        raise damaged
    if of != _hex(digest):
        raise AttestationError(
            f"the signed verdict is about other files ({str(of)[:12]}…, not {_hex(digest)[:12]}…); "
            "validate this checkpoint"
        )
    return said


def _read_public(path: Path, flag: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    try:
        return SSlibKey.from_crypto(load_pem_public_key(_read_key(path, flag)))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AttestationError(
            f"{flag} {path}: not a public key in PEM (Ed25519, ECDSA or RSA)"
        ) from error


def _read_key(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as handle:
            return handle.read(_LARGEST_KEY)
    except OSError as error:
        raise AttestationError(f"{flag} {path}: {error.strerror or error}") from error


def _hex(digest: str) -> str:
    return digest.removeprefix(f"{_ALGORITHM}:")


def _require_library(flag: str) -> None:
    if importlib.util.find_spec("securesystemslib") is None:
        raise AttestationError(
            f"{flag}: securesystemslib is not installed; pip install 'taut[sign]'"
        )
