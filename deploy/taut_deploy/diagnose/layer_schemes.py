"""How each linear layer of a model is quantised, by its ``config.json``, in our kernels' terms.

Read as vLLM reads it: compressed-tensors, GPTQ, AWQ, FP8 (``quant_method: fp8``) and taut's own
(``quant_method: taut``). What another method means for a layer is not guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from taut_deploy.diagnose.entry_values import (
    bits_of,
    group_size_of,
    kinds_of,
    names_of,
    targets_of,
    word_of,
    wrong,
)
from taut_deploy.diagnose.own_format import own_layers
from taut_deploy.diagnose.unserved import SERVED, Unserved, of_group, of_weights_alone

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
        unserved: why vLLM loads no such layer.
    """

    name: str
    group_size: int = -1
    obstacle: str | None = None
    judged: bool = True
    zero_points: bool = False
    unserved: Unserved = SERVED


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
        raise wrong("names no quant_method")
    method = method.lower()
    for names in _NEEDED.get(method, ()):
        if all(name not in entry for name in names):
            raise wrong(f"quant_method {method} needs {' or '.join(names)}")
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
        raise wrong("expected a JSON object")
    return entry


def _gptq(entry: Mapping[str, Any]) -> Quantization:
    bits, group = bits_of(entry, "bits"), group_size_of(entry, "group_size")
    obstacle = None
    if entry["desc_act"] and group != -1:
        obstacle = _ACT_ORDER
    elif bits != 4:
        obstacle = _no_kernel(f"GPTQ weights of {bits} bits")
    elif not entry["sym"]:
        obstacle = "GPTQ with zero points (sym: false): vLLM does not load it"
    scheme = LayerScheme(
        _weight_only(bits), group, obstacle, unserved=of_weights_alone(bits, group)
    )
    if entry.get("dynamic"):
        scheme = _unjudged("quantization_config sets layers apart (dynamic)")
    parts = names_of(entry, "modules_in_block_to_quantize")
    left_out = () if entry.get("lm_head") else ("lm_head",)
    return Quantization("gptq", (((_ALL_LINEAR,), scheme),), left_out, parts, bits)


def _awq(entry: Mapping[str, Any]) -> Quantization:
    bits = bits_of(entry, "w_bit", "bits")
    group = group_size_of(entry, "q_group_size", "group_size")
    obstacle = None
    if bits != 4:
        obstacle = _no_kernel(f"AWQ weights of {bits} bits")
    elif not entry["zero_point"]:
        obstacle = "weight type uint4 with zero_points=False"
    left_out = names_of(entry, "modules_to_not_convert")
    left_out += () if entry.get("lm_head") else ("lm_head",)
    unserved = of_weights_alone(bits, group, zero_points=True)
    scheme = LayerScheme(_weight_only(bits), group, obstacle, zero_points=True, unserved=unserved)
    return Quantization("awq", (((_ALL_LINEAR,), scheme),), left_out, bits=bits)


def _fp8(entry: Mapping[str, Any]) -> Quantization:
    blocks = entry.get("weight_block_size")
    scheme = LayerScheme("FP8") if blocks is None else _fp8_blocks(blocks)
    left_out = names_of(entry, "ignored_layers") or names_of(entry, "modules_to_not_convert")
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
        raise wrong("config_groups: expected an object of objects")
    read = tuple(
        (targets_of(group, "targets"), _scheme_of_group(group)) for group in groups.values()
    )
    sparsity = entry.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        sparse = _unjudged("its weights are sparse (sparsity_config)")
        read = tuple((targets, sparse) for targets, _ in read)
    return Quantization("compressed-tensors", read, targets_of(entry, "ignore"))


def _scheme_of_group(group: Mapping[str, Any]) -> LayerScheme:
    weights, inputs = _arguments(group, "weights"), _arguments(group, "input_activations")
    if weights is None:
        return DENSE
    return replace(_kind_of(weights, inputs), unserved=of_group(weights, inputs))


def _kind_of(weights: "QuantizationArgs", inputs: "QuantizationArgs | None") -> LayerScheme:
    kinds = kinds_of(weights, inputs)
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
    by = word_of(weights.strategy)
    return LayerScheme(words, obstacle=_no_kernel(f"{words}, scales by {by},"))


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
        raise wrong(f"config_groups: {key}: {' '.join(map(str.strip, reason[1:3]))}") from error


def _weight_only(bits: int) -> str:
    return f"W{bits}A16"


def _no_kernel(what: str) -> str:
    return f"no taut kernel for {what} yet"


def _unjudged(why: str) -> LayerScheme:
    return LayerScheme("unknown", obstacle=f"{why}; {_WORKER_KNOWS}", judged=False)
