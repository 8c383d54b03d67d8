"""Our activations and rotary embedding in the place of vLLM's `CustomOp` classes of that name.

vLLM builds the out-of-tree class wherever a model asks for the original. Ours say themselves
whether they are on: vLLM's switch ``custom_ops`` is "none" under Inductor, and it knows a replaced
class only by its class name (``-SiluAndMul`` turns ours off too). The rotary embedding is in place
where nothing is compiled. In a compiled graph, where an in-place op on slices of one tensor costs
copies that vLLM removes for its own op alone, it returns new tensors. Calls that ours does not take
run on vLLM's code, and the log says so once. This module imports vLLM and holds no arithmetic.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.config import CompilationMode, get_cached_compilation_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.activation import SiluAndMul, SwigluOAIAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from taut_kernels.activation import silu_mul
from taut_kernels.rope import op as rope

_logger = logging.getLogger(__name__)
_OTHER_ACTIVATIONS = "activations with gaps, or in another type than ours takes"
_OTHER_TABLE = "angles in another type than the queries, in a compiled graph"
_said: set[tuple[str, str]] = set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_not_ours(name: str, reason: str) -> bool:
    """Log once why calls of a class of ours run on vLLM's code.

    Dynamo runs this where it traces a call and keeps nothing of it; a graph that vLLM has from its
    cache is not traced, and says nothing.

    Args:
        name: of our class.
        reason: in words that do not change from call to call.

    Returns:
        Whether it was logged now.
    """
    new = (name, reason) not in _said
    if new:
        _said.add((name, reason))
        _logger.info("%s not ours: %s", name.removeprefix("Taut"), reason)
    return new


def _turned_off(cls: type) -> bool:
    return f"-{cls.__name__.removeprefix('Taut')}" in get_cached_compilation_config().custom_ops


def _fits(x: Tensor) -> bool:
    return x.dtype in silu_mul.DTYPES and x.is_contiguous()


class _Activated:
    """What layers on `taut::silu_mul` share; a class of vLLM's comes behind it."""

    @classmethod
    def enabled(cls) -> bool:
        """Say whether the forward is ours: unless ``-<vLLM's class>``."""
        return not _turned_off(cls)

    def forward_cuda(self, x: Tensor) -> Tensor:
        """Activate [..., 2N] to [..., N]."""
        if not _fits(x):
            _say_not_ours(type(self).__name__, _OTHER_ACTIVATIONS)
            fallback: Tensor = super().forward_cuda(x)  # type: ignore[misc]
            return fallback
        rows = x.view(-1, x.shape[-1])
        y: Tensor = torch.ops.taut.silu_mul.default(rows, *self._form())
        return y.view(*x.shape[:-1], x.shape[-1] // 2)

    def _form(self) -> tuple[float, float, float | None, bool]:
        """Return the op's alpha, offset, limit, and whether gates and ups take turns."""
        return 1.0, 0.0, None, False


class TautSiluAndMul(_Activated, SiluAndMul):  # type: ignore[misc]
    """SiLU·mul on `taut::silu_mul`."""


class TautSwigluOAIAndMul(_Activated, SwigluOAIAndMul):  # type: ignore[misc]
    """The activation of gpt-oss on `taut::silu_mul`, its input interleaved."""

    def _form(self) -> tuple[float, float, float | None, bool]:
        return self.alpha, 1.0, self.limit, True


Rotated = tuple[Tensor, Tensor | None]


class _TautRotary:
    """What our rotary embeddings add to vLLM's classes.

    Attributes:
        apart: whether it returns new tensors, as where vLLM compiles.
        query_dtype: of the queries and keys it will be called with, the model's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Asked once: a graph that is traced cannot ask for vLLM's configuration.
        self.apart = get_cached_compilation_config().mode != CompilationMode.NONE
        # vLLM makes a model's modules under the model's type.
        self.query_dtype = torch.get_default_dtype()

    def why_native(self) -> str | None:
        """Say why no call will be ours as far as that is known before the first, else None."""
        base: Any = self
        other = base.cos_sin_cache.dtype is not self.query_dtype
        return _OTHER_TABLE if self.apart and other else None

    @classmethod
    def enabled(cls) -> bool:
        """Say whether the forward is ours: unless turned off by name (``-RotaryEmbedding``)."""
        return not _turned_off(cls)

    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Rotated:
        """Rotate query [T, Hq · D] and key: in place, or into new tensors where vLLM compiles.

        What ours does not take (positions of several dimensions, heads not side by side) runs as
        it would without us: vLLM's op, or in a compiled graph its native code.
        """
        base: Any = self
        reason = self._why_not_taken(positions, query, key)
        if reason is not None:
            _say_not_ours(type(self).__name__, reason)
            theirs = base.forward_native if self.apart else super().forward_cuda  # type: ignore[misc]
            fallback: Rotated = theirs(positions, query, key)
            return fallback
        if self.apart:
            return self._rotate_apart(positions, query, key)
        cache = base._match_cos_sin_cache_dtype(query)
        heads = [None if t is None else self._as_heads(t) for t in (query, key)]
        torch.ops.taut.rope.default(positions, heads[0], heads[1], cache, base.is_neox_style)
        return query, key

    def _why_not_taken(self, positions: Tensor, query: Tensor, key: Tensor | None) -> str | None:
        if query.dtype not in rope.DTYPES:
            return "queries in another type than ours takes"
        if key is not None and key.dtype is not query.dtype:
            return "keys in another type than the queries"
        if positions.dim() != 1:
            return "positions of several dimensions"
        if any(t is not None and (t.dim() != 2 or t.stride(1) != 1) for t in (query, key)):
            return "heads not side by side in a row"
        # The table as it is: converting it would be a kernel over all of it in every step.
        table = self.cos_sin_cache  # type: ignore[attr-defined]
        if self.apart and table.dtype is not query.dtype:
            return _OTHER_TABLE
        return "angles on another device" if self.apart and table.device != query.device else None

    def _rotate_apart(self, positions: Tensor, query: Tensor, key: Tensor | None) -> Rotated:
        base: Any = self
        table, neox = base.cos_sin_cache, base.is_neox_style
        k = None if key is None else self._as_heads(key)
        found = torch.ops.taut.rope_apart.default(positions, self._as_heads(query), k, table, neox)
        return found[0].view(query.shape), None if key is None else found[1].view(key.shape)

    def _as_heads(self, x: Tensor) -> Tensor:
        base: Any = self
        return x.view(x.shape[0], x.shape[1] // base.head_size, base.head_size)


def _rotary_classes() -> list[Any]:
    """Return vLLM's rotary embeddings that rotate as `RotaryEmbedding` does.

    Both ways: Fourier's (`FourierRotaryEmbedding`) has only a native forward of its own.
    """
    found: list[Any] = [
        value for value in vars(rotary_embedding).values() if isinstance(value, type)
    ]
    return [
        cls
        for cls in found
        if issubclass(cls, RotaryEmbedding)
        and cls.forward_cuda is RotaryEmbedding.forward_cuda
        and cls.forward_native is RotaryEmbedding.forward_native
    ]


def install() -> None:
    """Put our classes in the place of vLLM's in this process, once."""
    replacements: list[tuple[str, type]] = [
        ("SiluAndMul", TautSiluAndMul),
        ("SwigluOAIAndMul", TautSwigluOAIAndMul),
    ]
    for cls in _rotary_classes():
        ours = type(f"Taut{cls.__name__}", (_TautRotary, cls), {"__doc__": _TautRotary.__doc__})
        replacements.append((cls.__name__, ours))
    for name, ours in replacements:
        # Another plugin may have come first: its class stays.
        if name not in op_registry_oot:
            CustomOp.register_oot(ours, name=name)


def live_ops(model: torch.nn.Module) -> dict[str, dict[str, int]]:
    """Count, by vLLM's class name, the replaceable ops of a model that run on ours or not.

    As far as it is known after loading; the log says once why a class of ours is not used.

    Args:
        model: as vLLM loaded it.

    Returns:
        For example ``{"SiluAndMul": {"taut": 32}, "Llama3RotaryEmbedding": {"vllm": 1}}``.
    """
    names = {"SiluAndMul", "SwigluOAIAndMul", *(cls.__name__ for cls in _rotary_classes())}
    counts: dict[str, dict[str, int]] = {}
    for module in model.modules():
        name = type(module).__name__.removeprefix("Taut")
        if name not in names or not isinstance(module, CustomOp):
            continue
        ours = type(module).__name__.startswith("Taut") and type(module).enabled()
        if ours and isinstance(module, _TautRotary) and (reason := module.why_native()):
            _say_not_ours(type(module).__name__, reason)
            ours = False
        owner = "taut" if ours else "vllm"
        counts.setdefault(name, {}).setdefault(owner, 0)
        counts[name][owner] += 1
    return counts
