"""The verdict of a validation in a checkpoint's manifest: what it holds, and when it is believed.

``taut validate`` writes it, ``taut worker --require-verdict`` reads it. It names the digest of the
files it is about, so that it does not speak for others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taut_deploy.attestation import verified
from taut_deploy.checkpoint import Manifest
from taut_deploy.errors import AttestationError, WorkerError

PREDICATE_TYPE = "urn:taut:validation-verdict:v1"
ENVELOPE = "envelope"
_REQUIRED = "--require-verdict"
_PASS = "PASS"  # noqa: S105 - a verdict, not a password


def unsigned(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What a verdict says, without its signature.

    Args:
        verdict: of a manifest.
    """
    return {name: value for name, value in verdict.items() if name != ENVELOPE}


def check_wanted(wanted: str | None, trust: Path | None) -> None:
    """Refuse a requirement that is none.

    Args:
        wanted: of ``--require-verdict``.
        trust: of ``--trust``.

    Raises:
        WorkerError: another verdict than PASS, or a key without a requirement.
    """
    if wanted is not None and wanted != _PASS:
        raise WorkerError(f"{_REQUIRED} {wanted}: use {_PASS}; no other verdict promotes")
    if trust is not None and wanted is None:
        raise WorkerError(f"--trust {trust}: goes with {_REQUIRED} {_PASS}; add it")


def require_verdict(
    checkpoint: Path, manifest: Manifest | None, wanted: str | None, trust: Path | None
) -> str | None:
    """Refuse a checkpoint that has not been shown to be good.

    Args:
        checkpoint: its directory.
        manifest: verified against its files; None for a model that is no checkpoint.
        wanted: the verdict it must have; None asks for none.
        trust: public key that must have signed it; None believes the manifest.

    Returns:
        What the verdict is, in one line; None where none was asked for.

    Raises:
        WorkerError: no verdict, another one, one about other files, or not signed by that key.
    """
    check_wanted(wanted, trust)
    if wanted is None:
        return None
    validation = None if manifest is None else manifest.validation
    if manifest is None or validation is None:
        raise WorkerError(
            f"{checkpoint}: {_REQUIRED} {wanted}: it has no verdict; run taut validate on it first"
        )
    said: Mapping[str, Any] = validation
    if trust is not None:
        said = _trusted(checkpoint, manifest, validation, trust)
    elif validation.get("digest") != manifest.digest:
        raise WorkerError(
            f"{checkpoint}: {_REQUIRED} {wanted}: its verdict is not about these files; "
            "run taut validate on it again"
        )
    if said.get("verdict") != wanted:
        raise WorkerError(
            f"{checkpoint}: {_REQUIRED} {wanted}: its verdict is {str(said.get('verdict'))[:20]}"
        )
    by = "" if trust is None else f", signed by {trust}"
    return f"verdict {wanted} under policy {str(said.get('policy'))[:80]}{by}"


def _trusted(
    checkpoint: Path, manifest: Manifest, validation: Mapping[str, Any], trust: Path
) -> Mapping[str, Any]:
    envelope = validation.get(ENVELOPE)
    if not isinstance(envelope, dict):
        raise WorkerError(
            f"{checkpoint}: --trust {trust}: its verdict is not signed; run taut validate --sign"
        )
    try:
        return verified(envelope, trust, manifest.digest, PREDICATE_TYPE, "--trust")
    except AttestationError as error:
        raise WorkerError(f"{checkpoint}: {error}") from error
