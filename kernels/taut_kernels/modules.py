"""The training ops as modules: parameters and options here, arithmetic in the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.activation.swiglu import swiglu
from taut_kernels.norm.layer_norm import layer_norm
from taut_kernels.norm.rms_norm_train import add_rms_norm_train, rms_norm_train


class RMSNorm(torch.nn.Module):
    """:func:`~taut_kernels.norm.rms_norm_train.rms_norm_train` with a weight of its own.

    Args:
        hidden_size: N.
        epsilon: added to the mean square.
        device: of the weight.
        dtype: of the weight: that of the inputs, or fp32.
    """

    def __init__(
        self,
        hidden_size: int,
        epsilon: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., N], normalised."""
        return rms_norm_train(x, self.weight, epsilon=self.epsilon)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, normalised, and the sum, the next residual."""
        return add_rms_norm_train(x, residual, self.weight, epsilon=self.epsilon)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}"


class LayerNorm(torch.nn.Module):
    """:func:`~taut_kernels.norm.layer_norm.layer_norm` with parameters of its own.

    Args:
        hidden_size: N.
        epsilon: added to the variance.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters: that of the inputs, or fp32.
    """

    def __init__(
        self,
        hidden_size: int,
        epsilon: float = 1e-5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        zeros = torch.zeros(hidden_size, device=device, dtype=dtype)
        self.bias = torch.nn.Parameter(zeros) if bias else None
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., N], normalised."""
        return layer_norm(x, self.weight, self.bias, epsilon=self.epsilon)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        bias = self.bias is not None
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}, bias={bias}"


class SwiGLU(torch.nn.Module):
    """:func:`~taut_kernels.activation.swiglu.swiglu` of fixed options, without the projections.

    Args:
        alpha: factor inside the sigmoid.
        beta: added to the ups.
        limit: clamp of gates and ups, or None.
    """

    def __init__(self, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None) -> None:
        super().__init__()
        self.alpha, self.beta, self.limit = alpha, beta, limit

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of ``gate`` and ``up`` [..., N]."""
        return swiglu(gate, up, alpha=self.alpha, beta=self.beta, limit=self.limit)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"alpha={self.alpha}, beta={self.beta}, limit={self.limit}"
