"""API keys: known by their SHA-256, compared in constant time.

Without configured keys every request is let through and the ``Authorization`` header means
nothing to the gateway.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from taut_service.errors import UnauthorizedError
from taut_service.settings import ApiKey


class ApiKeys:
    """The configured callers.

    Args:
        keys: from the settings; may be empty.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._callers = [(bytes.fromhex(key.sha256), key.name) for key in keys]
        self.required = bool(keys)

    def caller_of(self, authorization: Sequence[bytes]) -> str | None:
        """Name who sent a request.

        Args:
            authorization: the values of its ``Authorization`` headers.

        Returns:
            The caller's configured name, or None where no keys are configured.

        Raises:
            UnauthorizedError: there is no header, more than one, it is not ``Bearer KEY``, or the
                key is unknown.
        """
        if not self.required:
            return None
        if not authorization:
            raise UnauthorizedError("this gateway needs an API key: 'Authorization: Bearer KEY'")
        scheme, _, key = authorization[0].partition(b" ")
        key = key.strip()
        if len(authorization) > 1 or scheme.lower() != b"bearer" or not key:
            raise UnauthorizedError(
                "the Authorization header is not of the form 'Authorization: Bearer KEY'"
            )
        digest = hashlib.sha256(key).digest()
        found: str | None = None
        # Every key is compared, so that the time taken tells nothing about which one matched.
        for known, name in self._callers:
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            raise UnauthorizedError("the API key is not known here")
        return found
