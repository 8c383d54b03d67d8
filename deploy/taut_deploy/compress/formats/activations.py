"""How a layer's inputs are rounded before the product, and how a checkpoint says so."""

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs

from taut_deploy.compress.quantize.float8 import FP8_MAX, fake_quantize_tokens_fp8, round_fp8
from taut_deploy.compress.quantize.grid import fake_quantize_tokens


def _eight_bits(
    kind: str, strategy: str, *, dynamic: bool, group_size: int | None = None
) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=8,
        type=kind,
        symmetric=True,
        strategy=strategy,
        dynamic=dynamic,
        group_size=group_size,
    )


@dataclass(frozen=True)
class Activations:
    """Inputs in 16 bits: left as they are."""

    def round(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """An input [..., K] as the engine rounds it.

        Args:
            x: any float dtype, which the result has too.
            scale: from :meth:`scale`, where scales are fixed beforehand.
        """
        del scale
        return x

    def scale(self, absmax: torch.Tensor) -> torch.Tensor | None:
        """The scale to fix beforehand for inputs of this absmax [K]; None where none is."""
        del absmax
        return None

    @property
    def arguments(self) -> QuantizationArgs | None:
        """``input_activations`` of a config group."""
        return None


@dataclass(frozen=True)
class Int8PerToken(Activations):
    """Signed 8-bit integers, symmetric, one scale per token taken from that token."""

    def round(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """An input as vLLM rounds it: ``absmax / 127`` is one step."""
        del scale
        return fake_quantize_tokens(x)

    @property
    def arguments(self) -> QuantizationArgs:
        """``input_activations`` of a config group."""
        return _eight_bits("int", "token", dynamic=True)


@dataclass(frozen=True)
class Float8Dynamic(Activations):
    """FP8 (e4m3), one scale per token, or per group of its channels, taken from those.

    Args:
        group_size: channels a scale covers, a divisor of K; None for all of a token.
    """

    group_size: int | None = None

    def round(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """An input as vLLM rounds it: ``absmax / 448`` is one."""
        del scale
        return fake_quantize_tokens_fp8(x, self.group_size)

    @property
    def arguments(self) -> QuantizationArgs:
        """``input_activations`` of a config group."""
        strategy = "token" if self.group_size is None else "group"
        return _eight_bits("float", strategy, dynamic=True, group_size=self.group_size)


@dataclass(frozen=True)
class Float8Fixed(Activations):
    """FP8 (e4m3), one scale for all inputs of a layer, taken from calibration.

    Args:
        scale_dtype: dtype the scale is stored in.
    """

    scale_dtype: torch.dtype

    def round(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """An input as vLLM rounds it; what is beyond the calibrated range becomes its end."""
        if scale is None:
            raise TypeError("a scale fixed beforehand is needed")
        step = scale.to(x.device, torch.float32)
        return round_fp8(x.float() / step).mul_(step).to(x.dtype)

    def scale(self, absmax: torch.Tensor) -> torch.Tensor:
        """The scale [1] that spans the largest input seen."""
        largest = absmax.amax().reshape(1).clamp(min=1e-10)
        return (largest / FP8_MAX).to(self.scale_dtype)

    @property
    def arguments(self) -> QuantizationArgs:
        """``input_activations`` of a config group."""
        return _eight_bits("float", "tensor", dynamic=False)
