"""The parts of a rehearsed rollout: three workers, and the gateway's file that names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from taut_deploy.checkpoint import Golden, is_checkpoint, read_manifest
from taut_deploy.documents import parse_yaml, read_yaml_text
from taut_deploy.errors import RecipeError
from taut_deploy.models.directory import read_shape, require_model_directory
from taut_deploy.ports import free_port
from taut_deploy.serve.process import ChildSpec
from taut_deploy.worker import WorkerSpec, worker_command

MODEL = "rehearsed"
BASELINE, CANDIDATE, HARMED = "baseline", "candidate", "harmed"
GUARD: Mapping[str, Any] = {
    "sample": 1.0,
    "max_cpu_share": None,
    "max_queued": 256,
    "concurrency": 4,
}
"""Every answer is compared: a rehearsal has minutes, and little traffic."""
ROLLOUT: Mapping[str, Any] = {"min_step_s": 10.0, "min_answers": 50, "min_tokens": 2000}
_GRACE_S = 40.0


@dataclass(frozen=True)
class Member:
    """A variant and its one worker.

    Args:
        name: of the variant.
        port: of the worker, on loopback.
        child: how the worker is started.
        golden: prompt whose first token it must say before it gets traffic; None takes any.
    """

    name: str
    port: int
    child: ChildSpec
    golden: Golden | None = None

    @property
    def url(self) -> str:
        """Root of the worker."""
        return f"http://127.0.0.1:{self.port}"


def members_of(
    baseline: Path, candidate: Path, harmed: Path, *, logs: Path, common: WorkerSpec
) -> list[Member]:
    """Describe the variants by the directories that their workers load.

    Args:
        baseline: what serves now.
        candidate: checkpoint that is to take over.
        harmed: its harmed copy.
        logs: folder for workers' output.
        common: context, KV cache and vLLM arguments of all workers.
    """
    directories = {BASELINE: baseline, CANDIDATE: candidate, HARMED: harmed}
    return [_member(name, path, logs, common) for name, path in directories.items()]


def _member(name: str, directory: Path, logs: Path, common: WorkerSpec) -> Member:
    spec = replace(common, checkpoint=directory, name=MODEL, port=free_port())
    log = logs / f"worker-{name}.log"
    child = ChildSpec(name, worker_command(spec), {"PYTHONSAFEPATH": "1"}, log, _GRACE_S)
    # Whoever is harmed may say another first token: the guard is to find that, not the probe.
    known = name == CANDIDATE and is_checkpoint(directory)
    return Member(name, spec.port, child, read_manifest(directory).golden if known else None)


def context_of(baseline: Path, candidate: Path, wanted: int | None) -> int:
    """Check both directories; return the context in tokens: what is wanted, else the candidate's.

    Raises:
        ModelError: one of them is no model.
    """
    for directory in (baseline, candidate):
        require_model_directory(directory)
    if wanted is not None:
        return wanted
    if is_checkpoint(candidate):
        return read_manifest(candidate).max_model_len
    return read_shape(candidate).max_position_embeddings


def read_sections(file: Path | None) -> dict[str, Any]:
    """Read ``--gateway``: the sections ``guard`` and ``rollout`` of a gateway's file.

    Raises:
        RecipeError: it cannot be read, or has other sections; what they hold the gateway checks.
    """
    if file is None:
        return {}
    try:
        text = read_yaml_text(file, RecipeError)
    except OSError as error:
        raise RecipeError(f"--gateway {file}: {error.strerror}") from error
    found = parse_yaml(text, f"--gateway {file}", RecipeError)
    if not isinstance(found, dict) or not found.keys() <= {"guard", "rollout"}:
        raise RecipeError(f"--gateway {file}: expected the sections guard and rollout, no others")
    for name, section in found.items():
        if not isinstance(section, dict):
            raise RecipeError(f"--gateway {file}: {name}: expected a mapping")
    if held := {"store", "directory", "redis"} & found.get("rollout", {}).keys():
        raise RecipeError(
            f"--gateway {file}: rollout.{min(held)}: the journal of a rehearsal is in --output"
        )
    return found


def gateway_file(
    members: Sequence[Member],
    context: int,
    sections: Mapping[str, Any],
    ports: tuple[int, int],
    journal: Path,
) -> dict[str, Any]:
    """Return the gateway's file, as plain data.

    Args:
        members: the baseline, which serves at first, and the candidates.
        context: in tokens.
        sections: ``guard`` and ``rollout`` as the user wants them, over the rehearsal's own.
        ports: for requests and of the admin API, on loopback.
        journal: folder of the audit log.
    """
    listen, admin = ports
    return {
        "listen": {"host": "127.0.0.1", "port": listen},
        "admin": {"host": "127.0.0.1", "port": admin},
        "models": [
            {
                "name": MODEL,
                "max_model_len": context,
                "baseline": BASELINE,
                "variants": [_variant(member) for member in members],
            }
        ],
        "guard": {**GUARD, **sections.get("guard", {})},
        "rollout": {**ROLLOUT, **sections.get("rollout", {}), "directory": str(journal)},
    }


def _variant(member: Member) -> dict[str, Any]:
    variant: dict[str, Any] = {
        "name": member.name,
        "weight": 1.0 if member.name == BASELINE else 0.0,
        "workers": [{"name": member.name, "url": member.url}],
    }
    if (golden := member.golden) is not None:
        variant["golden"] = {"prompt": golden.prompt, "expected_text": golden.expected_text}
    return variant
