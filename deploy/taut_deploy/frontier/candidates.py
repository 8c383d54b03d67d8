"""What is worth trying: recipes and mixtures by predicted size, and why the others are not."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from taut_deploy.compress.job import fingerprint, open_stream, stored_dtype
from taut_deploy.compress.mixed.choose import Choice, resolved
from taut_deploy.compress.mixed.decide import Mixing, mixing_of
from taut_deploy.compress.pipeline_plan import plan as pipeline_plan
from taut_deploy.compress.plan import CompressionPlan, make_plan, treatments_of
from taut_deploy.compress.served import kernels_of
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.train.text import describe_sources
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.files import sha256_json
from taut_deploy.frontier.limits import request_cache_bytes
from taut_deploy.frontier.request import ShrinkRequest
from taut_deploy.frontier.served import why_not_served
from taut_deploy.models.directory import read_config
from taut_deploy.recipe import Order, Recipe, Training, builtin_recipes, load_recipe, with_target

DEFAULT_BITS = (4.25, 4.5, 5.0, 5.5, 6.0, 7.0)
"""Stored bits a weight of the mixtures that are tried."""
_TRAINED = "trains for long, on text that is best your own; name it with --recipe"
# A file's header has a line of some hundred bytes for each tensor, at most four to a layer.
_HEADER_BYTES_A_LAYER, _HEADER_BYTES = 1024, 1 << 16
_DEQUANTISED_AT_LOAD = "CODEBOOK"


@dataclass(frozen=True)
class Candidate:
    """One recipe to try, with what it is predicted to take.

    Args:
        name: for people; recipes of one stage and several targets differ in it.
        recipe: what to do.
        digest: of everything in recipe, texts, versions and device that determines the result.
        weights_bytes: of the checkpoint's weights.
        memory_bytes: of the weights as loaded and the KV cache of one request.
        disk_bytes: peak use of the disk while it is made.
    """

    name: str
    recipe: Recipe
    digest: str
    weights_bytes: int
    memory_bytes: int
    disk_bytes: int

    @property
    def place(self) -> str:
        """Name of its directories."""
        return f"{re.sub('[^a-z0-9.]+', '-', self.name.lower())}-{self.digest[:8]}"


@dataclass(frozen=True)
class Skipped:
    """What is not tried, and why.

    Args:
        name: as of a candidate.
        reason: in one line.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Ladder:
    """Everything that was asked for.

    Args:
        candidates: to try, the smallest first.
        skipped: the others.
    """

    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]


def chosen_recipes(names: tuple[str, ...]) -> tuple[tuple[Recipe, ...], tuple[Skipped, ...]]:
    """The recipes to try, and the shipped ones that only try where they are named.

    Args:
        names: built-in names or files; empty for all built-in recipes that do not train.

    Raises:
        RecipeError: there is no such recipe, or it is wrong.
    """
    loaded = tuple(load_recipe(name) for name in names or builtin_recipes())
    if names:
        return loaded, ()
    trained = [one for one in loaded if any(isinstance(stage, Training) for stage in one.stages)]
    return (
        tuple(one for one in loaded if one not in trained),
        tuple(Skipped(one.name, _TRAINED) for one in trained),
    )


def lay_out(request: ShrinkRequest) -> Ladder:
    """Predict every candidate's size, without compressing, and put them in order.

    Raises:
        ModelError: the model cannot be compressed at all: unreadable, or quantised already.
        RecipeError: not one candidate is within the limit, or none is left at all.
    """
    predicted = _Predicted(request, open_stream(request.job(request.recipes[0], "plan")))
    found: dict[str, Candidate] = {}
    skipped: list[Skipped] = []
    for recipe in request.recipes:
        try:
            for one in predicted.of(recipe):
                if isinstance(one, Skipped):
                    skipped.append(one)
                else:
                    found.setdefault(one.digest, one)
        except (RecipeError, ModelError) as error:
            skipped.append(Skipped(recipe.name, str(error)))
    fitting, too_large = _within_limit(request, list(found.values()))
    if not fitting:
        raise RecipeError(_nothing_left(request, list(found.values()), skipped))
    # Of equal sizes what is made faster comes first.
    fitting.sort(key=lambda one: (one.weights_bytes, one.recipe.needs_target, one.name))
    return Ladder(tuple(fitting), tuple(skipped + too_large))


