"""How each linear layer of a model is quantised, by its ``config.json``, in our kernels' terms.

Read as vLLM reads it: compressed-tensors, GPTQ, AWQ, FP8 (``quant_method: fp8``) and taut's own
(``quant_method: taut``). What another method means for a layer is not guessed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taut_deploy.diagnose.own_format import own_layers
from taut_deploy.errors import ModelError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

    from taut_kernels.for_deploy import layer_description

_NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "awq": (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)),
    "fp8": (("activation_scheme",),),
    "compressed-tensors": (),
    "taut": (),
}
"""What vLLM refuses to load a method without; each under any of its names."""
_ALL_LINEAR = "Linear"
_WORKER_KNOWS = "the line about kernels in the worker's log says what runs"
_ACT_ORDER = "activation reordering (desc_act, actorder) is not supported, nor by newer vLLM"


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """How one layer is quantised.

    Attributes:
        name: ``W4A16``, ``W8A16``, ``W8A8`` (int8), ``FP8``, ``dense``, or the words for another.
        group_size: weights a scale covers along K, -1 for one group a channel.
        obstacle: why no kernel of ours serves it, whatever its shape; None where one may.
        judged: whether we know what serves it at all.
        zero_points: whether weights of 4 or 8 bits alone have them.
    """

    name: str
    group_size: int = -1
    obstacle: str | None = None
    judged: bool = True
    zero_points: bool = False


DENSE = LayerScheme("dense", obstacle="not quantised, and taut has no kernel for dense layers")


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a model says of its layers.

    Attributes:
        method: ``quant_method``, None for a dense model.
        groups: targets (``Linear``, names, or regular expressions after ``re:``) and their scheme.
        left_out: layers that stay dense: names or parts of them, by method.
        only: parts of names outside which layers stay dense; empty for no such list.
        bits: of a weight, for the shape of packed tensors.
    """

    method: str | None = None
    groups: tuple[tuple[tuple[str, ...], LayerScheme], ...] = ()
    left_out: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    bits: int = 4

    def why_not_judged(self) -> str | None:
        """Say why we do not know what serves any layer; None where the method is known."""
        if self.method is None or self.method in _NEEDED:
            return None
        known = ", ".join(sorted(_NEEDED))
        return f"quant_method {self.method!r} is none of {known}; {_WORKER_KNOWS}"

    def summary(self) -> str:
        """Return the schemes in one line, for people."""
        if self.method is None:
            return "none: dense"
        names = dict.fromkeys(scheme.name for _, scheme in self.groups)
        return f"{', '.join(names) or 'unknown'} ({self.method})"

    def scheme_of(self, layer: str) -> LayerScheme:
        """Return the scheme of a quantised layer.

        Args:
            layer: module name in the file, for example ``model.layers.0.mlp.down_proj``.
        """
        from compressed_tensors.utils.match import match_name

        # As vLLM: a group that names the layer goes before one that names its class.
        for targets, scheme in self.groups:
            if any(match_name(layer, target) for target in targets):
                return scheme
        for targets, scheme in self.groups:
            if _ALL_LINEAR in targets:
                return scheme
        return _unjudged("no config group of compressed-tensors names it")

    def quantises(self, layer: str) -> bool:
        """Say whether a layer is quantised, where no stored tensors show it.

        Args:
            layer: module name.
        """
        from compressed_tensors.utils.match import match_name

        if self.method is None:
            return False
        if self.only and not any(part in layer for part in self.only):
            return False
        if self.method == "awq":
            return not any(part in layer for part in self.left_out)
        return not any(match_name(layer, target) for target in self.left_out)


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Read how a model's layers are quantised.

    Args:
        config: the model's ``config.json``.

    Raises:
        ModelError: it has a ``quantization_config`` vLLM could not read; names the key.
    """
    entry = _entry_of(config)
    if entry is None:
        return Quantization()
    method = entry.get("quant_method")
    if not isinstance(method, str):
        raise _wrong("names no quant_method")
    method = method.lower()
    for names in _NEEDED.get(method, ()):
        if all(name not in entry for name in names):
            raise _wrong(f"quant_method {method} needs {' or '.join(names)}")
    match method:
        case "compressed-tensors":
            return _compressed_tensors(entry)
        case "gptq":
            return _gptq(entry)
        case "awq":
            return _awq(entry)
        case "fp8":
            return _fp8(entry)
        case "taut":
            return _taut(entry)
    return Quantization(method)


def _entry_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the entry that vLLM reads: of the model, of its text part, or an older name's."""
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    found = [place.get("quantization_config") for place in places]
    found.append(config.get("compression_config"))
    entry = next((value for value in found if value is not None), None)
    if entry is not None and not isinstance(entry, dict):
        raise _wrong("expected a JSON object")
    return entry


