"""One known block through each kernel of a loaded model, against plain torch, before it serves.

A kernel can be right on the card it was written on and wrong on this one: another driver, another
compiler, a damaged card, a library whose products saturate. So the first layer of each kind
(kernel, format, shape) multiplies a block of known activations at every number of tokens that
reaches another choice of the op, and the result is compared with the dequantised weights times the
same block, in fp32. A wrong answer ends the load; it costs milliseconds a kind.

The block's values are multiples of a power of two that every format holds exactly, with a largest
value per row from which a dynamic scale follows without rounding: what is compared is the product
alone. Holds no arithmetic of the kernels' and imports no vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

_STEP = 2.0**-6
_ROWS = 64
"""Rows of a result that are compared, spread over all of them."""
_FEATURES = 4096
"""Output features of the reference in memory at a time."""
_OF_RESULT = 2.0**-7
_OF_NORM = 2.0**-6
"""Allowed error of one element: a part of itself (the store rounds to 2⁻⁹), and of the norm of its
products √Σ(x·w)². Weights rounded to bf16 err by 2⁻⁹/√3 of that norm at random: this is fourteen
times as much, and one block of 16 among 14,336 columns left out is twice as much again."""


FP8_SLACK = 4.0
"""Of sums over 14,336 products on an H100, with one of 448 among whole numbers up to 16, 1.1 times
what is allowed for fp32 was seen."""


class WrongAnswerError(RuntimeError):
    """A kernel of ours computes wrong answers on this device."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is checked once.

    Attributes:
        kernel: class name of the kernel vLLM holds for a linear layer, or an op.
        form: scheme, shape and type in words, for example ``W4A16 in groups of 128, 6144x4096``.
    """

    kernel: str
    form: str

    def __str__(self) -> str:
        return f"{self.kernel} for {self.form}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A kind that was right.

    Attributes:
        kernel: as in :class:`Kind`.
        form: likewise.
        calls: how often it was asked, one for each choice between kernels and tiles.
        error: largest error over what is allowed, at most 1.
        ms: time of the check, milliseconds.
    """

    kernel: str
    form: str
    calls: int
    error: float
    ms: float


class _Clock:
    ms = 0.0


_answers: dict[Kind, Answer] = {}


def is_known(kind: Kind) -> bool:
    """Say whether a kind was right in this process already."""
    return kind in _answers


@contextmanager
def timed() -> Iterator[_Clock]:
    """Measure what is done inside, milliseconds, in ``ms`` of what it gives."""
    clock, start = _Clock(), time.perf_counter()
    yield clock
    clock.ms = (time.perf_counter() - start) * 1e3


def settle(
    kind: Kind, error: float, *, calls: int, ms: float, device: torch.device, M: int | None = None
) -> None:
    """Keep that a kind was right, or refuse it.

    Args:
        kind: what was asked.
        error: largest error over what is allowed.
        calls: how often.
        ms: time it took.
        device: where.
        M: at how many tokens the error was found.

    Raises:
        WrongAnswerError: the error is above 1 or no number.
    """
    if error > 1.0:
        raise WrongAnswerError(_complaint(kind, M, error, device))
    _answers[kind] = Answer(kind.kernel, kind.form, calls, error, ms)


Block = Callable[[int, torch.device], Tensor]
"""Rows and device → fp32 activations [rows, K] that the format holds exactly."""


Scale = float | Tensor | None
"""Of all activations where it is static, one element; None where each row or group gets its own."""


def _step(scale: Scale) -> float:
    return _STEP if scale is None else float(scale)


def _codes(rows: int, K: int, levels: int) -> Tensor:
    generator = torch.Generator().manual_seed(K)
    return torch.randint(-levels, levels + 1, (rows, K), generator=generator).float()


def plain_block(K: int) -> Block:
    """Activations that are not quantised: multiples of 2⁻⁶ up to 2.

    Args:
        K: input features.
    """
    return lambda rows, device: (_codes(rows, K, 127) * _STEP).to(device)


def int8_block(K: int, *, symmetric: bool, scale: Scale) -> Block:
    """Activations that int8 holds exactly.

    Args:
        K: input features.
        symmetric: whether a row's scale is by its largest magnitude; else by its range.
        scale: of all activations where it is static; None where each row gets its own.
    """

    def make(rows: int, device: torch.device) -> Tensor:
        codes = _codes(rows, K, 127)
        codes[:, 0] = 127
        if not symmetric:
            codes[:, 1] = -128
        return (codes * _step(scale)).to(device)

    return make


