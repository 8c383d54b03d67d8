"""Copies of blocks by TMA, and shared memory seen as another type."""


# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 has the first name of each, 3.6 only the second.
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


_MEMORY = gl.shared_memory_descriptor


seen_as = getattr(_MEMORY, "reinterpret", None) or _MEMORY._reinterpret


# Triton 3.9 has the first name, 3.6 only the second.
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
