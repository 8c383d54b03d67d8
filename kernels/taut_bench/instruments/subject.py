"""What an instrument looks at: a callable with its inputs on one device.

A user's callable is named ``module:attribute`` or ``file.py:attribute``; its inputs come from a
factory named the same way. The factory is called with the device it should put tensors on if it has
a parameter ``device``, without arguments otherwise, and returns one tensor, a tuple of positional
arguments, or a dict of keyword arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from taut_bench.instruments.errors import InstrumentError

DEFAULT_INPUTS = "example_inputs"
"""Name of the factory that is looked for beside a callable when none is given."""


@dataclass(frozen=True)
class Subject:
    """A callable with its inputs.

    Args:
        name: shown in reports.
        call: a function or an `nn.Module`.
        args: positional arguments; the same tensors on every step.
        kwargs: keyword arguments, likewise.
        device: where the tensors are.
        backward: a step also runs the gradients of the sum of all floating outputs.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    device: torch.device
    kwargs: dict[str, Any] = field(default_factory=dict)
    backward: bool = False

    def step(self) -> Any:
        """Run once and return what the callable returned; with ``backward``, gradients as well."""
        if not self.backward:
            with torch.no_grad():
                return self.call(*self.args, **self.kwargs)
        for leaf in self.leaves():
            leaf.grad = None
        result = self.call(*self.args, **self.kwargs)
        self.total(result).backward()  # type: ignore[no-untyped-call]
        return result

    def try_out(self) -> None:
        """Run twice, so that a mistake in the callable is found before anything is measured.

        Raises:
            InstrumentError: the callable raised, or ended the process; names the exception and the
                line. Or it returned what has not run yet.
        """
        for note in ("", " (its second run: an instrument repeats a step)"):
            try:
                result = self.step()
            except InstrumentError:
                raise
            except (Exception, SystemExit) as error:  # code that is not ours may raise anything
                hint = "" if self.backward else _hint_at_gradients(error)
                message = f"{self.name}: {_described(error)}{note}{hint}"
                raise InstrumentError(message) from error
            if isinstance(result, _NOT_RUN_YET):
                if isinstance(result, CoroutineType):
                    result.close()  # or Python warns that nobody awaited it
                raise InstrumentError(
                    f"{self.name}: returns a {type(result).__name__}, whose code has not run: give "
                    "a function that runs it and returns tensors"
                )
            del result  # before the second run needs its memory

    def total(self, result: Any) -> Tensor:
        """Sum the floating outputs: the scalar whose gradient a training step asks for.

        Raises:
            InstrumentError: no output has a gradient.
        """
        parts = [tensor.sum() for tensor in tensors_in(result) if tensor.requires_grad]
        if not parts:
            raise InstrumentError(
                f"{self.name}: --backward needs an output with a gradient; let an input or a "
                "parameter require one"
            )
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def leaves(self) -> list[Tensor]:
        """Inputs and parameters that collect a gradient."""
        found = [*tensors_in((self.args, self.kwargs)), *self.parameters()]
        return [tensor for tensor in found if tensor.requires_grad and tensor.is_leaf]

    def parameters(self) -> Iterator[Tensor]:
        """Parameters of the callable, where it is a module."""
        if isinstance(self.call, torch.nn.Module):
            yield from self.call.parameters()

    def dtype(self) -> torch.dtype:
        """The type of the first floating input or parameter; fp32 where there is none."""
        for tensor in [*tensors_in((self.args, self.kwargs)), *self.parameters()]:
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.float32


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, dicts and model outputs."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return what a tensor's memory is made of: a sparse one's indices and values, else itself."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def resolve_device(wanted: str) -> torch.device:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device.

    Args:
        wanted: ``auto`` takes CUDA where there is a device and the CPU elsewhere.

    Raises:
        InstrumentError: not one of the three, or CUDA was asked for and there is none.
    """
    if wanted not in {"auto", "cpu", "cuda"}:
        raise InstrumentError(f"--device {wanted}: use auto, cpu or cuda")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InstrumentError("--device cuda: this machine has no CUDA device that torch can use")
    return torch.device(wanted)


def from_reference(
    reference: str, inputs: str | None, device: torch.device, *, backward: bool = False
) -> Subject:
    """Build a subject from a user's callable.

    Args:
        reference: ``module:attribute`` or ``file.py:attribute``; a class of `nn.Module` is
            instantiated without arguments, a module is moved to ``device``.
        inputs: the factory, named likewise; None looks for ``example_inputs`` beside the callable.
        device: where the tensors go.
        backward: a step runs the gradients as well.

    Raises:
        InstrumentError: a name cannot be found, or the factory returns something else.
    """
    call = load_attribute(reference)
    if inputs is None:
        inputs = f"{reference.rpartition(':')[0]}:{DEFAULT_INPUTS}"
        if not hasattr(_load_module(reference), DEFAULT_INPUTS):
            raise InstrumentError(
                f"{reference}: no inputs; name a factory with --inputs module:function, or define "
                f"{DEFAULT_INPUTS}() beside the callable"
            )
    if isinstance(call, type) and issubclass(call, torch.nn.Module):
        try:
            call = call()
        except TypeError as error:
            raise InstrumentError(
                f"{reference}: cannot be made without arguments ({error}); give a function that "
                "makes it, or an instance"
            ) from error
        except (Exception, SystemExit) as error:  # code that is not ours may raise anything
            raise InstrumentError(f"{reference}: making it {_described(error)}") from error
    if isinstance(call, torch.nn.Module):
        call = call.to(device)
    if not callable(call):
        raise InstrumentError(f"{reference}: not callable, but {type(call).__name__}")
    args, kwargs = _make_inputs(inputs, device)
    return Subject(reference, call, args, device, kwargs, backward)


def _make_inputs(reference: str, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    factory = load_attribute(reference)
    if not callable(factory):
        raise InstrumentError(f"--inputs {reference}: not callable, but {type(factory).__name__}")
    try:
        made = factory(device=device) if _takes_device(factory) else factory()
    except (Exception, SystemExit) as error:  # code that is not ours may raise anything
        raise InstrumentError(f"--inputs {reference}: {_described(error)}") from error
    if isinstance(made, Tensor):
        made = (made,)
    if isinstance(made, dict):
        args, kwargs = (), made
    elif isinstance(made, tuple):
        args, kwargs = made, {}
    else:
        raise InstrumentError(
            f"--inputs {reference}: must return a tensor, a tuple or a dict, "
            f"got {type(made).__name__}"
        )
    for tensor in tensors_in((args, kwargs)):
        if tensor.device.type != device.type:
            raise InstrumentError(
                f"--inputs {reference}: returned a tensor on {tensor.device}, wanted {device}; "
                "give the factory a parameter 'device'"
            )
    return args, kwargs


def _takes_device(factory: Callable[..., Any]) -> bool:
    try:
        return "device" in inspect.signature(factory).parameters
    except ValueError:  # some builtins do not say what they take
        return False


_NOT_RUN_YET = (GeneratorType, CoroutineType, AsyncGeneratorType)


def _hint_at_gradients(error: BaseException) -> str:
    if "does not require grad" not in str(error):
        return ""
    return (
        "; a step runs under torch.no_grad(): a callable that takes gradients itself needs "
        "'with torch.enable_grad():' around them"
    )


def described_if_of_a_step(error: BaseException) -> str | None:
    """Describe an exception that a step raised after it had been tried out; None for any other."""
    code = Subject.step.__code__
    if all(frame.f_code is not code for frame, _ in traceback.walk_tb(error.__traceback__)):
        return None
    return f"a later step {_described(error)}"


def _described(error: BaseException) -> str:
    """An exception in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    outside = [f for f in frames if "/torch/" not in f.filename and ours not in f.filename]
    where = f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
    message = " ".join(str(error).split())
    return f"raises {type(error).__name__}{where}" + (f": {message}" if message else "")


