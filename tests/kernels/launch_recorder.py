"""Triton as on a Hopper card that is not there: what launches would compile, on any machine.

Triton itself looks at every launch (types, alignments, ones, multiples of 16, constants, options).
Only its driver and its compiler are replaced: the compiler notes what it is asked for, there where
vLLM's JIT monitor listens. For a process of its own: nothing is put back. Launches may have meta
tensors, which have shapes without memory.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from taut_kernels.launch import launcher


class Driver:
    """Triton's driver of a Hopper card that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A kernel that does nothing, and counts."""

    function = packed_metadata = 0
    launches = 0

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        Compiled.launches += 1


class Compiler:
    """What was compiled since all forms were forgotten, in order: kernel and Triton's own key."""

    def __init__(self) -> None:
        self.forms: list[str] = []
        self._used: set[JITFunction[Any]] = set()
        self._kept: dict[launcher.Form, Compiled] = {}
        self._known: list[launcher.Form] = []

    def __call__(self, kernel: JITFunction[Any], key: Any) -> Compiled:
        self.forms.append(f"{kernel._fn_name.rpartition('.')[2]} {key}")
        self._used.add(kernel)
        compiled = kernel.device_caches[0][0][key] = Compiled()
        return compiled

    def forget_forms(self) -> None:
        """Start as a fresh process."""
        self.forget_keys()
        for kernel in self._used:
            kernel.device_caches.clear()
        self._used.clear()
        self._kept.clear()
        self.forms.clear()

    def forget_keys(self) -> None:
        """Let Triton itself look at the next launches: our launchers know none of them.

        A key of a launcher must stand for one form of Triton's, whatever was launched first.
        """
        for form in self._known:
            kept = self._kept.setdefault(form, form._compiled)
            assert kept is form._compiled, f"{form._kernel._fn_name} {form._values}"
            # In place: plans keep forms.
            form._compiled = None
        self._known.clear()

    def note_what_is_known(self) -> None:
        """Note each form that keeps what was compiled: a look at all of them takes a millisecond,
        which the launches between two looks do not take.
        """
        keep = launcher.Form._keep

        def keep_and_note(form: launcher.Form, compiled: Any) -> None:
            keep(form, compiled)
            self._known.append(form)

        launcher.Form._keep = keep_and_note


def pretend_hopper() -> Compiler:
    """Replace Triton's driver and compiler, and what launchers ask about the card."""
    pretend_card()
    compiler = Compiler()
    compiler.note_what_is_known()
    JITFunction._do_compile = lambda self, key, *rest: compiler(self, key)
    return compiler


def pretend_card() -> None:
    """Replace Triton's driver, and what launchers ask about the card; Triton compiles."""
    triton.runtime.driver.set_active(Driver())
    launcher.capability = lambda device: (9, 0)
    launcher.multiprocessors = lambda device: 132
