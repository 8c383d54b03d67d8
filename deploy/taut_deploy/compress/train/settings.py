"""What a training run is told, parsed once, unknown names refused."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Share = Annotated[float, Field(ge=0.0, lt=1.0)]
_Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class TrainSettings(BaseModel):
    """Settings of one training run.

    Args:
        tokens: to train on, repetitions counted.
        sequence_length: tokens of one sequence.
        batch_size: sequences of one step.
        micro_batch: sequences in memory at a time; it does not change the result's meaning, only
            the order of sums.
        held_out: sequences of the text that are never trained on, where it has 16 times as many.
        learning_rate: highest.
        warmup: share of the steps in which it rises to that.
        final_rate: share of it that is left at the end of the cosine.
        weight_decay: of AdamW, on matrices.
        clip: largest norm of the gradient.
        kl: weight of the divergence from the teacher, per token.
        cross_entropy: weight of the cross entropy of the text's next tokens.
        hidden: weight of the squared distance of hidden states, relative to the teacher's.
        temperature: of the divergence.
        reverse: the divergence of the teacher from the student instead.
        start: of a quantised layer's master weight: ``codes`` (what the checkpoint stands for),
            ``base`` (the teacher's weight, rounded by the checkpoint's scales) or ``cells`` (the
            teacher's weight, moved only as far as it must be to round to the checkpoint's codes).
        scales: whether the scales of quantised layers are ``learned`` or stay ``fixed``.
        train: ``all`` weights, or the ``linear`` layers of the decoder blocks only.
        optimizer: ``adamw`` (torch) or ``adamw8bit`` (bitsandbytes).
        gradient_checkpointing: compute activations twice instead of keeping them.
        deterministic: sums in one order, so that a resumed run ends in the same bytes; a little
            slower on CUDA.
        state_every: steps between two saved states.
        seed: of the order of sequences.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: Annotated[int, Field(ge=1)] = 1_000_000
    sequence_length: Annotated[int, Field(ge=8, le=131072)] = 512
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 16
    micro_batch: Annotated[int, Field(ge=1, le=65536)] = 4
    held_out: Annotated[int, Field(ge=0, le=1024)] = 8
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-4
    warmup: _Share = 0.05
    final_rate: _Share = 0.05
    weight_decay: _Weight = 0.0
    clip: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    kl: _Weight = 1.0
    cross_entropy: _Weight = 0.0
    hidden: _Weight = 0.0
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    reverse: bool = False
    start: Literal["codes", "base", "cells"] = "codes"
    scales: Literal["learned", "fixed"] = "learned"
    train: Literal["all", "linear"] = "all"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    gradient_checkpointing: bool = False
    deterministic: bool = True
    state_every: Annotated[int, Field(ge=1)] = 200
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _has_a_loss(self) -> "TrainSettings":
        if not (self.kl or self.cross_entropy or self.hidden):
            raise ValueError("'kl', 'cross_entropy' and 'hidden' are all 0: nothing to train for")
        if self.batch_size % min(self.micro_batch, self.batch_size):
            raise ValueError(
                f"'micro_batch' {self.micro_batch} does not divide 'batch_size' {self.batch_size}"
            )
        return self

    @property
    def steps(self) -> int:
        """Optimiser steps: what covers ``tokens``."""
        return -(-self.tokens // (self.batch_size * self.sequence_length))

    @property
    def needs_teacher(self) -> bool:
        """Whether a loss or a start asks for the teacher's weights."""
        return bool(self.kl or self.hidden) or self.start != "codes"
