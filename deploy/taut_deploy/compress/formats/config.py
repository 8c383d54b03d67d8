"""``quantization_config`` of a checkpoint, and the words its manifest has for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationStatus

from taut_deploy.compress.formats.protocol import LayerFormat, TautFormat, WeightFormat

DENSE = "dense"
MIXED = "mixed"
_MIXED_LAYOUT = "mixed-precision"


def quantization_config(
    formats: Mapping[str, LayerFormat],
    shapes: Mapping[str, tuple[int, int]],
    ignore: list[str],
    kv_cache: QuantizationArgs | None = None,
    stored_name: Callable[[str], str] = str,
    tables: Sequence[tuple[WeightFormat, list[str]]] = (),
) -> dict[str, Any] | None:
    """The ``quantization_config`` entry of config.json; None where nothing is quantised.

    Args:
        formats: of each compressed layer, by its full name; all of one method.
        shapes: [N, K] of at least those.
        ignore: full names of linear layers left alone.
        kv_cache: how keys and values are kept; None for the model's own type.
        stored_name: from a layer's full name to what its tensors are stored under, where readers
            of taut's own method look them up.
        tables: formats and targets of embeddings and head, where they are not dense.
    """
    ours = {name: one for name, one in formats.items() if isinstance(one, TautFormat)}
    if ours:
        from taut_kernels.for_deploy import layer_description

        return layer_description.write(
            {stored_name(name): one.describe(*shapes[name]) for name, one in ours.items()}
        )
    theirs = {name: one for name, one in formats.items() if isinstance(one, WeightFormat)}
    if not theirs and kv_cache is None and not tables:
        return None
    return _compressed_tensors(theirs, ignore, kv_cache, tables)


def _compressed_tensors(
    formats: Mapping[str, WeightFormat],
    ignore: list[str],
    kv_cache: QuantizationArgs | None,
    tables: Sequence[tuple[WeightFormat, list[str]]],
) -> dict[str, Any]:
    """The library's own entry.

    One format is one group over all linear layers; several are groups that name their layers.
    Readers ask for names before classes, so that a head of another format has its own.
    """
    members: dict[WeightFormat, list[str]] = {}
    for name, layer_format in formats.items():
        members.setdefault(layer_format, []).append(name)
    single = len(members) == 1
    targets = [(one, ["Linear"] if single else names) for one, names in members.items()]
    groups = {
        f"group_{index}": layer_format.scheme(names)
        for index, (layer_format, names) in enumerate([*targets, *tables])
    }
    layouts = {str(group.format) for group in groups.values()}
    config = QuantizationConfig(
        config_groups=groups,
        format=layouts.pop() if len(layouts) == 1 else _MIXED_LAYOUT,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=ignore,
        kv_cache_scheme=kv_cache,
    )
    dumped: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    return {**dumped, "quant_method": "compressed-tensors"}


def describe(
    formats: Mapping[str, LayerFormat], sizes: Mapping[str, int], dense_bits: int
) -> tuple[str, float]:
    """The scheme's name and the bits per weight of the layers that were compressed.

    Args:
        formats: of each quantised layer, by its full name; none means that layers are dense.
        sizes: weights in each of those layers.
        dense_bits: of a weight that is not quantised.

    Returns:
        ``mixed`` and the mean, rounded to hundredths, where there are several schemes.
    """
    names = {layer_format.name for layer_format in formats.values()}
    if not names:
        return DENSE, dense_bits
    if len(names) == 1:
        return names.pop(), next(iter(formats.values())).bits
    total = sum(sizes[name] for name in formats)
    bits = sum(sizes[name] * layer_format.bits for name, layer_format in formats.items())
    return MIXED, round(bits / total, 2)
