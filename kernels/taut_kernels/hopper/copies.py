"""Copies by `cp.async`."""


# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.9 has the first name of each, 3.6 only the second.
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
