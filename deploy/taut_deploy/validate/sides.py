"""The two models before they are loaded: servers found, directories checked, one vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_deploy.validate import identity
from taut_deploy.validate.behaviour import require_same_behaviour
from taut_deploy.validate.checkpoint_source import CheckpointSource
from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.headers import described as described_headers
from taut_deploy.validate.headers import request_headers
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.same_reading import (
    AnyTokenizer,
    require_same_conversations,
    require_same_texts,
)
from taut_deploy.validate.server_connection import ServerConnection, is_url
from taut_deploy.validate.server_source import ServerSource
from taut_deploy.validate.text import read_text

_PROBE_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models before it is loaded.

    Args:
        role: ``baseline`` or ``candidate``.
        tokenizer: its own.
        identity: what exactly it is, for the report.
        server: where it is one.
        directory: where it is files.
        trust_remote_code: let the directory's own Python code run.
    """

    role: str
    tokenizer: AnyTokenizer
    identity: Mapping[str, Any]
    server: ServerSource | None
    directory: Path | None
    trust_remote_code: bool = False

    def open(
        self, device: str, dtype: torch.dtype | None = None
    ) -> CheckpointSource | ServerSource:
        """Load the files, or hand out the server.

        Args:
            device: torch device of files.
            dtype: type to compute in; None takes the checkpoint's own.

        Raises:
            CouldNotValidateError: the files cannot be loaded.
        """
        if self.server is not None:
            return self.server
        assert self.directory is not None  # noqa: S101 - narrows the type
        return CheckpointSource(
            self.directory,
            self.role,
            device,
            dtype,
            trust_remote_code=self.trust_remote_code,
        )


def find_side(job: ValidationJob, role: str) -> Side:
    """Find the server, or check the directory.

    Raises:
        CouldNotValidateError: not there, or not what it says it is.
    """
    reference: str = getattr(job, role)
    if is_url(reference):
        extra = getattr(job.access, f"{role}_headers")
        headers = request_headers(job.access.api_key, extra)
        connection = ServerConnection(reference, role, headers, job.servers.timeout_s)
        server = ServerSource(connection, getattr(job.servers, f"{role}_model"), job.servers.top_k)
        described = identity.server_identity(connection.root, server.card, described_headers(extra))
        return Side(role, server.tokenizer, described, server, None)
    path = Path(reference)
    trusted = job.directories.trust_remote_code
    tokenizer = CheckpointTokenizer(path, trust_remote_code=trusted)
    described = identity.directory_identity(path, role)
    return Side(role, tokenizer, described, None, path, trusted)


def check_tokenizers(job: ValidationJob, baseline: Side, candidate: Side) -> None:
    """Refuse models that would read the same ids as different text, or answer by other rules.

    Raises:
        CouldNotValidateError: naming the first difference.
    """
    head = read_text(job.text)[0][:_PROBE_CHARACTERS]
    ours, theirs = baseline.tokenizer, candidate.tokenizer
    require_same_texts(job.candidate, ours, theirs, head, job.baseline)
    if baseline.directory is not None and candidate.directory is not None:
        require_same_behaviour(
            baseline.directory,
            candidate.directory,
            trust_remote_code=job.directories.trust_remote_code,
        )
    else:
        require_same_conversations(job.candidate, ours, theirs, job.baseline)
