"""Who reads a module's output: modules that get it, and code that computes with it between them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Readers(TorchDispatchMode):
    """Watches a forward: for every operation, which memory it reads and in which module.

    A router that multiplies by a bare parameter, or a residual that is added, is no module's input;
    an operation sees it all the same. Views are followed, copies count as reads.

    Args:
        module: its submodules are told apart.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = module
        self._inside: list[str] = []
        self._reads: dict[int, set[str]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "Readers":
        """Begin to watch."""
        for name, module in self._of.named_modules():
            if name:
                self._handles.append(module.register_forward_pre_hook(self._push(name)))
                self._handles.append(
                    module.register_forward_hook(lambda *_: self._pop(), always_call=True)
                )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """End to watch, and leave no hook behind."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _push(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _pop(self) -> None:
        self._inside.pop()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and note what it read."""
        out = func(*args, **(kwargs or {}))
        given = {_memory(one) for one in _tensors((args, kwargs))}
        made = {_memory(one) for one in _tensors(out)}
        inside = self._inside[-1] if self._inside else ""
        for memory in given - made:
            self._reads.setdefault(memory, set()).add(inside)
        for memory in made - given:
            self._reads[memory] = set()  # who read what was there before does not matter
        return out

    def of(self, tensor: torch.Tensor) -> set[str]:
        """Names of the modules that read this tensor or a view of it; ``""`` is the module itself.

        Args:
            tensor: alive since the forward, or its memory may be another's by now.
        """
        return self._reads.get(_memory(tensor), set())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
