"""Run by test_vllm_tensors.py: what stock vLLM makes of checkpoints, before a kernel repacks it.

Usage: ``python load_in_vllm.py load FILE`` with a JSON list of directories, or ``kernels``. Kernels
are left out, so that formats of other machines are laid out here, too.
"""

import contextlib
import functools
import importlib
import itertools
import json
import pkgutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.compressed_tensors import (
    compressed_tensors,
    compressed_tensors_moe,
    schemes,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


class NoKernel:
    """In place of the class that would multiply a layer; it knows nothing of it."""

    def __init__(self, *rest: object, **options: object) -> None:
        pass

    def __getattr__(self, name: str):
        return lambda *rest, **options: None


def modules_of(package):
    """Those that can be imported on this machine."""
    for found in pkgutil.iter_modules(package.__path__):
        try:
            yield importlib.import_module(f"{package.__name__}.{found.name}")
        except ImportError:  # of another vendor's libraries
            continue


def leave_kernels_out() -> None:
    """Make vLLM choose no kernel for layers and experts; parameters do not depend on it."""
    choices = {"_moe_backend": lambda *_, **__: (None, None), "_linear_kernel": NoKernel}
    choices["choose_mp_linear_kernel"] = lambda *_: NoKernel
    for module in (*modules_of(compressed_tensors_moe), *modules_of(schemes)):
        for name in dir(module):
            chosen = [value for end, value in choices.items() if name.endswith(end)]
            if chosen and name.startswith(("select_", "init_", "choose_")):
                setattr(module, name, chosen[-1])
    config = compressed_tensors.CompressedTensorsConfig
    config._check_scheme_supported = staticmethod(lambda *rest, **options: True)


def load(directory: str) -> str | None:
    """Write what vLLM loaded beside a checkpoint; why it did not, where it did not."""
    try:
        options = EngineArgs(directory, max_model_len=64, enforce_eager=True, dtype="bfloat16")
        config = options.create_engine_config()
        with set_current_vllm_config(config):
            start_once()
            with set_default_torch_dtype(torch.bfloat16):
                model = initialize_model(config)
                get_model_loader(config.load_config).load_weights(model, config.model_config)
    except (AssertionError, ValueError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    loaded = {name: value.clone() for name, value in model.named_parameters()}
    save_file(loaded, Path(directory).parent / "loaded.safetensors")
    return None


@functools.cache
def start_once() -> None:
    """Be a group of one process."""
    place = Path(tempfile.mkdtemp()) / "group"
    init_distributed_environment(1, 0, f"file://{place}", 0, backend="gloo")
    initialize_model_parallel()


def kernels() -> dict[str, list[str]]:
    """By bits, group size and zero points: devices with a kernel for experts of such weights."""
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    (module,) = (
        module
        for module in modules_of(compressed_tensors_moe)
        if module.__name__.endswith("_moe_wna16")
    )
    method = module.CompressedTensorsWNA16MoEMethod
    method.__mro__[1].__init__ = lambda self, moe: setattr(self, "moe", moe)
    asked: list[object] = []

    def note(*, weight_key, **_):
        asked.append(weight_key)
        raise StopIteration

    module.select_wna16_moe_backend = note
    backends = {"cuda": ("MARLIN", "TRITON"), "cpu": ("CPU",)}
    found = {}
    for bits, group, zeros in itertools.product((4, 8), (32, 64, None), (False, True)):
        strategy = "channel" if group is None else "group"
        arguments = QuantizationArgs(
            num_bits=bits, type="int", symmetric=not zeros, strategy=strategy, group_size=group
        )
        with contextlib.suppress(StopIteration):
            method(arguments, None, None)
        found[f"{bits} {group} {zeros}"] = [
            device
            for device, names in backends.items()
            if any(
                kernel._supports_quant_scheme(asked[-1], None)
                for name in names
                for kernel in int_wna16.backend_to_kernel_cls(int_wna16.WNA16MoEBackend[name])
            )
        ]
    return found


if __name__ == "__main__":
    if sys.argv[1] == "kernels":
        result = kernels()
    else:
        leave_kernels_out()
        result = {one: load(one) for one in json.loads(Path(sys.argv[2]).read_text())}
    sys.stdout.write("\nREAD " + json.dumps(result) + "\n")
