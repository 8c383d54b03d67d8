"""Linear layers that vLLM joins into one, so that they must be stored alike."""

import re
from collections.abc import Iterable, Iterator

# By the last part of their names, under one parent; as in the packed_modules_mapping of vLLM's
# models.
FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
# All experts of a layer, one product.
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.[^.]+")


def fused_groups(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Every set of layers among ``names`` that vLLM joins.

    Args:
        names: full names.

    Yields:
        Full names, two or more.
    """
    by_parent: dict[str, set[str]] = {}
    experts: dict[str, list[str]] = {}
    for name in names:
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(found[1], []).append(name)
            continue
        parent, _, leaf = name.rpartition(".")
        by_parent.setdefault(parent, set()).add(leaf)
    for parent, leaves in by_parent.items():
        for group in FUSED:
            present = tuple(f"{parent}.{leaf}" for leaf in group if leaf in leaves)
            if len(present) > 1:
                yield present
    yield from (tuple(group) for group in experts.values())
