"""Students whose linear layers are changed one by one and stay dense, made whole in memory.

For what no recipe makes in a format that can be trained; the others come from ``taut compress``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taut_deploy.checkpoint import Manifest, seal
from taut_deploy.compress.calibrate.calibration import CalibrationSet, make_calibration_set
from taut_deploy.compress.dense import load_dense, write_dense
from taut_deploy.compress.golden import golden_of
from taut_deploy.compress.job import library_versions, stored_dtype
from taut_deploy.compress.shrink.importance import decoder_of, run, with_hooks
from taut_deploy.compress.source.linears import linear_layers
from taut_deploy.compress.workspace import Workspace, finished_result, sole_writer
from taut_deploy.files import sha256_json
from taut_deploy.models.directory import read_shape
from taut_deploy.models.store import ModelRecord
from taut_deploy.recipe import Calibration

_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Changed:
    """A layer after a change.

    Args:
        weight: [N, K] fp32.
        report: what the manifest says of it.
    """

    weight: torch.Tensor
    report: dict[str, Any]


# (weight [N, K] fp32, mean of x xᵀ [K, K] fp32) -> the layer, None where it stays
Change = Callable[[torch.Tensor, torch.Tensor], Changed | None]


@dataclass(frozen=True)
class LayerJob:
    """One request to change every linear layer of the decoder blocks.

    Args:
        base: the model.
        stage: what is done, as the manifest says it.
        calibration: what the layers see.
        cache: where the corpus is kept.
        device: ``cpu`` or ``cuda``.
    """

    base: ModelRecord
    stage: dict[str, Any]
    calibration: Calibration
    cache: Path
    device: str


def change_layers(job: LayerJob, change: Change, output: Path) -> Manifest:
    """Change block after block, each on what its changed predecessors give it.

    A finished identical result is returned as it is.

    Raises:
        OutputError: something else stands in the output's place.
        ModelError: the model cannot be read.
        RecipeError: the calibration text is too short.
    """
    stage = {**job.stage, "calibration": job.calibration.model_dump(mode="json")}
    digest = "sha256:" + sha256_json({"stage": stage, "base": job.base.digest})
    with sole_writer(output, "taut bench distil"):
        if (finished := finished_result(output, digest)) is not None:
            return finished
        directory = Path(job.base.path)
        tokens = make_calibration_set(job.calibration, directory, job.cache)
        model = load_dense(directory, job.device, trust_remote_code=False)
        reports = _change_blocks(model, tokens.tokens, change)
        workspace = Workspace(output, {"stage": stage}, resume=False)
        write_dense(model, directory, workspace)
        manifest = _manifest(job, model, stage, tokens, reports, digest)
        sealed = seal(workspace.directory, manifest)
        workspace.publish()
        return sealed


@torch.no_grad()
def _change_blocks(model: Any, tokens: torch.Tensor, change: Change) -> list[dict[str, Any]]:
    prefix, blocks = decoder_of(model)
    reports = []
    for index, block in enumerate(blocks):
        layers = dict(linear_layers(block))
        hessians = _hessians(model, layers, tokens)
        for name, layer in layers.items():
            changed = change(layer.weight.data.float(), hessians[name])
            if changed is not None:
                layer.weight.data = changed.weight.to(layer.weight)
                reports.append({"name": f"{prefix}.{index}.{name}", **changed.report})
    return reports


def _hessians(
    model: Any, layers: dict[str, nn.Linear], tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Mean of ``x xᵀ`` of each layer's inputs, [K, K] fp32."""
    sums = {
        name: torch.zeros(layer.in_features, layer.in_features, device=layer.weight.device)
        for name, layer in layers.items()
    }

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            rows = arguments[0].flatten(0, -2).float()
            sums[name].addmm_(rows.T, rows)

        return hook

    with_hooks(
        [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()],
        lambda: run(model, tokens, max(1, _BATCH_TOKENS // tokens.shape[1])),
    )
    return {name: value / tokens.numel() for name, value in sums.items()}


def _manifest(
    job: LayerJob,
    model: Any,
    stage: dict[str, Any],
    calibration: CalibrationSet,
    reports: list[dict[str, Any]],
    digest: str,
) -> Manifest:
    base, directory = job.base, Path(job.base.path)
    return Manifest(
        name=base.name,
        scheme="none",
        bits=8 * stored_dtype(directory).itemsize,
        recipe={"name": str(stage["method"]), "stages": [stage]},
        recipe_hash=digest,
        base_model={"name": base.name, "digest": base.digest, "source": base.source},
        calibration={"description": calibration.description, "hash": calibration.hash},
        layers=reports,
        golden=golden_of(model, directory),
        max_model_len=read_shape(directory).max_position_embeddings,
        libraries=library_versions(),
    )
