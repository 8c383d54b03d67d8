"""Which kernel will serve each layer of a checkpoint that is not made yet."""

from collections.abc import Mapping
from typing import Any

from taut_deploy.compress.formats.config import quantization_config
from taut_deploy.compress.resolve import Treatment
from taut_deploy.diagnose import default_kernels, kernel_choice
from taut_deploy.diagnose.layer_schemes import DENSE, read_quantization
from taut_deploy.diagnose.layers import fuse, fused_name


def kernels_of(
    treatments: Mapping[str, Treatment], config: Mapping[str, Any], served_by: str
) -> dict[str, str]:
    """Name the kernel of every layer, with what is against ours where it is another's.

    Args:
        treatments: of every linear layer of the blocks, by full name.
        config: the base model's ``config.json``.
        served_by: ``here``, ``cpu`` or a card of :data:`kernel_choice.CARDS`.

    Returns:
        By full name; layers that vLLM joins have the kernel of the joined one.
    """
    formats = {name: one.format for name, one in treatments.items() if one.format is not None}
    shapes = {name: one.shape for name, one in treatments.items()}
    entry = quantization_config(formats, shapes, [])
    told = read_quantization({} if entry is None else {"quantization_config": entry})
    layers = {
        name: (*one.shape, told.scheme_of(name) if name in formats else DENSE)
        for name, one in treatments.items()
    }
    half = config.get("dtype", config.get("torch_dtype")) == "float16"
    suited = default_kernels.suits_fused_ops(config, ())
    engine = kernel_choice.engine_of(served_by, half=half, suited=suited)
    chosen = {
        name: kernel_choice.choose_kernel(name, scheme, (n, k), engine)
        for name, (n, k, scheme) in fuse(layers).items()
    }
    words = {name: f"{kernel} ({why})" if why else kernel for name, (kernel, why) in chosen.items()}
    return {name: words[fused_name(name)] for name in layers}
