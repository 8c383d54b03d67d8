"""What ``/v1/models`` says: OpenAI's model object, and under ``taut`` how the model was made."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from taut_service.config.generation import Generation
from taut_service.config.settings.fields import Scalar
from taut_service.route.variants import Model


class VariantCard(BaseModel):
    """One precision of a model.

    ``share`` is the part of new requests that it gets now; ``provenance`` is what the
    configuration says of it: method, bits, sparsity, hashes of recipe and calibration, base
    model, measured recovery, artefact digest.
    """

    name: str
    share: float
    ready: bool
    provenance: dict[str, Scalar]


class ModelCard(BaseModel):
    """A model; ``taut`` is the provenance of the variant that gets the largest share."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "taut"
    max_model_len: int
    aliases: list[str]
    taut: dict[str, Scalar]
    variants: list[VariantCard]


class ModelList(BaseModel):
    """All models, in the order of the configuration."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def card_of(model: Model, created: int) -> ModelCard:
    """Describe a model as it is now.

    Args:
        model: of the configuration in force.
        created: seconds since the epoch.
    """
    variants = list(model.variants.values())
    total = sum(variant.weight for variant in variants)
    largest = max(variants, key=lambda variant: variant.weight)
    return ModelCard(
        id=model.name,
        created=created,
        max_model_len=model.limits.max_model_len,
        aliases=list(model.aliases),
        taut=largest.settings.provenance,
        variants=[
            VariantCard(
                name=variant.name,
                share=variant.weight / total,
                ready=variant.has_ready,
                provenance=variant.settings.provenance,
            )
            for variant in variants
        ],
    )


def cards_of(generation: Generation, created: int) -> ModelList:
    """Describe every model of a configuration."""
    return ModelList(data=[card_of(model, created) for model in generation.models.values()])
