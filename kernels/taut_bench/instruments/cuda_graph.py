"""Capture a callable in a CUDA graph, with what a graph demands checked first.

A graph replays the same kernels with the same addresses. It therefore demands, and this module
checks, each with one line that says what breaks it:

- every tensor input lives on one CUDA device, and replays get inputs of the same shapes, strides
  and dtypes (they are copied into the captured ones);
- nothing depends on a value the host would have to wait for: no ``.item()``, no ``nonzero``, no
  copy to the host, no output whose shape depends on data;
- parameters and buffers stay where they were captured;
- the callable does not keep memory from call to call: what it allocates comes out of the graph's
  pool and goes back to it;
- it ran on a side stream before (compilers, workspaces and caches settle in the warm-up).

The checks that need no device (host reads, shapes that depend on data) run on a CPU as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from taut_bench.instruments import caller
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.subject import Subject, tensors_in

WARM_UP_CALLS = 3


class CaptureError(InstrumentError):
    """A callable cannot be captured, or a captured one cannot be replayed as asked."""


def why_not_capturable(subject: Subject) -> str | None:
    """Run a subject once under watch and say what a graph would forbid; None where nothing.

    Args:
        subject: on a CPU the device is not held against it; call :func:`capture` for that.
    """
    if subject.backward:
        return "it runs gradients; torch.cuda.make_graphed_callables captures both directions"
    watch = _Watch()  # type: ignore[no-untyped-call]
    with watch:
        subject.step()
    if watch.found is not None or subject.device.type != "cuda":
        return watch.found
    return _why_not_on_device(subject)


def _why_not_on_device(subject: Subject) -> str | None:
    index = torch.cuda.current_device() if subject.device.index is None else subject.device.index
    for i, tensor in enumerate(tensors_in((subject.args, subject.kwargs))):
        if tensor.layout is not torch.strided or tensor.is_nested:
            return f"tensor input {i} is sparse or nested: a replay copies dense tensors only"
        if tensor.device != torch.device("cuda", index):
            return f"tensor input {i} is on {tensor.device}, the graph on cuda:{index}"
        if not _is_dense(tensor):
            return f"tensor input {i} shows elements more than once (expanded): make it contiguous"
    _warm_up(subject)
    subject.step()  # on this stream as well: cuBLAS keeps a workspace for each
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    subject.step()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    if kept > 0:
        return f"each call keeps {kept} bytes allocated: a replay would write to memory in use"
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        subject.step()
    except RuntimeError as error:
        return f"waits for the device: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None


def _is_dense(tensor: Tensor) -> bool:
    return all(
        stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _warm_up(subject: Subject) -> torch.cuda.Stream:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            subject.step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return stream


@dataclass(frozen=True)
class InputLayout:
    """Everything about a tensor input that a replay may not change.

    Args:
        shape: sizes.
        stride: strides in elements.
        dtype: element type.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> InputLayout:
        """Read a tensor's layout."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def check_replay(
    captured: tuple[Any, dict[str, Any]], offered: tuple[Any, dict[str, Any]]
) -> list[tuple[Tensor, Tensor]]:
    """Hold inputs of a replay to those of the capture.

    Args:
        captured: positional and keyword arguments of the capture.
        offered: those of the replay.

    Returns:
        Pairs (captured tensor, offered tensor) to copy.

    Raises:
        CaptureError: another structure, a shape, stride or dtype that differs, or another value
            for an argument that is not a tensor.
    """
    known, known_tree = pytree.tree_flatten(captured)
    new, new_tree = pytree.tree_flatten(offered)
    if known_tree != new_tree:
        raise CaptureError("replay: the arguments have another structure than at capture")
    pairs = []
    for i, (old, fresh) in enumerate(zip(known, new, strict=True)):
        if not isinstance(old, Tensor):
            if old != fresh:
                raise CaptureError(
                    f"replay: argument {i} is {fresh!r} but {old!r} was captured; "
                    "only tensors can change"
                )
            continue
        if not isinstance(fresh, Tensor):
            raise CaptureError(f"replay: argument {i} must be a tensor, got {type(fresh).__name__}")
        if InputLayout.of(old) != InputLayout.of(fresh):
            raise CaptureError(
                f"replay: tensor {i} is {tuple(fresh.shape)} {fresh.dtype} "
                f"with strides {fresh.stride()}, captured was {tuple(old.shape)} {old.dtype} "
                f"with strides {old.stride()}"
            )
        pairs.append((old, fresh))
    return pairs


def check_addresses(captured: dict[str, int], module: torch.nn.Module | None) -> None:
    """Check that parameters and buffers are where the graph reads them.

    Raises:
        CaptureError: naming the first one that moved.
    """
    for name, address in addresses_of(module).items():
        if captured.get(name) != address:
            raise CaptureError(
                f"replay: {name} was replaced or moved after the capture; capture again"
            )


def addresses_of(module: torch.nn.Module | None) -> dict[str, int]:
    """Name → address of every parameter and buffer."""
    if module is None:
        return {}
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named}


class CapturedGraph:
    """A captured callable; made by :func:`capture`.

    Not thread-safe: a replay writes the one set of outputs. Outputs are overwritten by the next
    replay; clone what must outlive it.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: tuple[Any, dict[str, Any]],
        outputs: Any,
        module: torch.nn.Module | None,
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._outputs = outputs
        self._module = module
        self._addresses = addresses_of(module)

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on new inputs, or on those already there when none are given.

        Raises:
            CaptureError: inputs that differ in more than their values, or weights that moved.
        """
        check_addresses(self._addresses, self._module)
        if args or kwargs:
            with torch.no_grad():
                for old, fresh in check_replay(self._inputs, (args, kwargs)):
                    old.copy_(fresh)
        self._graph.replay()
        return self._outputs


def capture(subject: Subject) -> CapturedGraph:
    """Capture one step.

    Args:
        subject: on a CUDA device; its inputs are copied, the originals stay untouched.

    Raises:
        CaptureError: no CUDA device, or a constraint is broken; says which.
    """
    if subject.device.type != "cuda":
        raise CaptureError(
            f"{subject.name}: a CUDA graph needs a CUDA device, not {subject.device}"
        )
    if reason := why_not_capturable(subject):
        raise CaptureError(f"{subject.name}: cannot be captured: {reason}")
    static = with_own_inputs(subject)
    stream = _warm_up(static)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            outputs = static.step()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise CaptureError(f"{subject.name}: cannot be captured: {first}") from error
    graph.replay()
    torch.cuda.synchronize()
    module = subject.call if isinstance(subject.call, torch.nn.Module) else None
    return CapturedGraph(graph, (static.args, static.kwargs), outputs, module)


def with_own_inputs(subject: Subject) -> Subject:
    """Return the same subject with copies of its tensor inputs, of the same strides."""
    args, kwargs = pytree.tree_map_only(Tensor, _static_copy, (subject.args, dict(subject.kwargs)))
    return replace(subject, args=args, kwargs=kwargs)


def _static_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor.detach())


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation a graph cannot hold."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.found is None and (reason := _why_not(func, args, kwargs, result)):
            self.found = f"{reason}, at {caller.line()}"
        return result


def _why_not(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str | None:
    name = func._schema.name
    if torch.Tag.data_dependent_output in func.tags:
        return f"{name} reads a value on the host (.item(), a Python condition on a tensor)"
    if torch.Tag.dynamic_output_shape in func.tags:
        return f"{name} has a shape that depends on values"
    # The tag is younger than the oldest torch that is supported.
    if getattr(torch.Tag, "cudagraph_unsafe", None) in func.tags:
        return f"{name} is marked unsafe for CUDA graphs"
    sources = {tensor.device.type for tensor in tensors_in((args, kwargs)) if tensor.numel() > 1}
    targets = {tensor.device.type for tensor in tensors_in(result)}
    if len(sources | targets) > 1:
        kinds = " and ".join(sorted(sources | targets))
        return f"{name} moves data between {kinds}"
    return None
