"""The training loop: a step is a function of the state before it, and the state survives a kill."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from taut_deploy.compress.train.losses import Objective
from taut_deploy.compress.train.optimizer import (
    make_optimizer,
    moments,
    restore_moments,
    set_rate,
)
from taut_deploy.compress.train.parts import Alone, own_name
from taut_deploy.compress.train.schedule import rate_at, rows_at
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.compress.workspace import Workspace
from taut_deploy.errors import ModelError

STATE = "training"
COLUMNS = ("step", "tokens", "loss", "kl", "cross_entropy", "hidden", "rate", "gradient_norm")
_PARTS = COLUMNS[3:6]

# (steps done, steps in all, what is being done)
Progress = Callable[[int, int, str], None]


class Trainer:
    """Trains masters in place and saves the state every so many steps.

    ``history`` has one row a step, :data:`COLUMNS`; a part without a weight is NaN.

    Args:
        masters: what is trained, by name.
        objective: loss of a batch.
        settings: of the run.
        workspace: where states are kept.
        device: of the masters.
        parts: this process among those that share the work.
    """

    def __init__(
        self,
        masters: dict[str, nn.Parameter],
        objective: Objective,
        settings: TrainSettings,
        workspace: Workspace,
        device: str,
        parts: Alone | None = None,
    ) -> None:
        self._parts = parts or Alone()
        self._masters, self._objective = masters, objective
        self._settings, self._workspace, self._device = settings, workspace, device
        self._optimizer = make_optimizer(masters, settings)
        self.history: list[list[float]] = []

    def run(self, sequences: torch.Tensor, progress: Progress) -> None:
        """Train to the last step, from the last saved state.

        Args:
            sequences: [n, T] int64.
            progress: told after every step.

        Raises:
            ModelError: the loss or the gradient is not finite.
        """
        total = self._settings.steps
        step = self._restore()
        with deterministic() if self._settings.deterministic else contextlib.nullcontext():
            while step < total:
                rows = rows_at(step, self._settings.batch_size, len(sequences), self._settings.seed)
                row = self._step(step, sequences[rows])
                step += 1
                self.history.append(row)
                progress(step, total, f"loss {row[2]:.4f}")
                if step % self._settings.state_every == 0 or step == total:
                    self._save(step)

    def _step(self, step: int, sequences: torch.Tensor) -> list[float]:
        settings = self._settings
        share = rate_at(step, settings.steps, settings.warmup, settings.final_rate)
        set_rate(self._optimizer, rate := settings.learning_rate * share)
        batches = torch.split(sequences, min(settings.micro_batch, settings.batch_size))
        sums: dict[str, torch.Tensor] = {}
        mine = self._parts.share(batches)
        for tokens in mine:
            losses = self._objective(tokens.to(self._device))
            (losses.total / len(mine)).backward()  # type: ignore[no-untyped-call]
            for name, value in {"loss": losses.total.detach(), **losses.parts}.items():
                sums[name] = sums.get(name, 0.0) + value.float() / len(mine)
        sums = {name: self._parts.mean(value) for name, value in sums.items()}
        found = nn.utils.clip_grad_norm_(self._masters.values(), settings.clip)
        norm, loss = float(self._parts.whole(found)), float(sums["loss"])
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise _not_finite(step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        tokens_seen = (step + 1) * sequences.numel()
        parts = [float(sums[name]) if name in sums else math.nan for name in _PARTS]
        return [float(step + 1), float(tokens_seen), loss, *parts, rate, norm]

    def _save(self, step: int) -> None:
        held: dict[str, torch.Tensor] = {
            f"master|{name}": value for name, value in self._masters.items()
        }
        held |= {f"moment|{name}": value for name, value in moments(self._optimizer).items()}
        state: dict[str, torch.Tensor] = {}
        for name, value in held.items():
            whole = self._parts.whole(value.detach())  # which all processes take part in
            if self._parts.rank == 0:
                state[name] = whole.cpu()  # a card holds no more than one of them
        random = {"random|cpu": torch.get_rng_state()}
        if self._device != "cpu":
            random["random|cuda"] = torch.cuda.get_rng_state()
        state |= self._parts.random_states(random)
        state["history"] = torch.tensor(self.history, dtype=torch.float64)
        state["step"] = torch.tensor(step)
        if self._parts.rank == 0:
            self._workspace.save_tensors(STATE, state)

    def _restore(self) -> int:
        state = self._workspace.tensors(STATE)
        if state is None:
            torch.manual_seed(self._settings.seed + self._parts.rank)
            return 0
        restore_masters(self._masters, state, self._parts)
        taken = {
            name.removeprefix("moment|"): value
            for name, value in state.items()
            if name.startswith("moment|")
        }
        restore_moments(self._optimizer, taken, self._parts.part)
        rank = self._parts.rank
        torch.set_rng_state(state[own_name("random|cpu", rank)])
        if self._device != "cpu":
            torch.cuda.set_rng_state(state[own_name("random|cuda", rank)])
        self.history = state["history"].tolist()
        return int(state["step"])


@torch.no_grad()
def restore_masters(
    masters: Mapping[str, nn.Parameter], state: Mapping[str, torch.Tensor], parts: Alone
) -> None:
    """Put back the masters of a saved state, :data:`STATE`.

    Args:
        masters: what is trained, by name.
        state: as it was saved.
        parts: this process among those that share the work.
    """
    for name, value in masters.items():
        value.copy_(parts.part(state[f"master|{name}"], value))


def _not_finite(step: int) -> ModelError:
    if step == 0:
        return ModelError(
            "the loss or its gradient is not finite in the first step: the student's or the "
            "teacher's weights are broken, or overflow in their type"
        )
    return ModelError(
        f"learning_rate: the loss or its gradient is not finite at step {step + 1}; lower the "
        "learning rate and start again with --no-resume"
    )


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Sums in one order, so that a resumed run ends in the bytes of an undisturbed one."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # Read when cuBLAS starts; without it torch refuses deterministic products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        memory.fill_uninitialized_memory = filled


@torch.no_grad()
def judge(
    objective: Objective,
    sequences: torch.Tensor,
    batch: int,
    device: str,
    parts: Alone | None = None,
) -> dict[str, float]:
    """Mean of each part of the loss over sequences, nothing trained.

    Args:
        objective: loss of a batch.
        sequences: [n, T] int64; n may be 0.
        batch: sequences at a time.
        device: of the models.
        parts: this process among those that share the batches.

    Returns:
        Parts by name, ``loss`` among them; empty without a sequence.

    Raises:
        ModelError: a part is not finite.
    """
    if not len(sequences):
        return {}
    sharing = parts or Alone()
    sums: dict[str, float] = {}
    for tokens, counts in sharing.turns(torch.split(sequences, batch)):
        losses = objective(tokens.to(device))
        for name, value in {"loss": losses.total, **losses.parts}.items():
            part = float(value) * len(tokens) / len(sequences) if counts else 0.0
            sums[name] = sums.get(name, 0.0) + part
    mine = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)
    sums = dict(zip(sums, sharing.total(mine).tolist(), strict=True))
    if not all(map(math.isfinite, sums.values())):
        raise _not_finite(0)
    return sums
