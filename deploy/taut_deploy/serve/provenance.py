"""What the gateway tells its clients about a model: ``taut`` in ``/v1/models``, flat scalars."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from taut_deploy.checkpoint import Manifest

Provenance = dict[str, str | int | float | None]
UNCOMPRESSED: Provenance = {"method": "none", "bits": 16}
MEASURED = ("perplexity_ratio", "top1_agreement", "mean_kl")
"""What the last validation measured against the baseline; each with its 95 % interval."""


def provenance_of(manifest: Manifest) -> Provenance:
    """Say how a checkpoint was made, what it weighs and what the compression cost.

    Args:
        manifest: of the checkpoint.

    Returns:
        Names and scalars; ``recovery`` is the baseline's perplexity over the checkpoint's, 1 for
        no loss, and is there only if the checkpoint has been validated.
    """
    found: Provenance = {
        "method": manifest.scheme,
        "bits": manifest.bits,
        "size_bytes": manifest.bytes,
        "base_model": manifest.base_model.get("name"),
        "base_digest": manifest.base_model.get("digest"),
        "recipe": manifest.recipe.get("name"),
        "recipe_hash": manifest.recipe_hash,
        "calibration_hash": manifest.calibration.get("hash"),
        "digest": manifest.digest,
    }
    found |= _of_layers(manifest.layers)
    if manifest.validation is not None:
        found |= _of_validation(manifest.validation)
    return found


def _of_layers(layers: list[dict[str, Any]]) -> Provenance:
    if not layers:
        return {}
    groups = {layer.get("group_size") for layer in layers}
    return {
        "compressed_layers": len(layers),
        # One value only where all layers agree; a mixture has no single group size.
        "group_size": groups.pop() if len(groups) == 1 else None,
        "sparsity": round(1.0 - fmean(float(layer.get("density", 1.0)) for layer in layers), 6),
    }


def _of_validation(validation: Mapping[str, Any]) -> Provenance:
    found: Provenance = {"validation": str(validation["verdict"])}
    if "policy" in validation:
        found["validation_policy"] = str(validation["policy"])
    metrics = validation.get("metrics", {})
    for name in MEASURED:
        if name in metrics:
            found[name] = metrics[name]["estimate"]
            found[f"{name}_low"] = metrics[name]["low"]
            found[f"{name}_high"] = metrics[name]["high"]
    ratio = metrics.get("perplexity_ratio")
    if ratio is not None and all(ratio[end] > 0 for end in ("estimate", "low", "high")):
        found["recovery"] = 1.0 / ratio["estimate"]
        found["recovery_low"] = 1.0 / ratio["high"]
        found["recovery_high"] = 1.0 / ratio["low"]
    return found
