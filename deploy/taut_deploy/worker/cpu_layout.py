"""Processes and threads of a worker on a CPU.

vLLM gives a CPU model a process of its own, and the engine's process waits for it in a loop that
yields but never sleeps: each token costs a second core, and a health check a second of it. Where
one process can hold both, a worker asks for that. vLLM then leaves OpenMP's threads to the
environment, which is written here.
"""

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from taut_deploy.vllm_flags import PARALLEL_FLAGS, is_eager, names_one_of

_TOPOLOGY = Path("/sys/devices/system")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""``0``: engine and model share a process."""
DYNAMO = "TORCHDYNAMO_DISABLE"
"""``1``: what torch is told to compile runs as it is."""
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_EXECUTOR_FLAGS = (*PARALLEL_FLAGS, "--distributed-executor-backend", "--nnodes", "-n")
_OPENMP = ("libomp", "libgomp", "libiomp")


@dataclass(frozen=True)
class Cores:
    """What this process may compute on.

    Args:
        count: physical cores, within the quota of its control group.
        nodes: NUMA nodes they lie on.
    """

    count: int
    nodes: int


def cores_here(
    allowed: Iterable[int] | None = None, topology: Path = _TOPOLOGY, quota: Path = _QUOTA
) -> Cores:
    """Count the cores of this process.

    Args:
        allowed: logical CPUs it may run on; None asks the kernel.
        topology: where Linux describes CPUs and NUMA nodes.
        quota: the control group's ``cpu.max``.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    cpus = frozenset(allowed)
    described = topology / "cpu"
    cores = {
        _ids(described / f"cpu{cpu}/topology/thread_siblings_list") or frozenset({cpu})
        for cpu in cpus
    }
    listings = topology.glob("node/node[0-9]*/cpulist")
    nodes = [listing for listing in listings if cpus & _ids(listing)]
    return Cores(max(1, min(len(cores), _whole_cores(quota))), max(1, len(nodes)))


def environment_of(
    extra: Sequence[str], environment: Mapping[str, str], cores: Cores, workers: int = 1
) -> dict[str, str]:
    """Return what to add to a CPU worker's environment.

    Empty where vLLM's own layout is to stay: for several ranks or NUMA nodes, and where somebody
    chose an executor or bound threads by vLLM's own variables.

    Args:
        extra: arguments for vLLM.
        environment: what the worker inherits; what it says of OpenMP stays.
        cores: of this machine.
        workers: as many share the cores.
    """
    is_chosen = environment.get(ONE_PROCESS) or environment.get(_BINDING)
    if is_chosen or cores.nodes > 1 or names_one_of(extra, _EXECUTOR_FLAGS):
        return {}
    added = {ONE_PROCESS: "0"}
    if not environment.get("OMP_NUM_THREADS"):
        # One core is left to the API's process and to the gateway, as vLLM leaves one: threads
        # that wait for a thread without a core multiply a step's time.
        added["OMP_NUM_THREADS"] = str(max(1, (cores.count - 1) // workers))
    return added


def without_compiler(extra: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what keeps Inductor out of a worker that compiles nothing (``--enforce-eager``).

    vLLM has it compile a small function of log-probabilities all the same: 13 CPU-seconds of g++
    while the first request for them waits.

    Args:
        extra: arguments for vLLM.
        environment: what the worker inherits; what it says itself stays.
    """
    return {DYNAMO: "1"} if is_eager(extra) and not environment.get(DYNAMO) else {}


def before_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what vLLM writes for an engine that it starts anew; a forked one needs it earlier.

    Args:
        environment: what the worker inherits; an OpenMP library that it loads first stays.
    """
    added = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
    first = environment.get("LD_PRELOAD", "")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or any(name in first for name in _OPENMP):
        return added
    # Bound to cores, threads of another OpenMP than torch's own would share one.
    package = Path(torch.origin).parent
    for folder in (package.parent / "torch.libs", package / "lib"):
        if found := sorted(folder.glob("libgomp*.so*")):
            return added | {"LD_PRELOAD": ":".join(filter(None, (first, str(found[0]))))}
    return added


def _ids(listing: Path) -> frozenset[int]:
    """Read a list of CPUs such as ``0-3,8``; empty where there is none."""
    try:
        text = listing.read_text(encoding="ascii").strip()
    except OSError:
        return frozenset()
    spans = [part.partition("-") for part in text.split(",") if part]
    return frozenset(
        cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)
    )


def _whole_cores(quota: Path) -> int:
    """Return how many cores a control group may keep busy, rounded up; a large number without."""
    try:
        limit, _, period = quota.read_text(encoding="ascii").strip().partition(" ")
    except OSError:
        limit, period = "max", ""
    return 1 << 30 if limit == "max" else -(-int(limit) // int(period))