def load_attribute(reference: str) -> Any:
    """Load ``module:attribute`` or ``file.py:attribute``; attributes may be dotted.

    Raises:
        InstrumentError: the reference has no colon, or a part of it does not exist.
    """
    value = _load_module(reference)
    for name in reference.rpartition(":")[2].split("."):
        if not hasattr(value, name):
            raise InstrumentError(f"{reference}: {_name_of(value)} has no {name!r}")
        value = getattr(value, name)
    return value


def _name_of(value: Any) -> str:
    if isinstance(value, ModuleType):
        file = getattr(value, "__file__", None)  # a builtin module has none
        return Path(file).name if file else value.__name__
    return str(getattr(value, "__name__", type(value).__name__))


def _load_module(reference: str) -> Any:
    where, colon, attribute = reference.rpartition(":")
    if not colon or not where or not attribute:
        raise InstrumentError(f"{reference}: expected module:function or file.py:function")
    if where.endswith(".py"):
        return _load_file(reference, Path(where))
    if not all(name.isidentifier() for name in where.split(".")):
        raise InstrumentError(f"{reference}: {where!r} is no module's name, nor a file's (.py)")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if not f"{where}.".startswith(f"{error.name}."):
            raise InstrumentError(f"{reference}: {_of_import(where, error)}") from error
        raise InstrumentError(
            f"{reference}: no module named {error.name!r}; give file.py:function for a file"
        ) from error
    except (Exception, SystemExit) as error:  # code that is not ours may raise anything
        raise InstrumentError(f"{reference}: {_of_import(where, error)}") from error


def _of_import(where: str, error: BaseException) -> str:
    """An exception of loading a module in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or where}, line {error.lineno}: {error.msg}"
    if isinstance(error, ModuleNotFoundError):
        return f"{where} imports {error.name!r}, not found"
    return f"{where} {_described(error)}"


def _load_file(reference: str, path: Path) -> Any:
    if not path.is_file():
        raise InstrumentError(f"{reference}: {path}: no such file")
    # One module object per file: a callable and its inputs see the same globals.
    name = f"taut_subject_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InstrumentError(f"{reference}: {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise InstrumentError(f"{reference}: {_of_import(str(path), error)}") from error
    return module
