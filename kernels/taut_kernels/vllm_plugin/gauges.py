"""Gauges on a worker's ``/metrics``: which kernels its model runs on, and why not ours.

| gauge | labels | value |
|---|---|---|
| `taut_kernel_layers` | layer, shape, scheme, kernel, ours (yes, partly, no), reason | layers |
| `taut_kernel_ops` | op, owner, reason | layers, 1 for an op without classes |
| `taut_kernels_mode` | mode | 1 |

Set once, in the API server's process, when its engine has loaded the model: from the record that
process left (:mod:`.record`). A layer is named by the last part of its
module name and its shape N×K, not by its number, so a model of any depth has a handful of series;
past :data:`MOST_SERIES` the rest is one series. There are none with ``TAUT_KERNELS=off`` or
``--disable-log-stats``. Imports prometheus_client, which vLLM brings, and no vLLM.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

from prometheus_client import Gauge

from taut_kernels.vllm_plugin import record

MOST_SERIES = 64
_logger = logging.getLogger(__name__)


class LayerSeries(NamedTuple):
    """Labels of one series of ``taut_kernel_layers``, in their order."""

    layer: str
    shape: str
    scheme: str
    kernel: str
    ours: str
    reason: str


class OpSeries(NamedTuple):
    """Labels of one series of ``taut_kernel_ops``, in their order."""

    op: str
    owner: str
    reason: str


_OTHER = LayerSeries("other", "", "", "", "", f"more than {MOST_SERIES} kinds: see the record")


@cache
def _gauge(name: str, documentation: str, labels: tuple[str, ...]) -> Gauge:
    # As vLLM's own gauges: with several API servers each sets the same value, and one is shown.
    return Gauge(name, documentation, labels, multiprocess_mode="mostrecent")


def layer_series(layers: list[dict[str, Any]]) -> dict[LayerSeries, int]:
    """Count a record's layers by what they have in common.

    Args:
        layers: of a record.

    Returns:
        Labels → layers, at most :data:`MOST_SERIES` and one for the rest.
    """
    counts = Counter(
        LayerSeries(
            layer["layer"].rpartition(".")[2],
            layer.get("shape") or "",
            layer["scheme"],
            layer["kernel"],
            _ours(layer),
            layer["reason"] or layer.get("note") or "",
        )
        for layer in layers
    )
    kept = dict(counts.most_common(MOST_SERIES))
    if rest := counts.total() - sum(kept.values()):
        kept[_OTHER] = rest
    return kept


def _ours(layer: dict[str, Any]) -> str:
    if layer["reason"] is None:
        return "yes"
    # An 8-bit layer that CUTLASS serves at some numbers of tokens names both kernels.
    return "partly" if "+" in layer["kernel"] else "no"


def op_series(ops: dict[str, Any]) -> dict[OpSeries, int]:
    """Count a record's norms, activations, rotary embeddings and attention by their owner.

    Args:
        ops: of a record.

    Returns:
        Labels → layers; 1 for the provider of an IR op, and for each reason why calls of it are not
        ours all the same.
    """
    reason = ops["reason"] or ""
    found = {OpSeries(op, provider, reason): 1 for op, provider in ops["providers"].items()}
    for op, owners in ops["custom_ops"].items():
        found |= {OpSeries(op, owner, reason): count for owner, count in owners.items()}
    for op, reasons in ops.get("refused", {}).items():
        found |= {OpSeries(op, "vllm", why): 1 for why in reasons}
    for op, part in (("decode_attention", "attention"), ("cache_write", "cache_writes")):
        for row in ops.get(part, ()):
            found[OpSeries(op, row["owner"], row["reason"] or "")] = row["layers"]
    return found


def publish(document: dict[str, Any]) -> None:
    """Set the gauges from a record, in place of what they showed.

    Args:
        document: what :func:`.record.read` returned.
    """
    layers = _gauge(
        "taut_kernel_layers",
        "Quantised linear layers by the kernel they run on, and why it is not (only) taut's.",
        LayerSeries._fields,
    )
    ops = _gauge(
        "taut_kernel_ops",
        "Norms, activations, rotary embeddings, decode attention and cache writes by their owner.",
        OpSeries._fields,
    )
    mode = _gauge("taut_kernels_mode", "What the worker asked for, TAUT_KERNELS.", ("mode",))
    for gauge in (layers, ops, mode):
        gauge.clear()
    for labels, count in layer_series(document["layers"]).items():
        layers.labels(*labels).set(count)
    for op_labels, count in op_series(document["ops"]).items() if "ops" in document else ():
        ops.labels(*op_labels).set(count)
    mode.labels(document["mode"]).set(1)


def publish_record() -> None:
    """Set the gauges from the record of this worker's model; log why where there is none."""
    path = record.place()
    if path is None or not path.exists():
        # Engines on other machines (Ray) keep their own environment, and their own file.
        _logger.warning("no taut_kernel_* gauges: the engine left no record at %s", path)
        return
    publish(record.read(path))
