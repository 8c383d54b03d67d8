"""On a CPU vLLM looks at a model's class in the process that asks, not in one of its own.

vLLM asks a class what it can do (generate, embed, take images) before it configures an engine, and
starts a process for that, so that nothing initialises CUDA too early. That process imports all of
vLLM, ten seconds of a core at each start whose cache directory is new. A CPU has no CUDA to keep
off, and the class is in a module of the same process a moment later.

Models with a vision part want packages that text does not (torchvision): what is missing ends the
worker in one line, where vLLM ends behind a page of tracebacks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def inspect_here(registry: ModuleType) -> None:
    """Have model classes inspected in this process.

    Args:
        registry: ``vllm.model_executor.models.registry``; one that starts no process stays.
    """
    if hasattr(registry, "_run_in_subprocess"):
        setattr(registry, "_run_in_subprocess", _run_here)  # noqa: B010 - untyped module


def _run_here(inspect: Callable[[], Any]) -> Any:
    try:
        return inspect()
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"taut: vLLM's class of this model imports {error.name}, which is not installed here; "
            "install the one that fits this torch, and start the worker again"
        ) from None
