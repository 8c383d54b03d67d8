"""The verdict goes into the manifest of a candidate that is a checkpoint, signed if asked."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from taut_deploy.attestation import read_signer, signed
from taut_deploy.checkpoint import (
    MANIFEST,
    Manifest,
    is_checkpoint,
    read_manifest,
    record_validation,
)
from taut_deploy.files import sha256_file, sha256_json
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.outcome import ValidationResult
from taut_deploy.verdict_record import ENVELOPE, PREDICATE_TYPE, unsigned

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner


def signer_for(job: ValidationJob, key: Path | None) -> "CryptoSigner | None":
    """Read the key before anything is measured; None where nothing is to be signed.

    Raises:
        AttestationError: it is no key, or securesystemslib is missing.
        CouldNotValidateError: the candidate is no checkpoint, so there is nothing to sign.
    """
    if key is None:
        return None
    if not is_checkpoint(Path(job.candidate)):
        raise CouldNotValidateError(
            f"--sign: {job.candidate} is no checkpoint of taut's; what is signed is a verdict "
            "on files with a manifest"
        )
    return read_signer(key, "--sign")


def record(job: ValidationJob, result: ValidationResult, signer: "CryptoSigner | None") -> None:
    """Write the verdict into the manifest, if the candidate has one.

    Raises:
        CouldNotValidateError: the checkpoint changed while it was validated.
    """
    directory = Path(job.candidate)
    if not is_checkpoint(directory):
        return
    manifest = read_manifest(directory)
    judged = result.report["models"]["candidate"]["manifest_sha256"]
    if sha256_file(directory / MANIFEST) != judged:
        raise CouldNotValidateError(
            f"--candidate {directory}: its manifest changed during the validation; run it again"
        )
    verdict = _verdict(job, result) | {"digest": manifest.digest}
    record_validation(directory, verdict if signer is None else _signed(manifest, verdict, signer))


def sign_recorded(directory: Path, signer: "CryptoSigner") -> None:
    """Sign the verdict that a checkpoint's manifest has.

    Args:
        directory: the checkpoint.
        signer: of the private key.

    Raises:
        CouldNotValidateError: its manifest has no verdict on these files.
    """
    manifest = read_manifest(directory)
    verdict = unsigned(manifest.validation or {})
    if verdict.get("digest") != manifest.digest:
        raise CouldNotValidateError(
            f"--sign: {directory / MANIFEST} has no verdict on these files; validate them first"
        )
    record_validation(directory, _signed(manifest, verdict, signer))


def _signed(manifest: Manifest, verdict: dict[str, Any], signer: "CryptoSigner") -> dict[str, Any]:
    envelope = signed(manifest.name, manifest.digest, PREDICATE_TYPE, verdict, signer)
    return verdict | {ENVELOPE: envelope}


def _verdict(job: ValidationJob, result: ValidationResult) -> dict[str, Any]:
    report = result.report
    return {
        "verdict": result.verdict.value,
        "policy": str(job.policy),
        "policy_sha256": sha256_json(report["policy"]),
        "text": job.text.name,
        "text_sha256": report["text"]["sha256"],
        "baseline": report["models"]["baseline"].get("digest"),
        "report_sha256": sha256_file(result.report_json),
        "started_at": report["started_at"],
        "metrics": {
            name: {"estimate": metric.estimate, "low": metric.low, "high": metric.high}
            for name, metric in result.metrics.items()
        },
    }
