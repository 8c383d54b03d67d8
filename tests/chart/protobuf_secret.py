"""A Secret out of Kubernetes' protobuf, in which Helm's client sends the releases that it keeps."""

from __future__ import annotations

import base64
from typing import Any

MAGIC = b"k8s\x00"


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _fields(raw: bytes) -> dict[int, list[bytes]]:
    """Fields of a message that have a length, by number; numbers are left out."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, wire = tag >> 3, tag & 7
        if wire == 2:
            size, at = _varint(raw, at)
            found.setdefault(number, []).append(raw[at : at + size])
            at += size
        elif wire == 0:
            _, at = _varint(raw, at)
        else:
            raise ValueError(f"wire type {wire}")
    return found


def _map(entries: list[bytes]) -> dict[str, bytes]:
    parts = [_fields(entry) for entry in entries]
    return {each[1][0].decode(): each.get(2, [b""])[0] for each in parts}


def decode(body: bytes) -> dict[str, Any]:
    """Return the Secret as JSON has it.

    Args:
        body: as sent: the magic number, then runtime.Unknown around the Secret.

    Raises:
        ValueError: it is none.
    """
    if not body.startswith(MAGIC):
        raise ValueError("no protobuf of Kubernetes")
    secret = _fields(_fields(body[len(MAGIC) :])[2][0])
    metadata = _fields(secret[1][0])
    labels = {key: value.decode() for key, value in _map(metadata.get(11, [])).items()}
    data = _map(secret.get(2, []))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": metadata[1][0].decode(), "labels": labels},
        "type": secret.get(3, [b""])[0].decode(),
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }
