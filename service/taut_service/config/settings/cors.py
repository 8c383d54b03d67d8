"""Which web pages may call the gateway from a browser."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from taut_service.config.settings.fields import Section

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+")
HeaderName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100})$")]


class Cors(Section):
    """Pages of other origins (WHATWG Fetch, "CORS protocol"); without the section none may.

    ``origins`` are written as browsers do, ``https://chat.example.org``; ``*`` is every one.
    ``headers`` are those that a page may send, ``*`` whichever it asks for. ``credentials`` lets
    browsers send cookies for a proxy before the gateway.
    """

    origins: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    headers: Annotated[tuple[HeaderName, ...], Field(strict=False)] = (ANY,)
    credentials: bool = False
    max_age_s: Annotated[int, Field(ge=0, le=86_400)] = 600

    @model_validator(mode="after")
    def _origins_are_origins(self) -> Cors:
        for origin in self.origins:
            if origin != ANY and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(f"{origin!r} is not of the form https://host[:port], or '*'")
        if self.credentials and ANY in self.origins:
            raise ValueError("credentials need origins by name: '*' would let every page in")
        return self
