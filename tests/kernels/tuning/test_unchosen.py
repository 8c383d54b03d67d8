"""Every line and flag of the kernels is there for a call that some selection makes."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tuning import unchosen
from tuning.jit_paths import Paths, statements


@triton.jit
def _added(x, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    if FLAG:
        x += 1
    else:
        x += 2
    return x


@triton.jit
def _kernel(x_ptr, bias_ptr, STEPS: tl.constexpr, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr)
    for step in tl.static_range(STEPS):
        if step == 2:
            x = _added(x, FLAG)
    for turn in tl.range(STEPS):
        x += turn
    if bias_ptr is not None:
        x += tl.load(bias_ptr)
    WIDE: tl.constexpr = STEPS * 2 > 8 and FLAG
    if WIDE:
        x = x * 3
    if x > 0:
        x = -x
    tl.store(x_ptr, x)


def _left(*forms: dict[str, Any]) -> set[str]:
    """Return the text of what no form reaches."""
    paths = Paths()
    for constants in forms:
        paths.walk(_kernel, constants)
    return {
        linecache.getline(__file__, line).strip()
        for function in (_kernel, _added)
        for line in statements(function)
        if line not in paths.reached[function]
    }


def test_a_branch_is_reached_by_the_constants_that_lead_to_it() -> None:
    plain = {"STEPS": 3, "FLAG": False, "bias_ptr": None}
    assert _left(plain) == {"x += 1", "x += tl.load(bias_ptr)", "x = x * 3"}
    assert _left(plain, {"STEPS": 3, "FLAG": True}) == {"x = x * 3"}
    assert _left({"STEPS": 5, "FLAG": True}) == {"x += 2"}
    assert _left({"STEPS": 5, "FLAG": True}, plain) == set()


def test_a_function_is_called_in_the_turn_of_a_loop_that_calls_it() -> None:
    left = _left({"STEPS": 2, "FLAG": False})
    assert {"x = _added(x, FLAG)", "if FLAG:", "return x"} <= left
    assert not {"x += turn", "x = -x"} & left, "known at run time only"


def test_a_flag_of_one_value_is_idle() -> None:
    @dataclass(frozen=True)
    class Tile:
        size: int
        fence: bool
        early: bool

    tiles = (Tile(16, False, True), Tile(16, False, False), "dense")
    assert unchosen.idle_flags(tiles) == ["Tile.fence is always False"]


def test_selections_reach_every_line_and_flag_of_the_kernels() -> None:
    """What comes back here was retired because nothing chose it: give it a row, or leave it out."""
    lines, flags = unchosen.ask()
    assert [str(line) for line in lines] == []
    assert flags == []
