"""What a kernel's PTX touches on paths that have not waited for the kernel in front.

A small flow analysis: blocks and branches, on which of them `griddepcontrol.wait` lies behind for
sure, and from which kernel parameters an address was computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"^(?:@!?%p\d+ )?bra(?:\.uni)? (\$\w+);")
_TABLE = re.compile(r"(\$\w+):\s*\.branchtargets([^;]*);")
_JUMP = re.compile(r"^brx\.idx(?:\.uni)? %r\d+, (\$\w+);")
_END = re.compile(r"^(?:ret|exit);")
_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"_param_(\d+)")
_TOUCH = re.compile(
    r"^(?:@!?%p\d+ )?((?:ld|st|atom|red|prefetch)\.(?:\w+\.)*global|cp\.async\.(?:bulk|c[ag]))"
)
_WAIT = "griddepcontrol.wait"


@dataclass
class _Block:
    lines: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Early:
    """What happens before the wait.

    Attributes:
        touched: instruction (without its type) and numbers of the parameters its address comes
            from, of every access to global memory that may happen before the wait.
        ends: whether a thread may end without having waited.
    """

    touched: frozenset[tuple[str, frozenset[int]]]
    ends: bool


def _blocks(ptx: str) -> dict[str, _Block]:
    """Cut a kernel's PTX into blocks, by label; the first is ``""``."""
    name, reached = "", True
    found = {name: _Block()}
    tables = {label: re.findall(r"\$\w+", listed) for label, listed in _TABLE.findall(ptx)}
    ptx = _TABLE.sub("", ptx)
    for raw in ptx[ptx.index("{", ptx.index(".entry")) + 1 :].splitlines():
        line = re.sub(r"\s+", " ", raw.split("//")[0]).strip()
        label = _LABEL.match(line)
        branch, jump = _BRANCH.match(line), _JUMP.match(line)
        targets = [branch[1]] if branch else tables[jump[1]] if jump else []
        if label:
            if reached:
                found[name].next.append(label[1])
            name, reached = label[1], True
            found[name] = _Block()
        elif targets:
            found[name].next += targets
            reached = line.startswith("@")
            behind = f"behind {len(found)}"
            if reached:
                found[name].next.append(behind)
            name = behind
            found[name] = _Block()
        elif line:
            assert not line.startswith("brx"), line
            found[name].lines.append(line)
            reached = reached and not _END.match(line)
    return found


def _origins(lines: list[str]) -> dict[str, frozenset[int]]:
    """Return the parameters each register was computed from, in any order of the blocks."""
    flows = []
    for line in lines:
        head, _, rest = line.partition(",")
        if "{" in head:  # several results at once
            head, _, rest = line.partition("}")
        targets = [name for name in _REGISTER.findall(head) if not name.startswith("%p")]
        flows.append(
            (targets, _REGISTER.findall(rest), frozenset(map(int, _PARAMETER.findall(rest))))
        )
    found: dict[str, frozenset[int]] = {}
    grew = True
    while grew:
        grew = False
        for targets, sources, parameters in flows:
            reached = parameters.union(*(found.get(name, frozenset()) for name in sources))
            for name in targets:
                before = found.get(name, frozenset())
                found[name] = before | reached
                grew = grew or found[name] != before
    return found


def _waited(blocks: dict[str, _Block]) -> dict[str, bool]:
    """Say of each block whether every path to it waits."""
    before: dict[str, list[str]] = {name: [] for name in blocks}
    for name, block in blocks.items():
        for target in block.next:
            before[target].append(name)
    waits = {name: any(_WAIT in line for line in b.lines) for name, b in blocks.items()}
    entered = dict.fromkeys(blocks, True) | {"": False}
    shrank = True
    while shrank:
        shrank = False
        for name in blocks:
            if name and entered[name]:
                entered[name] = all(entered[other] or waits[other] for other in before[name])
                shrank = shrank or not entered[name]
    return entered


def before_the_wait(ptx: str) -> Early:
    """Read what a kernel may do before it has waited.

    Args:
        ptx: of one kernel.
    """
    blocks = _blocks(ptx)
    origins = _origins([line for block in blocks.values() for line in block.lines])
    touched, ends = set(), False
    for name, behind in _waited(blocks).items():
        for line in [] if behind else blocks[name].lines:
            if _WAIT in line:
                break
            ends = ends or _END.match(line) is not None
            touch = _TOUCH.match(line)
            if touch:
                places = re.findall(r"\[([^\]]*)\]", line)
                # Copies name where they go in shared memory first.
                place = places[1 if touch[1].startswith("cp.async") else 0]
                registers = _REGISTER.findall(place.partition(",")[0])
                direct = frozenset(map(int, _PARAMETER.findall(place)))
                of = direct.union(*(origins.get(name, frozenset()) for name in registers))
                touched.add((touch[1], of))
    return Early(frozenset(touched), ends)
