"""Runs checks of a script, each in a process of its own that begins behind the script's imports.

Usage: ``python forked_checks.py SCRIPT``, as ``check_server.CheckServer`` does. Importing torch,
Triton or vLLM takes some seconds, so that a start a check took longer than most checks. Here the
script is imported once; a check is a fork of that process, and what it changes or breaks ends with
it. A line of stdin is a request in JSON, a line of stdout the exit status it ended with.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def load(path: Path) -> ModuleType:
    """Import a script by its path; its ``main`` takes names of checks.

    Neither the import nor a check searches for garbage in what the import makes: a fifth of it.
    """
    gc.disable()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    gc.freeze()
    gc.enable()
    return module


def patch_language_once() -> None:
    """Let a device function's call leave ``triton.language`` alone where its kernel changed it.

    While a kernel is interpreted, the builtins of the modules it sees are replaced. Triton 3.9
    looks for more of them in every call of a device function, a third of all the time, and finds
    none: what was replaced is no builtin any more.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_what_is_left(function: Any) -> Any:
        seen = [module for module in function.__globals__.values() if module in (tl, tl.core)]
        if seen and not any(tl.core.is_builtin(module.load) for module in seen):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patch_what_is_left


def drop_unread_checks() -> None:
    """Let the interpreter work out no overflow that nobody is told of.

    For every sum and product of integers Triton 3.9 compares a second one, in 64 bits, with the
    bounds, and hands the answer to an assertion, which without ``debug`` looks at nothing. In
    kernels that reckon with integers it is three fifths of all the time.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """Let the interpreter make each type of a block once, and look plain values over no further.

    Triton 3.9 checks the shape of every result anew, wraps its sizes, and writes the table of
    numpy's types for each question to it: a third of all the time. A shape that is refused is
    refused each time.
    """
    import triton.language.core as core
    from triton.runtime import interpreter

    core.block_type.__init__ = _of_kept_blocks(core)  # type: ignore[method-assign]
    core.tensor.__init__ = _of_kept_shapes(core)  # type: ignore[method-assign]
    core._unwrap_if_constexpr = _unwrapping(core)
    find, found = interpreter._get_np_dtype, dict[Any, Any]()

    def numpy_type(kind: Any) -> Any:
        key = (type(kind), kind.name)
        if key not in found:
            found[key] = find(kind)
        return found[key]

    interpreter._get_np_dtype = numpy_type


def _of_kept_blocks(core: ModuleType) -> Any:
    """``block_type.__init__`` that knows what it made of an element's type and a shape."""
    make, known = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def begin(self: Any, element_ty: Any, shape: Any) -> None:
        plain = type(element_ty) is core.dtype and type(shape) in (list, core.tuple)
        key = (element_ty.name, *shape) if plain else ()
        if not plain or not all(type(size) is int for size in key[1:]):
            make(self, element_ty, shape)
        elif key in known:
            self.__dict__.update(known[key])
        else:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)

    return begin


def _of_kept_shapes(core: ModuleType) -> Any:
    """``tensor.__init__`` that wraps the sizes of each shape once."""
    make, known = core.tensor.__init__, dict[Any, Any]()

    def begin(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()  # comparing theirs takes long
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = (self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[sizes]

    return begin


def _unwrapping(core: ModuleType) -> Any:
    """``_unwrap_if_constexpr`` that sees at once what holds nothing."""
    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, int, float, bool, str, type(None)}

    def at_once(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    return at_once


def run(module: ModuleType, request: dict[str, Any]) -> int:
    """Run the checks of a request in a fork; return its exit status, negative for a signal."""
    if (child := os.fork()) == 0:
        _be_the_check(module, request)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _be_the_check(module: ModuleType, request: dict[str, Any]) -> None:
    """Run the checks and end, whatever happens: nothing of the parent's may go on here."""
    code = 1
    try:
        signal.alarm(request["timeout"])  # nobody takes it: it ends this process
        os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)  # the parent's has requests
        for stream, path in ((1, request["stdout"]), (2, request["stderr"])):
            os.dup2(os.open(path, os.O_WRONLY), stream)
        os.environ.update(request["env"])
        module.main(request["names"])
        code = 0
    except SystemExit as ending:
        code = _status(ending)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _status(ending: SystemExit) -> int:
    """The exit status that Python would end with, and what it would say."""
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)
    return 1


def main(script: str) -> None:
    """Serve requests until stdin ends."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_language_once()
        drop_unread_checks()
        remember_types()
    module = load(Path(script))
    for line in sys.stdin:
        print(run(module, json.loads(line)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
