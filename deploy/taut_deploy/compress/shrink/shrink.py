"""``taut slim``: a smaller model of the same architecture, a plain Hugging Face directory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_deploy.checkpoint import Manifest, seal
from taut_deploy.compress.dense import load_dense, write_dense
from taut_deploy.compress.golden import golden_of
from taut_deploy.compress.job import library_versions, stored_dtype
from taut_deploy.compress.report.render import slimmed_markdown
from taut_deploy.compress.shrink.axes import AXES, Axis, target_of
from taut_deploy.compress.shrink.cut import cut, require_cuttable
from taut_deploy.compress.shrink.smaller import Cut
from taut_deploy.compress.skeleton import empty_model
from taut_deploy.compress.train.text import TrainingText, read_text
from taut_deploy.compress.workspace import Workspace, finished_result, sole_writer
from taut_deploy.errors import ModelError
from taut_deploy.files import COMPRESSION_REPORT, sha256_json, write_text_atomically
from taut_deploy.models.directory import read_config
from taut_deploy.models.pretrained import load_config
from taut_deploy.models.store import ModelRecord

_BATCH_TOKENS = 4096
_JUDGED = 4

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ShrinkJob:
    """One request to shrink.

    Args:
        model: the base model, dense.
        output: directory to make; must not exist, or be this very result.
        shares: of each axis to keep, by the names of :data:`.axes.AXES`.
        text: ``corpus``, or files, to measure importance on.
        cache: where the corpus is kept.
        sequences: of the text to use.
        sequence_length: tokens of each.
        device: ``cpu`` or ``cuda``; the whole model is in its memory.
        trust_remote_code: let the model's own Python code run.
    """

    model: ModelRecord
    output: Path
    shares: dict[str, float]
    text: tuple[str, ...]
    cache: Path
    sequences: int = 32
    sequence_length: int = 512
    device: str = "cpu"
    trust_remote_code: bool = False


def shrink(job: ShrinkJob, progress: Progress = lambda done, total, what: None) -> Manifest:
    """Shrink ``job.model`` into ``job.output``; a finished identical one is returned as it is.

    Raises:
        OutputError: something else stands in the output's place, or the disk is full.
        ModelError: the model cannot be read, or cannot be cut along an axis.
        RecipeError: the text cannot be read or is too short.
    """
    _require_shares(job.shares)
    with sole_writer(job.output, "taut slim"):
        return _execute(job, progress)


def _execute(job: ShrinkJob, progress: Progress) -> Manifest:
    directory = Path(job.model.path)
    axes = [axis for axis in AXES if axis in job.shares]
    _refuse_early(job, directory, axes)
    text = read_text(
        list(job.text),
        directory,
        job.cache,
        job.sequence_length,
        _JUDGED,
        trusted=job.trust_remote_code,
    )
    tokens = text.trained[: job.sequences]
    recipe = _recipe(job, text)
    digest = "sha256:" + sha256_json(recipe["stages"])
    if (finished := finished_result(job.output, digest)) is not None:
        return finished
    model = load_dense(directory, job.device, trust_remote_code=job.trust_remote_code)
    workspace = Workspace(job.output, {"stages": recipe["stages"]}, resume=False)
    judged = text.held_out if len(text.held_out) else tokens[:_JUDGED]
    losses = {"base": _loss(model, judged)}
    batch = max(1, _BATCH_TOKENS // job.sequence_length)
    layers: list[dict[str, Any]] = []
    for index, axis in enumerate(axes):
        progress(index, len(axes), f"shrinking {axis}")
        made = cut(model, axis, job.shares[axis], tokens, batch)
        model = made.model
        losses[axis] = _loss(model, judged)
        layers += _reports(made)
    progress(len(axes), len(axes), "writing the model")
    write_dense(model, directory, workspace, trust_remote_code=job.trust_remote_code)
    manifest = Manifest(
        name=job.model.name,
        scheme="none",
        bits=8 * stored_dtype(directory).itemsize,
        recipe={**recipe, "held_out_cross_entropy": losses},
        recipe_hash=digest,
        base_model={
            "name": job.model.name,
            "digest": job.model.digest,
            "source": job.model.source,
        },
        calibration={
            "description": text.description,
            "hash": text.hash,
            "sequences": len(tokens),
            "sequence_length": job.sequence_length,
        },
        layers=layers,
        golden=golden_of(model, directory, trust_remote_code=job.trust_remote_code),
        max_model_len=int(getattr(model.config, "max_position_embeddings", 0)) or 2048,
        libraries=library_versions(),
    )
    write_text_atomically(workspace.directory / COMPRESSION_REPORT, slimmed_markdown(manifest))
    sealed = seal(workspace.directory, manifest)
    workspace.publish()
    return sealed


def _refuse_early(job: ShrinkJob, directory: Path, axes: list[Axis]) -> None:
    """Refuse what cannot be cut, before any text or weight is read.

    Raises:
        ModelError: the model is quantised, or naming the axis.
    """
    require_dense(directory)
    trusted = job.trust_remote_code
    config = load_config(directory, trust_remote_code=trusted)
    targets = [target_of(config, axis, job.shares[axis]) for axis in axes]
    empty = empty_model(config, stored_dtype(directory), trust_remote_code=trusted)
    for target in targets:
        require_cuttable(empty, target)


def require_dense(directory: Path) -> None:
    """Refuse a model whose weights are not plain numbers.

    Raises:
        ModelError: it is quantised.
    """
    if read_config(directory).get("quantization_config") is not None:
        raise ModelError(
            f"{directory}: is quantised; give the model it was made from, and compress the result"
        )


def _require_shares(shares: dict[str, float]) -> None:
    if not shares:
        raise ModelError("nothing to shrink: give --ffn, --heads, --experts, --hidden or --depth")
    for axis, share in shares.items():
        if not 0.0 < share < 1.0:
            raise ModelError(f"--{axis} {share}: give the share to keep, above 0 and below 1")


def _recipe(job: ShrinkJob, text: TrainingText) -> dict[str, Any]:
    stage = {
        "method": "shrink",
        **job.shares,
        "model": job.model.digest,
        "text": text.hash,
        "sequences": job.sequences,
    }
    return {"name": "shrink", "stages": [stage]}


def _reports(made: Cut) -> list[dict[str, Any]]:
    """One entry a block: what was kept of it."""
    target = made.target
    return [
        {
            "name": block or "model",
            "method": f"shrink {target.axis}",
            "before": target.before,
            "after": target.after,
            "kept": kept,
            **made.measured.get(block, {}),
        }
        for block, kept in made.kept.items()
    ]


@torch.inference_mode()
def _loss(model: Any, sequences: torch.Tensor) -> float:
    """Mean cross entropy of the next token."""
    total = 0.0
    for row in sequences:
        tokens = row[None].to(model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))
    return round(total / len(sequences), 6)