def fp8_block(K: int, *, group: int, scale: Scale) -> Block:
    """Activations that e4m3 holds exactly: whole numbers up to 16, and its largest value, 448.

    Args:
        K: input features.
        group: columns that share a dynamic scale; K for a whole row.
        scale: of all activations where it is static; None where each group gets its own.
    """

    def make(rows: int, device: torch.device) -> Tensor:
        codes = _codes(rows, K, 16)
        if scale is None:
            codes[:, ::group] = 448
        return (codes * _step(scale)).to(device)

    return make


def check(
    kernel: str,
    scheme: str,
    features: tuple[int, int],
    tokens: Sequence[int],
    multiply: Callable[[Tensor], Tensor],
    weight: Callable[[slice], Tensor],
    block: Block,
    dtype: torch.dtype,
    device: torch.device,
    slack: float = 1.0,
) -> None:
    """Check a layer's kernel unless one of its kind was right already.

    Args:
        kernel: class name of the kernel vLLM holds.
        scheme: the format in words, for example ``W4A16 in groups of 128``.
        features: of output and of input, (N, K), of this process's shard.
        tokens: numbers of tokens, one for each choice between kernels and tiles.
        multiply: the layer as it will serve: x [M, K] of ``dtype`` → [M, N].
        weight: rows of the dequantised weights, fp32 [rows, K], on ``device``.
        block: activations that the format holds exactly.
        dtype: of the activations.
        device: where the layer is.
        slack: how many times as much as after sums in fp32 a result may err: Hopper's tensor cores
            add products of e4m3 in 14 bits, which is :data:`FP8_SLACK`.

    Raises:
        WrongAnswerError: an element is off by more than rounding; names the kind, the number of
            tokens and the way out.
    """
    N, K = features
    kind = Kind(kernel, f"{scheme}, {N}x{K}, {str(dtype).removeprefix('torch.')}")
    if is_known(kind) or not tokens:
        return
    worst, at = 0.0, None
    with timed() as clock:
        x = block(max(tokens), device)
        asked = []
        for M in tokens:
            picked = _spread(M, device)
            asked.append((M, x[picked], multiply(x[:M].to(dtype))[picked]))
        for first in range(0, N, _FEATURES):
            rows = slice(first, min(first + _FEATURES, N))
            w = weight(rows)
            for M, inputs, y in asked:
                error = _error(inputs, w, y[:, rows]) / slack
                if error > worst:
                    worst, at = error, M
    settle(kind, worst, calls=len(tokens), ms=clock.ms, device=device, M=at)


def _spread(M: int, device: torch.device) -> Tensor:
    """Return rows spread over M, the first and the last among them.

    In whole numbers: while vLLM loads a model torch's own type is the model's, which may round.
    """
    count = min(M, _ROWS)
    return torch.arange(count, device=device) * (M - 1) // max(count - 1, 1)


def _error(x: Tensor, w: Tensor, y: Tensor) -> float:
    """Return the largest error of y over what is allowed."""
    exact = _product(x, w)
    norm = _product(x.square(), w.square()).sqrt()
    allowed = _OF_RESULT * exact.abs() + _OF_NORM * norm + torch.finfo(torch.float32).tiny
    ratio = (y.float() - exact).abs() / allowed
    return float(ratio.nan_to_num(nan=float("inf")).max())


def _product(x: Tensor, w: Tensor) -> Tensor:
    """Multiply in full fp32, whatever this process allows of TF32."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return x @ w.T
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _complaint(kind: Kind, M: int | None, error: float, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    tokens = "" if M is None else f" at {M} tokens"
    way_out = "serve on vLLM's own kernels with --kernels off (TAUT_KERNELS=off)"
    if kind.kernel.endswith("LinearMethod"):  # vLLM has none for what only we load
        way_out = "serve a checkpoint that 'quantize' made, or the uncompressed model"
    return (
        f"{kind} computes wrong answers{tokens} on {where}: an element is off by {error:.3g} times "
        f"what rounding allows; {way_out}"
    )


def results() -> list[dict[str, Any]]:
    """Return what was right so far, as plain data for the record."""
    return [asdict(answer) for answer in _answers.values()]


def conclude() -> None:
    """Log in one line what was checked while a model was loaded."""
    found = _answers.values()
    if found:
        spent = sum(answer.ms for answer in found) / 1e3
        worst = max(answer.error for answer in found)
        _logger.info(
            "taut known answers: %d kinds right in %.2f s (worst error %.2f of allowed)",
            len(found),
            spent,
            worst,
        )