class _Predicted:
    """Candidates of one model, with the sizes that its plan predicts."""

    def __init__(self, request: ShrinkRequest, stream: StreamedModel) -> None:
        self._request, self._stream = request, stream
        self._dtype: torch.dtype = stored_dtype(request.directory)

    def of(self, recipe: Recipe) -> Iterator[Candidate | Skipped]:
        """The candidates of a recipe.

        Raises:
            RecipeError: it does not fit the model.
            ModelError: the model cannot be cut as it says.
        """
        if recipe.of_orders(Order.BEFORE, Order.AFTER):
            job = self._request.job(recipe, "plan")
            yield self._judged(recipe.name, recipe, pipeline_plan(job, self._request.served_by))
            return
        mixing = mixing_of(self._stream, recipe, self._request.directory, self._dtype)
        if mixing is not None:
            yield from self._mixtures(mixing)
        else:
            yield self._judged(recipe.name, recipe, self._planned(recipe))

    def _planned(self, recipe: Recipe) -> CompressionPlan:
        request = self._request
        treatments = treatments_of(self._stream, recipe, self._dtype)
        plan = make_plan(self._stream, recipe, treatments, request.directory, self._dtype)
        kernels = kernels_of(treatments, read_config(request.directory), request.served_by)
        layers = tuple(replace(one, kernel=kernels[one.name]) for one in plan.layers)
        return replace(plan, layers=layers)

    def _judged(
        self,
        name: str,
        recipe: Recipe,
        plan: CompressionPlan,
        schemes: frozenset[str] = frozenset(),
    ) -> Candidate | Skipped:
        schemes = schemes or frozenset(one.scheme for one in plan.layers if one.scheme)
        kernels = [one.kernel for one in plan.layers]
        if (reason := why_not_served(schemes, kernels, self._request.served_by)) is not None:
            return Skipped(name, reason)
        if plan.bytes_after >= plan.bytes_before:
            return Skipped(name, "is no smaller than the model")
        grown = sum(
            one.bytes_before - one.bytes
            for one in plan.layers
            if one.scheme is not None and one.scheme.startswith(_DEQUANTISED_AT_LOAD)
        )
        cache = self._cache_bytes(recipe)
        loaded = plan.bytes_after + grown + cache
        digest = self._digest(recipe)
        return Candidate(name, recipe, digest, plan.bytes_after, loaded, plan.disk_bytes)

    def _cache_bytes(self, recipe: Recipe) -> int:
        limit = self._request.limit
        if limit is None or limit.of == "weights":
            return 0
        return request_cache_bytes(self._request.directory, recipe)

    def _digest(self, recipe: Recipe) -> str:
        made_by = fingerprint(self._request.job(recipe, "plan"))
        texts = [
            describe_sources(list(stage.text), f"stages.{index}.text")
            for index, stage in enumerate(recipe.stages)
            if isinstance(stage, Training)
        ]
        return sha256_json([made_by, texts])

    def _mixtures(self, mixing: Mixing) -> Iterator[Candidate | Skipped]:
        """One candidate for each target that the mixture's own candidates leave a choice for."""
        least = self._planned(_smallest(mixing))
        sizes = [
            sorted(
                sum(one.stored_bytes(*mixing.shapes[name]) for name in unit.layers)
                for one in unit.formats.values()
            )
            for unit in mixing.units
        ]
        weights = sum(
            mixing.shapes[name][0] * mixing.shapes[name][1]
            for unit in mixing.units
            for name in unit.layers
        )
        ends = (sum(one[0] for one in sizes), sum(one[-1] for one in sizes))
        schemes = frozenset(one.name for unit in mixing.units for one in unit.formats.values())
        targets: list[tuple[str, float | None, int]] = [
            (f"{bits:g} bits", bits, int(bits * weights / 8)) for bits in self._request.target_bits
        ]
        if (room := self._budget(mixing)) is not None and ends[0] <= room < ends[1]:
            targets.append(("all that fits", None, room))
        for told, bits, budget in targets:
            name = f"{mixing.recipe.name}, {told}"
            if not ends[0] <= budget < ends[1]:
                told_ends = " to ".join(f"{8 * end / weights:.2f}" for end in ends)
                yield Skipped(name, f"its candidates take {told_ends} bits a weight")
                continue
            whole = mixing.other_bytes + budget
            size = None if bits is not None else str(whole)
            plan = replace(
                least,
                bytes_after=whole,
                disk_bytes=least.disk_bytes - least.bytes_after + whole,
            )
            recipe = with_target(mixing.recipe, bits, size, None)
            yield self._judged(name, recipe, plan, schemes)

    def _budget(self, mixing: Mixing) -> int | None:
        """Bytes that the limit leaves the mixture's layers, headers of the files left out."""
        limit = self._request.limit
        if limit is None:
            return None
        headers = _HEADER_BYTES + _HEADER_BYTES_A_LAYER * len(mixing.shapes)
        return limit.bytes - self._cache_bytes(mixing.recipe) - mixing.other_bytes - headers


def _smallest(mixing: Mixing) -> Recipe:
    """The recipe with every layer in its smallest candidate."""
    first = {name: next(iter(unit.formats)) for unit in mixing.units for name in unit.layers}
    return resolved(mixing.recipe, mixing.stage, mixing.units, Choice(0.0, 0, 0.0, first))


def _taken(request: ShrinkRequest, candidate: Candidate) -> int:
    """What a limit counts of a candidate."""
    of_memory = request.limit is not None and request.limit.of == "memory"
    return candidate.memory_bytes if of_memory else candidate.weights_bytes


def _within_limit(
    request: ShrinkRequest, found: list[Candidate]
) -> tuple[list[Candidate], list[Skipped]]:
    limit = request.limit
    if limit is None:
        return found, []
    fitting = [one for one in found if _taken(request, one) <= limit.bytes]
    too_large = [
        Skipped(one.name, f"{_taken(request, one) / 1e6:.1f} MB are more than {limit.flag} allows")
        for one in found
        if one not in fitting
    ]
    return fitting, too_large


def _nothing_left(request: ShrinkRequest, found: list[Candidate], skipped: list[Skipped]) -> str:
    if request.limit is None or not found:
        first = skipped[0]
        return f"--recipe: nothing is left to try; {first.name}: {first.reason}"
    least = min(found, key=lambda one: _taken(request, one))
    return (
        f"{request.limit.flag}: the smallest is predicted to take "
        f"{_taken(request, least) / 1e6:.1f} MB (recipe {least.name}); allow at least that"
    )