def _gptq(entry: Mapping[str, Any]) -> Quantization:
    bits, group = _bits(entry, "bits"), _group_size(entry, "group_size")
    obstacle = None
    if entry["desc_act"] and group != -1:
        obstacle = _ACT_ORDER
    elif bits != 4:
        obstacle = _no_kernel(f"GPTQ weights of {bits} bits")
    elif not entry["sym"]:
        obstacle = "GPTQ with zero points (sym: false): vLLM does not load it"
    scheme = LayerScheme(_weight_only(bits), group, obstacle)
    if entry.get("dynamic"):
        scheme = _unjudged("quantization_config sets layers apart (dynamic)")
    parts = _names(entry, "modules_in_block_to_quantize")
    left_out = () if entry.get("lm_head") else ("lm_head",)
    return Quantization("gptq", (((_ALL_LINEAR,), scheme),), left_out, parts, bits)


def _awq(entry: Mapping[str, Any]) -> Quantization:
    bits = _bits(entry, "w_bit", "bits")
    group = _group_size(entry, "q_group_size", "group_size")
    obstacle = None
    if bits != 4:
        obstacle = _no_kernel(f"AWQ weights of {bits} bits")
    elif not entry["zero_point"]:
        obstacle = "weight type uint4 with zero_points=False"
    left_out = _names(entry, "modules_to_not_convert")
    left_out += () if entry.get("lm_head") else ("lm_head",)
    scheme = LayerScheme(_weight_only(bits), group, obstacle, zero_points=True)
    return Quantization("awq", (((_ALL_LINEAR,), scheme),), left_out, bits=bits)


def _fp8(entry: Mapping[str, Any]) -> Quantization:
    blocks = entry.get("weight_block_size")
    scheme = LayerScheme("FP8") if blocks is None else _fp8_blocks(blocks)
    left_out = _names(entry, "ignored_layers") or _names(entry, "modules_to_not_convert")
    return Quantization("fp8", (((_ALL_LINEAR,), scheme),), (*left_out, "lm_head"), bits=8)


def _fp8_blocks(blocks: object) -> LayerScheme:
    sides = list(blocks) if isinstance(blocks, Sequence) else [128, 128]
    obstacle = None
    if sides != [128, 128]:
        obstacle = _no_kernel(f"FP8 with scales of {'×'.join(map(str, sides))} blocks")
    return LayerScheme("FP8 by blocks", obstacle=obstacle)


def _taut(entry: Mapping[str, Any]) -> Quantization:
    layers = own_layers({"quantization_config": entry}) or {}
    groups: dict[LayerScheme, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(_scheme_of_taut(layer), []).append(name)
    read = tuple((tuple(names), scheme) for scheme, names in groups.items())
    return Quantization("taut", read, only=tuple(layers))


def _scheme_of_taut(layer: "layer_description.Layer") -> LayerScheme:
    from taut_kernels.for_deploy import layer_description as told

    grouped = layer.base if isinstance(layer, told.LowRank) else layer
    size = None if grouped is None else grouped.group_size
    return LayerScheme(layer.scheme, size or -1)


def _compressed_tensors(entry: Mapping[str, Any]) -> Quantization:
    groups = entry.get("config_groups", {})
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) for group in groups.values()
    ):
        raise _wrong("config_groups: expected an object of objects")
    read = tuple((_targets(group, "targets"), _scheme_of_group(group)) for group in groups.values())
    sparsity = entry.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        sparse = _unjudged("its weights are sparse (sparsity_config)")
        read = tuple((targets, sparse) for targets, _ in read)
    return Quantization("compressed-tensors", read, _targets(entry, "ignore"))


