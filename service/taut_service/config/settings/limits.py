"""Sizes above which a request is refused, and where callers' rates are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from taut_service.config.settings.fields import Count, Section


class Limits(Section):
    """Sizes above which a request is refused without asking a worker.

    ``chars_per_token`` bounds text prompts: a string longer than ``max_model_len *
    chars_per_token`` characters is refused here; anything shorter is counted exactly by the
    worker. ``max_inflight_bytes`` bounds the large bodies of all requests together: one that
    finds no room gets 429. ``max_json_nodes`` bounds commas and opening brackets outside of
    strings, which is about how many objects a body becomes in memory; ``max_json_depth`` bounds
    how deep they nest. ``max_choices`` bounds ``n`` and ``best_of``.
    """

    max_body_bytes: Count = 4 * 1024 * 1024
    max_inflight_bytes: Count = 128 * 1024 * 1024
    max_json_nodes: Count = 250_000
    max_json_depth: Annotated[int, Field(ge=8, le=500)] = 128
    max_choices: Count = 128
    chars_per_token: Count = 16

    @model_validator(mode="after")
    def _one_body_has_room(self) -> Limits:
        if self.max_inflight_bytes < self.max_body_bytes:
            raise ValueError("max_inflight_bytes must not be smaller than max_body_bytes")
        return self


class RedisServer(Section):
    """How a Redis is reached. ``timeout_s`` bounds each call, connecting included."""

    url: str
    password_file: Annotated[Path | None, Field(strict=False)] = None
    key_prefix: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,64}$")]
    timeout_s: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]

    @field_validator("url")
    @classmethod
    def _is_redis(cls, url: str) -> str:
        parts = urlsplit(url)
        # The text of the error must not show what may hold a password.
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        if parts.password is not None:
            raise ValueError("must not hold a password: put it into 'password_file'")
        return url


class RedisStore(RedisServer):
    """A Redis that several gateways share.

    ``on_failure`` is what happens to callers with limits while it cannot be used: ``open`` lets
    them pass unlimited, ``closed`` answers 503.
    """

    key_prefix: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,64}$")] = "taut:limit:"
    timeout_s: Annotated[float, Field(gt=0, le=0.05, allow_inf_nan=False)] = 0.05
    on_failure: Literal["open", "closed"] = "open"


class RateLimits(Section):
    """Where the rates of callers are counted, and how a request is priced before it is answered.

    ``default_max_tokens`` stands for a request that names no bound on its completion.
    """

    store: Literal["memory", "redis"] = "memory"
    redis: RedisStore | None = None
    default_max_tokens: Count = 512

    @model_validator(mode="after")
    def _has_what_the_store_needs(self) -> RateLimits:
        if (self.store == "redis") != (self.redis is not None):
            raise ValueError("'redis' is needed with 'store: redis', and only then")
        return self
