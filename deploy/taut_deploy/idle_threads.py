"""Has OpenMP's threads sleep while they wait for each other, in this process alone.

libgomp has them spin for some milliseconds. Where other work shares the cores, a thread that spins
keeps the one that it waits for from running: SmolLM2 and its W8A8 took 6 to 13 CPU seconds for a
sequence of 256 tokens on two busy cores that take 1.3 with sleeping threads.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LIBRARY = "torch"
_POLICY = "OMP_WAIT_POLICY"
_CHOICES = (_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def let_threads_sleep() -> None:
    """Have torch be loaded so, whoever imports it first; without effect where that has happened.

    libgomp reads its settings at that moment. The environment is as before afterwards: workers that
    this process starts serve with the threads they were tuned for. What a user has chosen stays.
    """
    if _LIBRARY in sys.modules or any(isinstance(one, _Finder) for one in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())


@contextmanager
def sleeping() -> Iterator[None]:
    """Let what loads torch meanwhile do so: this process, or one that begins and computes.

    What a user has chosen stays.
    """
    if any(os.environ.get(name) for name in _CHOICES):
        yield
        return
    before = os.environ.get(_POLICY)
    os.environ[_POLICY] = "passive"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_POLICY]
        else:
            os.environ[_POLICY] = before


class _Finder(MetaPathFinder):
    """Finds torch where Python does, and has it loaded with the settings."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIBRARY:
            return None
        found = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Python's own loader of a module, in an environment of its own."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What asks a module for its loader gets the one that knows its source.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with sleeping():
            self._loader.exec_module(module)
