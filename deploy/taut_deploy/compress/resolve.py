"""Which of a recipe's stages acts on which layer, and what the layer is stored in.

Known before anything runs, of names and shapes alone, so that the plan refuses what the run, or
vLLM after it, would.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from taut_deploy.compress.formats.protocol import LayerFormat, TautFormat, WeightFormat
from taut_deploy.compress.stages import BLOCK_STAGES, ChooseFormat
from taut_deploy.diagnose.unserved import of_group
from taut_deploy.errors import RecipeError
from taut_deploy.fused_layers import fused_groups
from taut_deploy.recipe import Order, Recipe, Stage, StageModel, is_matched, matches

# Layers of a joined group that an error lists.
_SHOWN = 3
# A width that every group divides: what is refused for it too is not refused for its width.
_EVERY_GROUP = 128


@dataclass(frozen=True)
class Treatment:
    """What happens to one linear layer.

    Args:
        name: full name.
        shape: [N, K].
        stages: positions of the stages that act on it.
        format: what it is stored in, None where it stays dense.
    """

    name: str
    shape: tuple[int, int]
    stages: frozenset[int]
    format: LayerFormat | None


def resolve(
    shapes: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    dtype: torch.dtype,
    others: frozenset[str] = frozenset(),
) -> dict[str, Treatment]:
    """Work out what happens to every linear layer of the decoder blocks.

    Args:
        shapes: [N, K] of each, by full name.
        recipe: what to do.
        dtype: of the model's weights.
        others: names of linear layers outside the blocks, which patterns may name too.

    Raises:
        RecipeError: a pattern matches nothing, a stage has nothing to do, two stages store one
            layer, a format does not fit, or layers that vLLM joins are not alike.
    """
    names = [*shapes]
    _require_matches(recipe, [*names, *others])
    chosen: dict[str, list[int]] = {name: [] for name in names}
    formats: dict[str, LayerFormat] = {}
    for index, stage in enumerate(recipe.stages):
        picked = [n for n in names if stage.selects(n) and not is_matched(n, recipe.ignore)]
        if not picked:
            raise RecipeError(_nothing_to_do(stage, index, recipe))
        for name in picked:
            _require_once(recipe, chosen[name], index, name)
            _require_possible(stage, name, shapes[name])
            _require_zeros_kept(recipe, chosen[name], stage, name)
            chosen[name].append(index)
        formats |= _formats(stage, {name: shapes[name] for name in picked}, dtype)
    _require_one_method(formats, recipe)
    _require_fused_alike(names, formats)
    return {
        name: Treatment(name, shapes[name], frozenset(chosen[name]), formats.get(name))
        for name in names
    }


def _formats(
    stage: Stage, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> dict[str, LayerFormat]:
    """What a stage stores its layers in, by full name; nothing where it stores none."""
    acts = BLOCK_STAGES[stage.method]
    if acts.choose_format is None:
        return {}
    found = _chosen(acts.choose_format, stage, shapes, dtype)
    formats = dict.fromkeys(shapes, found)
    if acts.of_layer is not None:
        formats = {name: acts.of_layer(stage, found, name) for name in shapes}
    for name, layer_format in formats.items():
        _require_fits(layer_format, name, shapes[name])
        _require_served(name, layer_format)
    return formats


def _chosen(
    choose: ChooseFormat, stage: Stage, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> LayerFormat:
    """What a stage stores its layers in; where some widths do not allow it, their layers named."""
    try:
        return choose(stage, {k for _, k in shapes.values()}, dtype)
    except RecipeError as error:
        odd = (
            []
            if _is_refused(choose, stage, _EVERY_GROUP, dtype)
            else [
                f"{name} {[*shape]}"
                for name, shape in shapes.items()
                if _is_refused(choose, stage, shape[1], dtype)
            ]
        )
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise RecipeError(f"{error}: {odd[0]}{more}" if odd else str(error)) from error


def _is_refused(choose: ChooseFormat, stage: Stage, width: int, dtype: torch.dtype) -> bool:
    try:
        choose(stage, {width}, dtype)
    except RecipeError:
        return True
    return False


def _require_matches(recipe: Recipe, names: list[str]) -> None:
    """Refuse a pattern that matches no layer: what it was meant for would go another way."""
    # The head may be tied or called otherwise; the default pattern is for those that have it.
    known = ["lm_head", *names]
    places = [("ignore", recipe.ignore)]
    for index, stage in enumerate(recipe.stages):
        places.append((f"{recipe.place(index)}.layers", stage.layers))
        places.append((f"{recipe.place(index)}.ignore", stage.ignore))
    for place, patterns in places:
        for pattern in patterns:
            if not any(matches(name, pattern) for name in known):
                raise RecipeError(
                    f"{place}: {pattern!r} matches no linear layer; use shell wildcards or "
                    f"'re:' expressions over full names such as {names[0]}"
                )


def _nothing_to_do(stage: StageModel, index: int, recipe: Recipe) -> str:
    if stage.layers == ("*",) and not stage.ignore:
        return "ignore: matches every linear layer, so there is nothing to compress"
    return (
        f"{recipe.place(index)}: {stage.layers} without {stage.ignore + recipe.ignore} leaves no "
        "linear layer of a decoder block"
    )


def _require_once(recipe: Recipe, before: list[int], index: int, name: str) -> None:
    stage = recipe.stages[index]
    for earlier in before:
        other = recipe.stages[earlier]
        both_store = other.order is Order.STORE and stage.order is Order.STORE
        if both_store or type(other) is type(stage):
            what = "stored" if both_store else "treated"
            raise RecipeError(
                f"stages: {name} is {what} twice, by {recipe.place(earlier)} and "
                f"{recipe.place(index)}; part them with 'layers' and 'ignore'"
            )


def _require_possible(stage: Stage, name: str, shape: tuple[int, int]) -> None:
    why_not = BLOCK_STAGES[stage.method].why_not
    if why_not is not None and (reason := why_not(stage, *shape)) is not None:
        raise RecipeError(
            f"stages.{stage.method}: {name} {[*shape]}: {reason}; put it into 'ignore'"
        )


def _require_zeros_kept(recipe: Recipe, before: list[int], stage: StageModel, name: str) -> None:
    if stage.keeps_zeros:
        return
    for earlier in before:
        if recipe.stages[earlier].order is Order.PRUNE:
            raise RecipeError(
                f"stages: {name} is pruned by stage {earlier}, and stage "
                f"{recipe.stages.index(stage)} would fill its zeros again; part them "
                "with 'layers' and 'ignore'"
            )


def _require_served(name: str, layer_format: LayerFormat) -> None:
    """Refuse experts that vLLM loads nowhere; of other layers the plan says so with the kernel."""
    if ".experts." not in name:
        return
    if isinstance(layer_format, TautFormat):
        raise RecipeError(
            f"stages: {name} is one of many experts, which vLLM multiplies in one kernel that "
            f"takes no {layer_format.name}; put '*.experts.*' into 'ignore'"
        )
    if isinstance(layer_format, WeightFormat):
        group = layer_format.scheme([])
        unserved = of_group(group.weights, group.input_activations).why(name, "cuda")
        if why := layer_format.why_no_expert or unserved:
            raise RecipeError(
                f"stages: {name} cannot be {layer_format.name}: {why}; store '*.experts.*' "
                "otherwise, or put it into 'ignore'"
            )


def _require_fits(layer_format: LayerFormat, name: str, shape: tuple[int, int]) -> None:
    if (reason := layer_format.why_not(*shape)) is not None:
        raise RecipeError(
            f"stages: {name} {[*shape]} cannot be {layer_format.name}: {reason}; put it into "
            "'ignore'"
        )


def _require_one_method(formats: Mapping[str, LayerFormat], recipe: Recipe) -> None:
    """Refuse a checkpoint of two methods: ``config.json`` names one, and vLLM loads by it."""
    mine = next((one for one in formats.values() if isinstance(one, TautFormat)), None)
    if mine is not None and recipe.kv_cache is not None and recipe.kv_cache.dtype == "fp8":
        raise RecipeError(
            f"kv_cache: its scales are stored by compressed-tensors, {mine.name} layers by taut's "
            "own method, but a checkpoint has one; leave 'kv_cache' out"
        )
    ours = {name: isinstance(one, TautFormat) for name, one in formats.items()}
    if len(set(ours.values())) > 1:
        own, theirs = (next(name for name in ours if ours[name] is kind) for kind in (True, False))
        raise RecipeError(
            f"stages: {own} is stored as {formats[own].name} (quant_method taut) and {theirs} as "
            f"{formats[theirs].name} (compressed-tensors), but a checkpoint has one method; leave "
            "one of them dense with 'ignore', or give both stages of one method"
        )


def _require_fused_alike(names: list[str], formats: Mapping[str, LayerFormat]) -> None:
    for group in fused_groups(names):
        found = {name: formats.get(name) for name in group}
        if len({None if one is None else one.joined_as() for one in found.values()}) > 1:
            parent = group[0].rpartition(".")[0]
            examples = {what: name for name, what in reversed(found.items())}
            shown = group if len(group) <= _SHOWN else sorted(examples.values())
            each = ", ".join(
                f"{name.removeprefix(parent + '.')} {_words(found[name])}" for name in shown
            )
            raise RecipeError(
                f"stages: vLLM joins these layers of {parent} into one, so they must be stored "
                f"alike: {each}; give 'layers' and 'ignore' patterns that match all or none"
            )


def _words(layer_format: LayerFormat | None) -> str:
    if layer_format is None:
        return "dense"
    group = layer_format.group_size
    return layer_format.name + (f" g{group}" if group else "")
