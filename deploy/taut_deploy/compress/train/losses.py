"""The loss of one batch: divergence from the teacher, cross entropy, distance of hidden states.

With a plain output head the logits never exist as a whole: hidden states and head go into the fused
ops. A model that changes its logits after the head (soft-capping, scaling) makes them, [B, T, V].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.errors import ModelError

_PROBE_TOKENS = 8
BASE_FORWARD = "taut_base_forward"
"""What a sharded model calls its base by, so that its own weights are put together for it."""


@dataclass(frozen=True)
class Losses:
    """Parts of a batch's loss.

    Args:
        total: weighted sum, differentiable.
        parts: mean per token of each part that has a weight, detached.
    """

    total: torch.Tensor
    parts: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Pass:
    """What one forward pass left: hidden states and the head, or logits."""

    hidden: tuple[torch.Tensor, ...]
    last: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    logits: torch.Tensor | None


class Objective:
    """Computes the loss of a student on token ids.

    Args:
        student: model.
        teacher: model, or None where no part needs one.
        settings: weights of the parts.
        device: of both.

    Raises:
        ModelError: the two cannot be compared.
    """

    def __init__(
        self, student: Any, teacher: Any | None, settings: TrainSettings, device: str
    ) -> None:
        self._student, self._teacher, self._settings = student, teacher, settings
        probe = torch.arange(_PROBE_TOKENS, device=device)[None] % _vocabulary(student)
        models = [student] if teacher is None else [student, teacher]
        self.fused = all(_plain_head(model, probe) for model in models)
        if teacher is not None:
            self._require_alike(probe)

    def __call__(self, tokens: torch.Tensor) -> Losses:
        """The loss of ``tokens`` [B, T]."""
        wanted = bool(self._settings.hidden)
        with torch.no_grad():
            teacher = None if self._teacher is None else self._run(self._teacher, tokens, wanted)
        student = self._run(self._student, tokens, wanted)
        parts: dict[str, torch.Tensor] = {}
        if self._settings.kl and teacher is not None:
            parts["kl"] = self._divergence(student, teacher)
        if self._settings.cross_entropy:
            parts["cross_entropy"] = _cross_entropy(student, tokens)
        if wanted and teacher is not None:
            parts["hidden"] = _distance(student.hidden, teacher.hidden)
        weights = self._settings.model_dump()
        total = torch.stack([weights[name] * part.float() for name, part in parts.items()]).sum()
        return Losses(total, {name: part.detach() for name, part in parts.items()})

    def _run(self, model: Any, tokens: torch.Tensor, hidden: bool) -> _Pass:
        head = model.get_output_embeddings()
        if self.fused:
            base = getattr(model, BASE_FORWARD, model.base_model)
            out = base(input_ids=tokens, use_cache=False, output_hidden_states=hidden)
            last = out.last_hidden_state
            return _Pass(_states(out, last, hidden), last, head.weight, head.bias, None)
        out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        last = out.hidden_states[-1]
        states = out.hidden_states if hidden else (last,)
        return _Pass(states, last, head.weight, head.bias, out.logits)

    def _divergence(self, student: _Pass, teacher: _Pass) -> torch.Tensor:
        settings = self._settings
        if student.logits is not None and teacher.logits is not None:
            return _logit_divergence(student.logits, teacher.logits, settings)
        from taut_kernels.for_deploy import linear_kl

        return linear_kl(
            student.last,
            student.weight,
            teacher.last,
            teacher.weight.detach(),
            bias=student.bias,
            teacher_bias=None if teacher.bias is None else teacher.bias.detach(),
            temperature=settings.temperature,
            reverse=settings.reverse,
            accumulate_fp32=True,
        )

    @torch.no_grad()
    def _require_alike(self, probe: torch.Tensor) -> None:
        ours, theirs = _vocabulary(self._student), _vocabulary(self._teacher)
        if ours != theirs:
            raise ModelError(
                f"--teacher: its vocabulary has {theirs} tokens, the student's {ours}; "
                "give the model that the student was made from"
            )
        if not self._settings.hidden:
            return
        student = self._run(self._student, probe, True).hidden
        teacher = self._run(self._teacher, probe, True).hidden
        if student[-1].shape != teacher[-1].shape:
            raise ModelError(
                f"hidden: the student's hidden states have {student[-1].shape[-1]} channels, the "
                f"teacher's {teacher[-1].shape[-1]}; set hidden to 0"
            )


def _states(out: Any, last: torch.Tensor, wanted: bool) -> tuple[torch.Tensor, ...]:
    return tuple(out.hidden_states) if wanted else (last,)


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


@torch.no_grad()
def _plain_head(model: Any, probe: torch.Tensor) -> bool:
    """Whether the model's logits are its head's product, and nothing comes after."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) and not hasattr(head, "bias"):
        return False
    last = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
    if last.shape[-1] != head.weight.shape[1]:
        return False
    expected = functional.linear(last, head.weight, head.bias)
    logits = model(input_ids=probe, use_cache=False).logits
    return bool(torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2))


def _cross_entropy(student: _Pass, tokens: torch.Tensor) -> torch.Tensor:
    if student.logits is not None:
        logits = student.logits[:, :-1].float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    from taut_kernels.for_deploy import linear_cross_entropy

    return linear_cross_entropy(
        student.last[:, :-1].contiguous(),
        student.weight,
        tokens[:, 1:].contiguous(),
        bias=student.bias,
    )


def _logit_divergence(
    student: torch.Tensor, teacher: torch.Tensor, settings: TrainSettings
) -> torch.Tensor:
    log_p = (student.float() / settings.temperature).log_softmax(-1)
    log_q = (teacher.float() / settings.temperature).log_softmax(-1)
    first, second = (log_p, log_q) if settings.reverse else (log_q, log_p)
    rows = (first.exp() * (first - second)).sum(-1)
    return rows.mean() * settings.temperature**2


def _distance(student: tuple[torch.Tensor, ...], teacher: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean over the layers of the squared distance over the teacher's square.

    Where the two have different depths, only the last states are compared.
    """
    pairs = list(zip(student, teacher, strict=False))
    if len(student) != len(teacher):
        pairs = [(student[-1], teacher[-1])]
    found = [
        (ours.float() - theirs.float()).square().sum() / theirs.float().square().sum().clamp(1e-12)
        for ours, theirs in pairs
    ]
    return torch.stack(found).mean()
