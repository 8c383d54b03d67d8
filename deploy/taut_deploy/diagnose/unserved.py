"""What vLLM loads nowhere, or not on a CPU, though a checkpoint can say it.

Read from the sources of vLLM 0.26 and 0.32, which agree here; ``tests/deploy/compress/
test_vllm_tensors.py`` holds the installed one to it. Known before a model is compressed, so that
nobody waits for a checkpoint that dies as it is loaded.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from taut_deploy.diagnose.entry_values import kinds_of

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

_INT4_BY_FP8_GROUP = 128
_CPU_EXPERTS_BITS = 4
_TOO_SMALL_ON_CPU = 32


@dataclass(frozen=True, slots=True)
class Unserved:
    """Why vLLM loads no layer of a kind; each reason None where it does.

    Attributes:
        layer: any layer, on any device.
        expert: one of many experts, on any device.
        expert_on_cpu: one of many experts, on a CPU.
    """

    layer: str | None = None
    expert: str | None = None
    expert_on_cpu: str | None = None

    def why(self, name: str, device: Literal["cpu", "cuda"]) -> str | None:
        """Say why a layer is not loaded on a device, None where it is.

        Args:
            name: full name, for example ``model.layers.0.mlp.experts.3.down_proj``.
            device: ``cpu`` or ``cuda``.
        """
        if self.layer is not None or ".experts." not in name:
            return self.layer
        return self.expert or (self.expert_on_cpu if device == "cpu" else None)

    def any(self, device: Literal["cpu", "cuda"]) -> bool:
        """Say whether some layer of this kind is not loaded on a device.

        Args:
            device: ``cpu`` or ``cuda``.
        """
        return self.why(".experts.", device) is not None


SERVED = Unserved()


def of_group(weights: "QuantizationArgs", inputs: "QuantizationArgs | None") -> Unserved:
    """Return what vLLM does not load of a config group of compressed-tensors.

    Args:
        weights: of the group.
        inputs: of the group, None for inputs in 16 bits.
    """
    match kinds_of(weights, inputs):
        case [("int", int(bits))]:
            return _integers_alone(bits, weights.group_size, zero_points=not weights.symmetric)
        case [("int", 4), ("float", 8)] if weights.group_size != _INT4_BY_FP8_GROUP:
            return Unserved("vLLM's INT4 × FP8 product takes groups of 128 alone")
        case [("int", 4), ("int", 8)]:
            return Unserved(
                expert="vLLM reads experts of INT4 weights and INT8 inputs unpacked, and they are "
                "stored packed"
            )
        case [("float", 8), ("float", 8)] if _by_channel_for_fixed_inputs(weights, inputs):
            return Unserved(
                expert="vLLM takes experts of FP8 weights by channel with inputs rounded by token "
                "alone"
            )
    return SERVED


def of_weights_alone(bits: int, group_size: int | None, *, zero_points: bool = False) -> Unserved:
    """Return what vLLM does not load of a method whose weights alone are integers.

    Args:
        bits: of a weight.
        group_size: weights a scale covers; None or -1 for a row.
        zero_points: whether there are any.
    """
    why = None
    if bits != _CPU_EXPERTS_BITS:
        why = f"vLLM has no kernel for experts of {bits}-bit weights on a CPU"
    elif zero_points or group_size == _TOO_SMALL_ON_CPU:
        what = "with zero points" if zero_points else f"in groups of {group_size}"
        why = f"vLLM has no kernel for experts of 4-bit weights {what} on a CPU"
    return Unserved(expert_on_cpu=why)


def _integers_alone(bits: int, group_size: int | None, *, zero_points: bool) -> Unserved:
    layer = expert = None
    if 32 % bits:
        layer = (
            f"vLLM reads weights of {bits} bits without gaps, and compressed-tensors stores "
            f"{32 // bits} in a word"
        )
    if bits > _CPU_EXPERTS_BITS and zero_points:
        expert = f"vLLM has no kernel for experts of {bits}-bit weights with zero points"
    on_cpu = of_weights_alone(bits, group_size, zero_points=zero_points)
    return replace(on_cpu, layer=layer, expert=expert)


def _by_channel_for_fixed_inputs(
    weights: "QuantizationArgs", inputs: "QuantizationArgs | None"
) -> bool:
    return weights.strategy == "channel" and inputs is not None and inputs.strategy == "tensor"
