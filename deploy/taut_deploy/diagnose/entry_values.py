"""Values of a model's ``quantization_config``, each refused by its key where it is not sound."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from taut_deploy.errors import ModelError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs


def targets_of(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of names and, after ``re:``, regular expressions.

    Args:
        entry: the ``quantization_config`` or a part of it.
        key: of the list.

    Raises:
        ModelError: it is something else.
    """
    names = names_of(entry, key)
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise wrong(f"{key}: {name!r} is no regular expression ({error})") from error
    return names


def names_of(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of strings, flat; nothing where the key is not there.

    Args:
        entry: the ``quantization_config`` or a part of it.
        key: of the list.

    Raises:
        ModelError: it is something else.
    """
    value = entry.get(key) or []
    if not isinstance(value, list):
        raise wrong(f"{key}: expected a list")
    flat = [part for item in value for part in (item if isinstance(item, list) else [item])]
    if not all(isinstance(part, str) for part in flat):
        raise wrong(f"{key}: expected a list of strings")
    return tuple(flat)


def bits_of(entry: Mapping[str, Any], *names: str) -> int:
    """Return the bits of a weight, under the first of several names that is there.

    Raises:
        ModelError: no number of bits.
    """
    name, value = _first(entry, names)
    if type(value) is not int or not 0 < value <= 32:
        raise wrong(f"{name}: expected a whole number from 1 to 32, got {value!r}")
    return value


def group_size_of(entry: Mapping[str, Any], *names: str) -> int:
    """Return the weights that a scale covers, -1 for a row, likewise.

    Raises:
        ModelError: no size of a group.
    """
    name, value = _first(entry, names)
    if type(value) is not int or (value < 1 and value != -1):
        raise wrong(f"{name}: expected a whole number above 0 or -1, got {value!r}")
    return value


def kinds_of(
    weights: "QuantizationArgs", inputs: "QuantizationArgs | None"
) -> list[tuple[str, int | None]]:
    """Return type and bits of a group's weights and, where they are rounded, of its inputs."""
    parts = [part for part in (weights, inputs) if part is not None]
    return [(word_of(part.type), part.num_bits) for part in parts]


def word_of(value: object) -> str:
    """Return an enumeration's value: given ones are words already, defaults are not."""
    return str(getattr(value, "value", value))


def wrong(what: str) -> ModelError:
    """Return the error about a value.

    Args:
        what: its key and what is wrong.
    """
    return ModelError(f"config.json: quantization_config: {what}")


def _first(entry: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    """Return the first of several names that is there, and its value."""
    name = next(name for name in names if name in entry)
    return name, entry[name]
