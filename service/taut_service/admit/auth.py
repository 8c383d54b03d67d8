"""API keys: known by their SHA-256, compared in constant time.

The SHA-256 of what a client sends is looked up in a table and the one candidate compared in
constant time, so the cost does not grow with the number of keys. What the look-up itself takes
depends on hashes only, and of those on their SipHash under a secret of the process: it tells
nothing about any key.

Without configured keys every request is let through and the ``Authorization`` header means
nothing to the gateway.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from taut_service.admit.fair_queue import Priority
from taut_service.admit.key_file import read_keys
from taut_service.admit.limits.bucket import RateLimit
from taut_service.config.settings import ApiKey, Settings, SettingsError
from taut_service.config.settings.keys import (
    ADMIN,
    HIGH_PRIORITY,
    INFERENCE,
    MODEL_PREFIX,
    PIN_VARIANT,
    refuse_equal_keys,
)
from taut_service.errors import ForbiddenError, RequestError, UnauthorizedError

CALLER = "taut.caller"
"""Where the front leaves the caller in the ASGI scope of a request that FastAPI answers."""
_NOBODY: Final = bytes(32)
_SHA256: Final = hashlib.sha256()
"""To be copied: OpenSSL takes longer to find the function by its name than to run it on a key."""


class Caller:
    """Somebody with a key, and what the key allows. Immutable.

    Args:
        key: from the configuration.
    """

    __slots__ = (
        "_may_rise",
        "_models",
        "brown_out",
        "is_admin",
        "limit",
        "max_inflight",
        "may_pin",
        "name",
        "priority",
        "weight",
    )

    def __init__(self, key: ApiKey) -> None:
        scopes = key.scopes
        self.name = key.name
        self.priority = Priority[key.priority.name]
        self.weight = key.weight
        self.brown_out = key.brown_out
        self.max_inflight = key.max_inflight
        self.is_admin = ADMIN in scopes
        self.may_pin = PIN_VARIANT in scopes
        self._may_rise = HIGH_PRIORITY in scopes
        self._models: frozenset[str] | None = None
        if INFERENCE not in scopes:
            named = (scope for scope in scopes if scope.startswith(MODEL_PREFIX))
            self._models = frozenset(scope.removeprefix(MODEL_PREFIX) for scope in named)
        limit = RateLimit(key.requests_per_minute, key.tokens_per_minute)
        self.limit = None if limit == (None, None) else limit

    def may_call(self, model: str) -> bool:
        """Whether the key covers a model, by its public name."""
        return self._models is None or model in self._models

    def check_model(self, model: str) -> None:
        """Let a request for a model pass.

        Args:
            model: its public name.

        Raises:
            ForbiddenError: the key does not cover it.
        """
        if not self.may_call(model):
            raise ForbiddenError(f"this API key may not use the model {model!r}", param="model")

    def priority_for(self, asked: bytes | None) -> Priority:
        """Return the class of a request.

        Args:
            asked: value of its ``X-Taut-Priority``, None without.

        Raises:
            RequestError: the value is not a class.
            ForbiddenError: it is above the key's own, and the key may not ask for that.
        """
        if asked is None:
            return self.priority
        priority = parse_priority(asked)
        if priority < self.priority and not self._may_rise:
            raise ForbiddenError(
                f"this API key may not ask for a priority above {self.priority.name.lower()!r}"
            )
        return priority

    def check_worker_priority(self, asked: int | None) -> None:
        """Let a body's ``priority`` pass: workers serve smaller numbers first, 0 is usual.

        Args:
            asked: the number, None without.

        Raises:
            ForbiddenError: it is before everybody else's, and the key may not ask for that.
        """
        if asked is not None and asked < 0 and not self._may_rise:
            raise ForbiddenError(
                "this API key may not ask for a 'priority' below 0", param="priority"
            )


def parse_priority(value: bytes) -> Priority:
    """Read an ``X-Taut-Priority`` header.

    Args:
        value: as it came.

    Returns:
        The class.

    Raises:
        RequestError: it is not one of the three.
    """
    for priority in Priority:
        if value.lower() == priority.name.lower().encode():
            return priority
    raise RequestError("X-Taut-Priority must be high, normal or low", code="invalid_value")


class ApiKeys:
    """The callers. Lives as long as the process; the keys change under it.

    Args:
        settings: ``api_keys`` and ``api_keys_file``.

    Raises:
        SettingsError: the file of keys cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take over a new configuration, reading its file of keys; all or nothing.

        Args:
            settings: the configuration.

        Raises:
            SettingsError: the file cannot be used, or clashes; nothing has changed then.
        """
        path = settings.api_keys_file
        self._install(settings, () if path is None else read_keys(path))

    def replace_file_keys(self, listed: tuple[ApiKey, ...]) -> bool:
        """Take over the keys of a file that changed; those of the configuration stay.

        Args:
            listed: all keys of the file.

        Returns:
            Whether they differ from those in force.

        Raises:
            SettingsError: they clash with the configuration's; nothing has changed then.
        """
        if listed == self._listed:
            return False
        self._install(self._settings, listed)
        return True

    def _install(self, settings: Settings, listed: tuple[ApiKey, ...]) -> None:
        keys = (*settings.api_keys, *listed)
        try:
            refuse_equal_keys(keys)
        except ValueError as error:
            raise SettingsError(f"{settings.api_keys_file}: {error}") from error
        self._callers = _table(keys)
        self._settings = settings
        self._listed = listed
        # A file without a key in it locks everybody out; it does not open the door.
        self.required = bool(keys) or settings.api_keys_file is not None

    @property
    def file(self) -> Path | None:
        """The file of keys, None without."""
        return self._settings.api_keys_file

    def __len__(self) -> int:
        return len(self._callers)

    def caller_of(self, authorization: Sequence[bytes]) -> Caller | None:
        """Say who sent a request.

        Args:
            authorization: the values of its ``Authorization`` headers.

        Returns:
            The caller, or None where no keys are configured.

        Raises:
            UnauthorizedError: there is no header, more than one, it is not ``Bearer KEY``, or the
                key is unknown.
        """
        if not self.required:
            return None
        if not authorization:
            raise UnauthorizedError("this gateway needs an API key: 'Authorization: Bearer KEY'")
        if len(authorization) > 1:
            raise UnauthorizedError(
                "the request holds several API keys: send one, as 'Authorization: Bearer KEY'"
            )
        scheme, _, key = authorization[0].partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            raise UnauthorizedError(
                "the Authorization header is not of the form 'Authorization: Bearer KEY'"
            )
        state = _SHA256.copy()
        state.update(key)
        digest = state.digest()
        known, caller = self._callers.get(digest, (_NOBODY, None))
        if not hmac.compare_digest(known, digest) or caller is None:
            raise UnauthorizedError("the API key is not known here")
        return caller


def _table(keys: Iterable[ApiKey]) -> dict[bytes, tuple[bytes, Caller]]:
    digests = ((bytes.fromhex(key.sha256), key) for key in keys)
    return {digest: (digest, Caller(key)) for digest, key in digests}
