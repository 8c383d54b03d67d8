"""The stage that leaves rounding to optimum-quanto."""

from typing import ClassVar, Literal

from taut_deploy.recipe.stage import Order, StageModel


class Quanto(StageModel):
    """Round weights as optimum-quanto does: by channel, from each one's largest; no data needed.

    ``weights`` are ``int8`` or ``float8`` (e4m3); inputs stay as they are.
    """

    order: ClassVar[Order] = Order.STORE

    method: Literal["quanto"] = "quanto"
    weights: Literal["int8", "float8"] = "int8"
