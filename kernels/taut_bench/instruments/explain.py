"""What ``torch.compile`` makes of a callable: graphs, breaks, guards, generated code, kernels.

Three looks at the same call. `torch._dynamo.explain` says how many graphs Dynamo captures and what
it guards on, and Dynamo's log where it breaks off and why (:mod:`.graph_breaks`). AOTAutograd's
graphs, forward and backward, show the ATen operations that Inductor is given. Inductor then
compiles for the device at hand, Triton on CUDA and C++ on a CPU, and the code it wrote is kept and
its kernels counted.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

from taut_bench.instruments import cuda_graph, graph_breaks
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.graph_breaks import GraphBreak
from taut_bench.instruments.subject import Subject


@dataclass(frozen=True, slots=True)
class AtenGraph:
    """A graph as Inductor gets it.

    Attributes:
        direction: ``forward``, ``backward`` or ``inference``.
        operations: calls in it.
        code: readable.
    """

    direction: str
    operations: int
    code: str


@dataclass(frozen=True, slots=True)
class Generated:
    """One file of code that Inductor wrote, for one graph.

    Attributes:
        graph: AOTAutograd's number and direction, for example ``0_forward``.
        language: ``triton`` or ``c++``; ``none`` where every operation is a library's.
        kernels: names of generated kernels, once a definition.
        launches: calls of generated kernels.
        library: calls that go to a library (cuBLAS, oneDNN…) or to a custom op, by name.
        code: the file.
    """

    graph: str
    language: str
    kernels: tuple[str, ...]
    launches: int
    library: tuple[str, ...]
    code: str


@dataclass(frozen=True)
class Explanation:
    """Everything found.

    Attributes:
        subject: its name.
        device: kind of device.
        graphs: Dynamo captured.
        operations: in them.
        breaks: in order, each once.
        guards: what a compiled graph checks before it is reused.
        aten: graphs given to Inductor.
        generated: files of code.
        not_compiled: why Inductor's code is missing; None where it is there.
        not_capturable: why a CUDA graph could not hold the call; None where nothing is in the way.
    """

    subject: str
    device: str
    graphs: int
    operations: int
    breaks: tuple[GraphBreak, ...]
    guards: tuple[str, ...]
    aten: tuple[AtenGraph, ...]
    generated: tuple[Generated, ...]
    not_compiled: str | None
    not_capturable: str | None

    def as_json(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return asdict(self)


def explain(subject: Subject) -> Explanation:
    """Explain one call.

    Args:
        subject: with ``backward`` the backward graphs are compiled as well.

    Raises:
        InstrumentError: Dynamo cannot run the callable at all.
    """
    not_capturable = cuda_graph.why_not_capturable(replace(subject, backward=False))
    try:
        with _grad_mode(subject), _quiet(), graph_breaks.logged() as breaks:
            found = torch._dynamo.explain(_traceable(subject))(*subject.args, **subject.kwargs)
    except TorchDynamoException as error:
        raise InstrumentError(f"{subject.name}: Dynamo fails: {_first_line(error)}") from error
    not_compiled: str | None = None
    aten: list[AtenGraph] = []
    generated: tuple[Generated, ...] = ()
    try:
        aten = _aten_graphs(subject)
        generated = tuple(_numbered([read_code(code) for code in _inductor_code(subject)]))
    except BackendCompilerFailed as error:
        not_compiled = _first_line(error)
    return Explanation(
        subject.name,
        subject.device.type,
        found.graph_count,
        found.op_count,
        tuple(graph_breaks.merged(breaks, found.break_reasons)),
        tuple(sorted({_guard(guard) for guard in found.out_guards or ()})),
        tuple(aten),
        generated,
        not_compiled,
        not_capturable,
    )


def _traceable(subject: Subject) -> Callable[..., Any]:
    """Dynamo does not compile a bare operator; a function around it, it does."""
    if not isinstance(subject.call, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return subject.call
    operator = subject.call

    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return call


def _grad_mode(subject: Subject) -> Any:
    return torch.set_grad_enabled(subject.backward)


class _quiet(warnings.catch_warnings):  # noqa: N801
    """Dynamo warns about what the explanation says anyway."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


def _step_with(subject: Subject, compiled: Callable[..., Any]) -> Callable[[], Any]:
    return replace(subject, call=compiled).step


def _aten_graphs(subject: Subject) -> list[AtenGraph]:
    found: list[AtenGraph] = []

    def keep(direction: str) -> Callable[[GraphModule, Any], Any]:
        def compiler(graph: GraphModule, example_inputs: Any) -> Any:
            calls = sum(node.op == "call_function" for node in graph.graph.nodes)
            code = graph.print_readable(print_output=False)
            found.append(AtenGraph(direction, calls, code))
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        inference_compiler=keep("inference"),
    )
    torch._dynamo.reset()
    with _quiet(), torch._functorch.config.patch(enable_autograd_cache=False):
        _step_with(subject, torch.compile(_traceable(subject), backend=backend))()
    torch._dynamo.reset()
    return found


