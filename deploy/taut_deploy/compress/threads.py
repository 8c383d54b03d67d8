"""How many threads torch uses, chosen by the work.

An operation on several threads ends when the last of them does. Small ones in a row wait at a
barrier each, and on a busy machine for the neighbours' time slices too: twice the threads then took
two to ten times as long (deploy/README.md, "Measured"). So a small model's batches go side
by side, every operation of theirs on one thread; only large products are shared by threads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import nn

Input = TypeVar("Input")
Result = TypeVar("Result")

# Operations of a batch's largest product, from where threads share it: about half a second of one
# core, a hundred time slices.
_LARGE_PRODUCT = 1 << 35


@contextmanager
def single_thread(operations: int = 0) -> Iterator[None]:
    """Run the block on one thread: for thousands of small operations in a row.

    Args:
        operations: of the largest product in it; a large one gets all threads after all.
    """
    before = torch.get_num_threads()
    if operations < _LARGE_PRODUCT:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def at_device(device: torch.device | None) -> Iterator[None]:
    """Make a card the current one, on which Triton launches; nothing else changes anything."""
    if device is None or device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


def modes_of_caller() -> Callable[[], AbstractContextManager[None]]:
    """The gradient modes of this thread, to be entered on another: each thread has its own."""
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    @contextmanager
    def entered() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            yield

    return entered


def load_linalg(devices: Iterable[torch.device | None]) -> None:
    """Let torch load its linear algebra for GPUs, before several threads call it.

    The first call loads a library; two first calls at once end with "lazy wrapper should be called
    at most once".

    Args:
        devices: that the threads will work on; None for one that is not known.
    """
    for device in devices:
        if device is not None and device.type == "cuda":
            torch.linalg.cholesky_ex(torch.eye(1, device=device))


def over_batches(
    function: Callable[[torch.Tensor], Result],
    hidden: torch.Tensor,
    batch_size: int,
    block: nn.Module,
) -> Iterator[Result]:
    """Apply a function to each batch of a block's input; results come in the batches' order.

    Args:
        function: what to do with [batch, T, H]; must be able to run on several threads at a time.
        hidden: [B, T, H] the block's input.
        batch_size: sequences per call.
        block: loaded; the size of its layers decides whether batches go side by side.
    """
    batches = torch.split(hidden, batch_size)
    yield from over_inputs(function, batches, batches[0], block)


def over_inputs(
    function: Callable[[Input], Result],
    inputs: Sequence[Input],
    largest: torch.Tensor,
    block: nn.Module,
) -> Iterator[Result]:
    """The same for inputs of any kind.

    Args:
        function: what to do with an input; must be able to run on several threads at a time.
        inputs: in the order in which results come.
        largest: [b, T, H] of what a block is called with, the largest.
        block: loaded.
    """
    workers = min(torch.get_num_threads(), len(inputs))
    if workers == 1 or largest.is_cuda or largest_product(block, largest) >= _LARGE_PRODUCT:
        yield from map(function, inputs)
        return
    modes = modes_of_caller()

    def call(one: Input) -> Result:
        with modes():
            return function(one)

    with single_thread(), ThreadPoolExecutor(workers) as pool:
        yield from results_in_order((pool.submit(call, one) for one in inputs), workers)


def results_in_order(submitted: Iterable[Future[Result]], workers: int) -> Iterator[Result]:
    """Give results in the order in which their work was submitted.

    Args:
        submitted: submits a piece of work when asked for the next; no more at a time than are
            worked on, for their memory.
        workers: how many are worked on at a time.
    """
    waiting: deque[Future[Result]] = deque()
    for future in submitted:
        waiting.append(future)
        if len(waiting) > workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def largest_product(block: nn.Module, batch: torch.Tensor) -> int:
    """Operations of the batch's dearest linear layer."""
    tokens = batch.numel() // batch.shape[-1]
    sizes = [parameter.numel() for parameter in block.parameters() if parameter.dim() == 2]
    return 2 * tokens * max(sizes, default=0)
