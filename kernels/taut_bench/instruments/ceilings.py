"""What the machine at hand can do at most: its copy rate and its matrix rate by dtype, measured.

On CUDA the copy is the kernel of :mod:`.timing` (1 GiB, in a graph) and the
matrix product cuBLAS's on 8192³; on a CPU torch's own copy of 256 MiB and its product of 2048³
(fp32) or 1024³. A ceiling is the best of several runs on a CPU, where neighbours only take away,
and the median of replays on a GPU. Figures are kept in a JSON file by device, torch version and
number of threads, since measuring takes seconds; the same key gives the same figures until the file
is deleted or measuring anew is asked for. What was measured on a busy CPU is too low: it is used,
with a warning, and not kept.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from taut_bench.instruments.errors import InstrumentError
from taut_kernels.launch.atomic_write import write_whole

# Our own threads have not run yet when the load is read: an idle machine shows nearly 0.
_BUSY_LOAD = 0.3
_COPY_BYTES = 256 * 2**20
_CPU_RUNS, _CPU_SECONDS = 7, 1.0
_CUDA_SIZE = 8192
_FP8 = torch.float8_e4m3fn


@dataclass
class Ceilings:
    """Limits of one device.

    Attributes:
        device: its name, torch's version and the number of threads.
        copy_bytes_per_s: read and written together.
        matrix_flops_per_s: dtype → FLOP/s (integer operations for int8).
        not_measured: dtype → why there is no figure.
        measured: date.
        load: processes that wanted to run then, for each CPU; 0 for a GPU.
    """

    device: str
    copy_bytes_per_s: float
    matrix_flops_per_s: dict[str, float] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    measured: str = ""
    load: float = 0.0

    @property
    def too_low(self) -> bool:
        """Say whether other work took part of the machine while it was measured."""
        return self.load > _BUSY_LOAD

    def as_json(self) -> dict[str, Any]:
        """The ceilings as plain data."""
        return asdict(self)

    def attainable(self, intensity: float, dtype: torch.dtype) -> float:
        """FLOP/s that the roofline allows at an intensity in FLOPs a byte."""
        by_memory = intensity * self.copy_bytes_per_s
        return min(by_memory, self.matrix_flops_per_s.get(dtype_name(dtype), float("inf")))

    def ridge(self, dtype: torch.dtype) -> float | None:
        """Intensity from which the matrix rate limits; None where that was not measured."""
        rate = self.matrix_flops_per_s.get(dtype_name(dtype))
        return None if rate is None else rate / self.copy_bytes_per_s


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def device_key(device: torch.device) -> str:
    """Name what figures depend on: the device, torch's version, the number of threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{_cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measured(
    device: torch.device,
    dtypes: list[torch.dtype],
    cache: Path | None = None,
    *,
    again: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Ceilings:
    """Return the device's ceilings, from the cache where they are in it.

    Args:
        device: what to measure.
        dtypes: whose matrix rate is wanted.
        cache: JSON file that is read and extended; None keeps nothing.
        again: measure although the cache has figures.
        say: told what is being measured.

    Raises:
        InstrumentError: the cache is not what this module writes, or cannot be written.
    """
    key = device_key(device)
    kept = _read_cache(cache)
    found = None if again else kept.get(key)
    missing = [
        dtype
        for dtype in dict.fromkeys(dtypes)
        if found is None or dtype_name(dtype) not in found.matrix_flops_per_s | found.not_measured
    ]
    if found is None:
        say(f"measuring the copy rate of {key}")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        load = _load(device)
        found = Ceilings(key, _copy_rate(device), measured=today, load=load)
        if found.too_low:
            say(f"the machine is busy (load {load:.1f} a CPU): ceilings are too low, not kept")
    elif not missing:
        return found
    for dtype in missing:
        say(f"measuring the {dtype_name(dtype)} matrix rate")
        try:
            found.matrix_flops_per_s[dtype_name(dtype)] = _matrix_rate(device, dtype)
        except (RuntimeError, NotImplementedError) as error:
            # A dtype without a matrix product on this device is a fact to report, not a failure.
            found.not_measured[dtype_name(dtype)] = str(error).splitlines()[0]
    if not found.too_low:
        kept[key] = found
        _write_cache(cache, kept)
    return found


def _load(device: torch.device) -> float:
    if device.type == "cuda":
        return 0.0
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _read_cache(cache: Path | None) -> dict[str, Ceilings]:
    if cache is None or not cache.exists():
        return {}
    try:
        entries = json.loads(cache.read_text(encoding="utf-8"))
        return {key: Ceilings(**entry) for key, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InstrumentError(
            f"{cache}: unreadable ({error}); delete it to measure anew"
        ) from error


def _write_cache(cache: Path | None, kept: dict[str, Ceilings]) -> None:
    if cache is None:
        return
    text = json.dumps({key: asdict(entry) for key, entry in kept.items()}, indent=1)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cache, text)
    except OSError as error:
        raise InstrumentError(f"{cache}: cannot be written: {error.strerror}") from error


def _copy_rate(device: torch.device) -> float:
    if device.type == "cuda":
        from taut_kernels.tuner import timing

        return timing.copy_ceiling()
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best(lambda: target.copy_(source))


def _best(call: Callable[[], object]) -> float:
    call()
    times: list[float] = []
    while len(times) < _CPU_RUNS or sum(times) < _CPU_SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    cpu_size = 2048 if dtype is torch.float32 else 1024
    size = _CUDA_SIZE if device.type == "cuda" else cpu_size
    call = _product(size, device, dtype)
    call()  # raises where the device has no such product
    if device.type == "cuda":
        from taut_kernels.tuner import timing

        subject = timing.Subject("product", lambda _: call(), 1)
        seconds = timing.measure([subject], replays=20, min_calls=10)[0].median * 1e-6
    else:
        seconds = _best(call)
    return 2 * size**3 / seconds


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    if dtype is torch.int8:
        a = torch.randint(-100, 100, (size, size), dtype=dtype, device=device)
        return lambda: torch._int_mm(a, a.t())
    values = torch.randn(size, size, device=device)
    if dtype is _FP8:
        eight = values.to(dtype)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            eight, eight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
    b = values.to(dtype)
    return lambda: torch.mm(b, b)
