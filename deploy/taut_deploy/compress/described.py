"""What a compression's manifest says of it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taut_deploy.checkpoint import Golden, Manifest
from taut_deploy.compress.calibrate.calibration import CalibrationSet
from taut_deploy.compress.formats.config import describe
from taut_deploy.compress.job import CompressionJob, library_versions, stored_dtype
from taut_deploy.compress.plan import formats_of
from taut_deploy.compress.resolve import Treatment
from taut_deploy.models.directory import read_shape


def manifest_of(
    job: CompressionJob,
    treatments: Mapping[str, Treatment],
    calibration: CalibrationSet,
    layers: list[dict[str, Any]],
    golden: Golden,
    found: Mapping[str, Any],
) -> Manifest:
    """The manifest, but for the files, which are hashed when it is sealed.

    Args:
        job: what was asked for.
        treatments: of every linear layer, by full name.
        calibration: what it was calibrated on.
        layers: a report of each.
        golden: prompt and answer.
        found: what the run decided or measured by itself, beside the recipe.
    """
    directory = Path(job.model.path)
    model = job.model
    sizes = {name: math.prod(one.shape) for name, one in treatments.items()}
    scheme, bits = describe(formats_of(treatments), sizes, 8 * stored_dtype(directory).itemsize)
    shape = read_shape(directory, trust_remote_code=job.trust_remote_code)
    return Manifest(
        name=model.name,
        scheme=scheme,
        bits=bits,
        recipe={**job.recipe.as_json(), **found},
        recipe_hash=job.recipe.hash,
        base_model={"name": model.name, "digest": model.digest, "source": model.source},
        calibration={
            "description": calibration.description,
            "hash": calibration.hash,
            "sequences": calibration.tokens.shape[0],
            "sequence_length": calibration.tokens.shape[1],
        },
        layers=layers,
        golden=golden,
        max_model_len=shape.max_position_embeddings,
        libraries=library_versions(),
    )
