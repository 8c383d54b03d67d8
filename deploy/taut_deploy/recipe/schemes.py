"""What a quantisation scheme is made of, as far as a recipe must know; no tensor library needed.

How a scheme is computed and stored is :mod:`taut_deploy.compress.formats`; both tables have the
same names, which a test checks.
"""

import difflib
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator


@dataclass(frozen=True)
class SchemeRules:
    """What may be asked of a scheme.

    Attributes:
        num_bits: bits per weight, scales not counted.
        grouped: whether scales may be of groups along K.
        zero_points: whether ``symmetric: false`` is possible.
        by_channel: whether one scale a channel is possible where groups are.
    """

    num_bits: int
    grouped: bool
    zero_points: bool
    by_channel: bool = True


SCHEMES: dict[str, SchemeRules] = {
    "W8A8": SchemeRules(8, grouped=False, zero_points=False),
    "W4A16": SchemeRules(4, grouped=True, zero_points=True),
    "W8A16": SchemeRules(8, grouped=True, zero_points=True),
    "W3A16": SchemeRules(3, grouped=True, zero_points=True),
    "W2A16": SchemeRules(2, grouped=True, zero_points=True),
    "W4A8": SchemeRules(4, grouped=True, zero_points=False),
    "W4AFP8": SchemeRules(4, grouped=True, zero_points=False, by_channel=False),
    "FP8": SchemeRules(8, grouped=False, zero_points=False),
    "FP8-STATIC": SchemeRules(8, grouped=False, zero_points=False),
    "FP8-TENSOR": SchemeRules(8, grouped=False, zero_points=False),
    "FP8-BLOCK": SchemeRules(8, grouped=False, zero_points=False),
    "NVFP4A16": SchemeRules(4, grouped=False, zero_points=False),
    "MXFP4A16": SchemeRules(4, grouped=False, zero_points=False),
}


def known_scheme(name: str) -> str:
    """Return a scheme's name if there is such a scheme.

    Raises:
        ValueError: there is none; suggests one.
    """
    if name in SCHEMES:
        return name
    close = difflib.get_close_matches(name.upper(), SCHEMES, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(f"{name[:40]!r} is no scheme; {hint}there are {', '.join(SCHEMES)}")


SchemeName = Annotated[str, AfterValidator(known_scheme)]