def _inductor_code(subject: Subject) -> list[str]:
    compiled = torch.compile(_traceable(subject))
    # A graph out of the cache would come without its code.
    no_cache = torch._inductor.config.patch(force_disable_caches=True)
    with _quiet(), no_cache:
        _, codes = run_and_get_code(_step_with(subject, compiled))
    torch._dynamo.reset()
    return list(codes)


def _numbered(found: list[Generated]) -> list[Generated]:
    """Number the graphs from 0: AOTAutograd counts through the life of the process."""
    numbers = [int(one.graph.partition("_")[0]) for one in found if one.graph[:1].isdigit()]
    renamed = []
    for one in found:
        number, _, direction = one.graph.partition("_")
        name = f"{int(number) - min(numbers)}_{direction}" if number.isdigit() else one.graph
        renamed.append(replace(one, graph=name))
    return renamed


_GRAPH = re.compile(r"^# AOT ID: \['(\w+)'\]", re.MULTILINE)
_TRITON = re.compile(r"^(\w+) = async_compile\.triton\(", re.MULTILINE)
_CPP = re.compile(r"^(\w+) = async_compile\.cpp(?:_pybinding)?\(", re.MULTILINE)
_EXTERN = re.compile(r"\bextern_kernels\.(\w+)\(")
_FALLBACK = re.compile(r"\btorch\.ops\.([\w.]+)\(")
_CALL_BODY = re.compile(r"^( *)def call\(.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def read_code(code: str) -> Generated:
    """Count the kernels of one file of Inductor's.

    Args:
        code: as Inductor wrote it for one graph.
    """
    triton, cpp = _TRITON.findall(code), _CPP.findall(code)
    kernels = tuple(dict.fromkeys([*triton, *cpp]))
    body = "\n".join(match.group(0) for match in _CALL_BODY.finditer(code))
    launches = sum(
        len(re.findall(rf"(?<![\w.]){re.escape(name)}(?:\.run)?\(", body)) for name in kernels
    )
    library = (*_EXTERN.findall(body), *_FALLBACK.findall(body))
    language = "triton" if triton else "c++" if cpp else "none"
    graph = match.group(1) if (match := _GRAPH.search(code)) else "unknown"
    return Generated(graph, language, kernels, launches, library, code)


def _guard(guard: Any) -> str:
    kind = guard.inner_create_fn().__name__
    code = " and ".join(guard.code_list or ())
    return f"{kind} {guard.name}: {code}".rstrip(": ") if guard.name else kind


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


def text(found: Explanation) -> str:
    """Write an explanation as Markdown."""
    lines = [
        f"{found.subject} on {found.device}: {found.graphs} graphs of {found.operations} "
        f"operations, {len(found.breaks)} breaks, {len(found.guards)} guards",
    ]
    for i, broken in enumerate(found.breaks, 1):
        lines.append(f"- break {i}: {broken.where}: `{broken.source}`: {broken.reason}")
    lines += ["", "| graph | operations |", "|---|---|"]
    lines += [f"| {graph.direction} | {graph.operations} |" for graph in found.aten]
    lines += ["", "| graph | code | kernels | launches | library calls |", "|---|---|---|---|---|"]
    for generated in found.generated:
        names, calls = _listed(generated.kernels), _listed(generated.library)
        graph = generated.graph
        lines.append(
            f"| {graph} | {generated.language} | {names} | {generated.launches} | {calls} |"
        )
    if found.not_compiled:
        lines.append(f"\nInductor fails: {found.not_compiled}")
    if found.device != "cuda":
        lines.append(
            "\nno GPU: the code is that of Inductor's CPU backend; on CUDA the same graphs become "
            "Triton kernels"
        )
    capturable = found.not_capturable or "nothing in the call is in the way"
    lines.append(f"\nCUDA graph: {capturable}")
    return "\n".join(lines)


def _listed(names: tuple[str, ...], shown: int = 4, length: int = 60) -> str:
    """Count equal names; the most frequent of many, and how many more there are."""
    counts = Counter(name if len(name) <= length else name[: length - 1] + "…" for name in names)
    parts = [f"{name} × {n}" if n > 1 else name for name, n in counts.most_common(shown)]
    if len(counts) > shown:
        parts.append(f"{len(counts) - shown} more")
    return ", ".join(parts) or "–"


def write_files(found: Explanation, directory: Path) -> list[Path]:
    """Write graphs and code beside each other.

    Args:
        found: of :func:`explain`.
        directory: made if missing.

    Returns:
        The files.

    Raises:
        InstrumentError: they cannot be written.
    """
    contents = {f"{graph.direction}_{i}.py": graph.code for i, graph in enumerate(found.aten)}
    contents |= {f"generated_{i}.py": code.code for i, code in enumerate(found.generated)}
    contents["guards.txt"] = "\n".join(found.guards) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (directory / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InstrumentError(f"{directory}: cannot be written: {error.strerror}") from error
    return [directory / name for name in contents]
