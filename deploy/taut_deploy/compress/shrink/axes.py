"""What a configuration calls the widths of a model, and what smaller ones it can say.

Which tensors shrink is not written down anywhere: the skeletons of the old and the new
configuration are compared, and a dimension that differs is the one to cut.
"""

import copy
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from taut_deploy.errors import ModelError

Axis = Literal["depth", "heads", "ffn", "experts", "hidden"]
# Blocks first: what is dropped whole needs no cutting. Hidden channels last: all others read them.
AXES: tuple[Axis, ...] = ("depth", "heads", "ffn", "experts", "hidden")
_FLAG = re.compile(rf"--({'|'.join(AXES)})\b")
# What configurations call the number of routed experts of a block; those present say the same.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROUND = 64
# DeepSeek-V3 ranks a group of experts by the sum of its two best scores.
_LEAST_OF_A_GROUP = 2
# Coarser rounding than this share of a width would miss what was asked for.
_LEAST_PARTS = 16


@dataclass(frozen=True)
class Target:
    """One axis, from what to what.

    Args:
        axis: which.
        before: units now: blocks, groups of heads, neurons, experts or channels.
        after: units to keep.
        config: the configuration that says so.
    """

    axis: Axis
    before: int
    after: int
    config: Any


def target_of(config: Any, axis: Axis, share: float) -> Target:
    """The configuration with about ``share`` of an axis left.

    Args:
        config: transformers' configuration of the model as it is.
        axis: what to shrink.
        share: of its units to keep, between 0 and 1.

    Raises:
        ModelError: the model reads more than text, its configuration cannot say the smaller one,
            or nothing would go; names the key.
    """
    if config.get_text_config() is not config:
        raise ModelError(
            f"--{axis}: model_type {config.model_type!r} keeps its text part under text_config, "
            "beside a part for images or sound, and only models of text alone are cut smaller; "
            "leave 'slim' out ('quantize' and 'prune' take the text part)"
        )
    target = _target(config, axis, share)
    if target.after >= target.before:
        raise ModelError(
            f"--{axis} {share}: leaves all {target.before} units; give a smaller share"
        )
    return target


@contextmanager
def named_as_keys() -> Iterator[None]:
    """Let errors name the keys of a recipe's stage where they name flags of ``taut slim``."""
    try:
        yield
    except ModelError as error:
        told = _FLAG.sub(r"stages.slim.\1", str(error))
        if told == str(error):
            raise
        raise ModelError(told) from error


def _target(config: Any, axis: Axis, share: float) -> Target:
    smaller = copy.deepcopy(config)
    if axis == "depth":
        before = _number(config, "num_hidden_layers")
        return Target(axis, before, max(1, round(before * share)), smaller)
    if axis == "heads":
        return _heads(smaller, share)
    if axis == "experts":
        return _experts(smaller, share)
    key = "intermediate_size" if axis == "ffn" else "hidden_size"
    before = _number(config, key)
    after = _rounded(before, share)
    if axis == "hidden":
        _pin_head_dim(smaller)
    setattr(smaller, key, after)
    return Target(axis, before, after, _checked(smaller))


