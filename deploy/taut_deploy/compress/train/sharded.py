"""One of the processes that train together: student and teacher sharded over them by FSDP2.

Source: PyTorch FSDP2 (``fully_shard``): a process holds a part of every weight, gradient and
moment, and puts a block's weights together while it computes it. accelerate's preparation is not
used: it shards the output head apart, called as a module, whereas the fused losses multiply by
the head's weight themselves.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from taut_deploy.compress.source.decoder import find_decoder
from taut_deploy.compress.train.job import DistilJob, open_models
from taut_deploy.compress.train.loop import Trainer, judge
from taut_deploy.compress.train.losses import BASE_FORWARD, Objective
from taut_deploy.compress.train.parts import Sharded
from taut_deploy.compress.train.text import TrainingText, require_in_vocabulary
from taut_deploy.compress.workspace import Workspace

TEXT = "text"
"""State tensors of the sequences, ``trained`` and ``held_out``."""


def train_rank(
    rank: int,
    devices: tuple[str, ...],
    tell: Callable[..., None],
    job: DistilJob,
    fingerprint: Mapping[str, Any],
    judged: Mapping[str, dict[str, float]],
) -> dict[str, Any]:
    """Train with the other processes; the last state is whole in the workspace then.

    Args:
        rank: of this process.
        devices: of all.
        tell: tells the parent of progress.
        job: what is asked for.
        fingerprint: of the workspace, which is there.
        judged: held-out losses that are known already, ``before`` and ``after``.

    Returns:
        ``judged``, both of them, and whether logits are never made, ``fused``.
    """
    workspace = Workspace(job.output, fingerprint, resume=True)
    found = workspace.tensors(TEXT) or {}
    text = TrainingText(found["trained"], found["held_out"], "")
    student, teacher = open_models(job, held_on="cpu")
    model, settings = student.model, job.settings
    require_in_vocabulary(text, model.get_input_embeddings().weight.shape[0])
    objective = Objective(model, teacher, settings, "cpu")  # looks at whole models
    mesh = init_device_mesh(torch.device(devices[rank]).type, (len(devices),))
    for one in (model, teacher):
        if one is not None:
            shard(one, mesh)
    masters = student.trained(settings)  # in parts, which they are not after a forward pass
    parts = Sharded(rank, len(devices))

    def judge_now(when: str) -> dict[str, float]:
        if when in judged:  # known to all processes, or to none
            return judged[when]
        model.eval()
        value = judge(objective, text.held_out, settings.micro_batch, devices[rank], parts)
        if rank == 0:
            workspace.commit(f"judged-{when}", value)
        return value

    before = judge_now("before")
    trainer = Trainer(masters, objective, settings, workspace, devices[rank], parts)
    model.train()
    trainer.run(text.trained, tell if rank == 0 else lambda *_: None)
    return {"before": before, "after": judge_now("after"), "fused": objective.fused}


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Let each process of a mesh hold a part of a model's weights.

    Args:
        model: whole, the same on every process; what it is not sharded by stays whole.
        mesh: one dimension; the model moves to its device.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # Of hidden states, which nothing here writes into.
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*", category=UserWarning)
    for block in find_decoder(model)[1]:
        fully_shard(block, mesh=mesh)
    # Embeddings, last norm and head stay together from a forward pass to its backward pass: the
    # loss multiplies by the head's weight after the model has returned.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    setattr(model, BASE_FORWARD, partial(_base_forward, model))
    register_fsdp_forward_method(model, BASE_FORWARD)


def _base_forward(model: Any, *given: Any, **named: Any) -> Any:
    return model.base_model(*given, **named)
