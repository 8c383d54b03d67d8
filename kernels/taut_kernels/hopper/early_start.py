"""Programmatic dependent launch, from Gluon."""


# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def early_start(WAIT: gl.constexpr):
    """Let the next kernel start, or (WAIT) wait for the one in front to end."""
    TEXT: gl.constexpr = "griddepcontrol.wait;" if WAIT else "griddepcontrol.launch_dependents;"
    gl.inline_asm_elementwise(TEXT + " mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