def _checked(config: Any) -> Any:
    """The configuration read again, so that its own rules are applied.

    Raises:
        ModelError: it breaks one.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        return type(config).from_dict(config.to_dict())
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[-160:]
        raise ModelError(f"config.json: transformers refuses the smaller one ({reason})") from error


def _heads(config: Any, share: float) -> Target:
    heads = _number(config, "num_attention_heads")
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    after = max(1, round(groups * share))
    _pin_head_dim(config)
    config.num_attention_heads = heads // groups * after
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = after
    return Target("heads", groups, after, _checked(config))


def _experts(config: Any, share: float) -> Target:
    """Experts of every mixture; as many of each group, where tokens choose groups first.

    Raises:
        ModelError: the configuration counts no experts, or tokens could not choose as many as now.
    """
    told = config.to_dict()
    counts = {key: told[key] for key in EXPERT_COUNTS if type(told.get(key)) is int}
    kind = f"model_type {config.model_type!r}"
    if not counts:
        raise ModelError(f"--experts: {kind} counts no experts; use --ffn, --heads or --depth")
    before, groups = next(iter(counts.values())), routing_groups(config)
    after = max(1, round(before * share / groups)) * groups
    chosen = _number(config, "num_experts_per_tok")
    open_groups = int(getattr(config, "topk_group", None) or 1) if groups > 1 else 1
    if before % groups or after // groups * open_groups < chosen:
        grouped = f" of {open_groups} out of n_group {groups} groups" if groups > 1 else ""
        raise ModelError(
            f"--experts {share}: leaves {after} of {before} experts, and every token chooses "
            f"num_experts_per_tok {chosen}{grouped}; keep more"
        )
    if groups > 1 and after // groups < _LEAST_OF_A_GROUP:
        raise ModelError(
            f"--experts {share}: leaves {after // groups} expert in each of n_group {groups} "
            f"groups, which are ranked by their best {_LEAST_OF_A_GROUP}; keep more"
        )
    for key in counts:
        setattr(config, key, after)
    return Target("experts", before, after, _checked(config))


def routing_groups(config: Any) -> int:
    """Groups of experts that tokens choose first (DeepSeek's); 1 where there are none."""
    return int(getattr(config, "n_group", None) or 1)


def _pin_head_dim(config: Any) -> None:
    """Write down the width of a head, which would otherwise follow from what changes.

    Raises:
        ModelError: this kind of configuration has no place for it.
    """
    if "head_dim" not in config.to_dict():
        raise ModelError(
            f"config.json: model_type {config.model_type!r} has no head_dim: engines take it from "
            "hidden_size / num_attention_heads, so neither can change alone; use --ffn or --depth"
        )
    config.head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)


def keep_blocks(config: Any, before: int, kept: list[int]) -> Any:
    """The configuration of some of the blocks: every list with an entry a block is cut too.

    Args:
        config: of the model as it is.
        before: its number of blocks.
        kept: blocks that stay, ascending.
    """
    smaller = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(smaller, key, [value[index] for index in kept])
    smaller.num_hidden_layers = len(kept)
    return smaller


def indices(
    old: tuple[int, ...], new: tuple[int, ...], name: str, pieces: dict[tuple[int, int], list[int]]
) -> list[list[int] | None]:
    """For each dimension of a tensor the entries that stay, None where all do.

    Args:
        old: its shape.
        new: its shape in the smaller model.
        name: of the tensor, for errors.
        pieces: (old size, new size) of a dimension, and the entries that stay.

    Raises:
        ModelError: a dimension shrinks in a way that no piece explains.
    """
    found: list[list[int] | None] = []
    for before, after in zip(old, new, strict=True):
        if before == after:
            found.append(None)
            continue
        found.append(_repeated(before, after, pieces))
        if found[-1] is None:
            raise ModelError(
                f"{name}: would shrink from {list(old)} to {list(new)}, which keeps no whole units "
                "of this axis; this architecture cannot be shrunk along it"
            )
    return found


def _repeated(
    before: int, after: int, pieces: dict[tuple[int, int], list[int]]
) -> list[int] | None:
    """Entries of a dimension that holds a piece once or several times (gate and up in one)."""
    for (old, new), kept in pieces.items():
        times = before // old
        if before == times * old and after == times * new:
            return [turn * old + index for turn in range(times) for index in kept]
    return None


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name; tied ones under each."""
    return {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _rounded(width: int, share: float) -> int:
    """About ``share`` of a width, in steps that suit the hardware where the width does."""
    step = math.gcd(width, _ROUND)
    while step > 1 and width // step < _LEAST_PARTS:
        step //= 2
    return max(step, round(width * share / step) * step)


def _number(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if type(value) is not int:
        raise ModelError(
            f"config.json: {key} is {str(value)[:40]!r}, not one number for all blocks; this "
            "architecture cannot be shrunk along it"
        )
    return value