def _scheme_of_group(group: Mapping[str, Any]) -> LayerScheme:
    weights, inputs = _arguments(group, "weights"), _arguments(group, "input_activations")
    if weights is None:
        return DENSE
    parts = [part for part in (weights, inputs) if part is not None]
    kinds = [(_word(part.type), part.num_bits) for part in parts]
    match kinds:
        case [("int", 4 | 8)] if weights.strategy in ("group", "channel"):
            obstacle = _ACT_ORDER if weights.actorder in ("group", "dynamic") else None
            size, name = weights.group_size or -1, _weight_only(weights.num_bits)
            return LayerScheme(name, size, obstacle, zero_points=not weights.symmetric)
        case [("int", 8), ("int", 8)] if _by_row(weights, inputs) and weights.symmetric:
            return LayerScheme("W8A8")
        case [("float", 8), ("float", 8)] if weights.strategy == "block":
            return _fp8_blocks(weights.block_structure)
        case [("float", 8), ("float", 8)] if _by_row(weights, inputs) and weights.symmetric:
            return LayerScheme("FP8")
    words = " × ".join(f"{kind}{bits}" for kind, bits in kinds)
    words += "" if inputs is not None else " weights alone"
    return LayerScheme(words, obstacle=_no_kernel(f"{words}, scales by {_word(weights.strategy)},"))


def _word(value: object) -> str:
    """Return an enumeration's value: given ones are words already, defaults are not."""
    return str(getattr(value, "value", value))


def _by_row(weights: "QuantizationArgs", inputs: "QuantizationArgs | None") -> bool:
    """Say whether no scale is of a group: by tensor or channel, and by tensor or token."""
    by_token = inputs is not None and inputs.strategy in ("tensor", "token")
    return weights.strategy in ("tensor", "channel") and by_token


def _arguments(group: Mapping[str, Any], key: str) -> "QuantizationArgs | None":
    from compressed_tensors.quantization import QuantizationArgs

    if group.get(key) is None:
        return None
    try:
        return QuantizationArgs.model_validate(group[key])
    except (ValueError, TypeError) as error:
        reason = str(error).splitlines()
        raise _wrong(f"config_groups: {key}: {' '.join(map(str.strip, reason[1:3]))}") from error


def _targets(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of names and, after ``re:``, regular expressions."""
    names = _names(entry, key)
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise _wrong(f"{key}: {name!r} is no regular expression ({error})") from error
    return names


def _bits(entry: Mapping[str, Any], *names: str) -> int:
    name, value = _first(entry, names)
    if type(value) is not int or not 0 < value <= 32:
        raise _wrong(f"{name}: expected a whole number from 1 to 32, got {value!r}")
    return value


def _group_size(entry: Mapping[str, Any], *names: str) -> int:
    name, value = _first(entry, names)
    if type(value) is not int or (value < 1 and value != -1):
        raise _wrong(f"{name}: expected a whole number above 0 or -1, got {value!r}")
    return value


def _first(entry: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    """Return the first of several names that is there, and its value."""
    name = next(name for name in names if name in entry)
    return name, entry[name]


def _names(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of strings, flat; nothing where the key is not there."""
    value = entry.get(key) or []
    if not isinstance(value, list):
        raise _wrong(f"{key}: expected a list")
    flat = [part for item in value for part in (item if isinstance(item, list) else [item])]
    if not all(isinstance(part, str) for part in flat):
        raise _wrong(f"{key}: expected a list of strings")
    return tuple(flat)


def _weight_only(bits: int) -> str:
    return f"W{bits}A16"


def _no_kernel(what: str) -> str:
    return f"no taut kernel for {what} yet"


def _unjudged(why: str) -> LayerScheme:
    return LayerScheme("unknown", obstacle=f"{why}; {_WORKER_KNOWS}", judged=False)


def _wrong(what: str) -> ModelError:
    return ModelError(f"config.json: quantization_config: {what}")
