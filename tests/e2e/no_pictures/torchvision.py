"""Stands in for torchvision, which the locks leave out, where vLLM is given nothing but text.

vLLM's and transformers' modules of models with a vision part import it by name; what they would do
to a picture with it is not here.
"""

from __future__ import annotations

import sys
import types

__version__ = "0.28.0"


class _AnyMember(type):
    """The type of a class whose every member is a word."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _AnyName(types.ModuleType):
    """A module that has a class by every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyMember(name, (), {})


for _part in ("io", "transforms", "transforms.functional", "transforms.v2"):
    sys.modules[f"{__name__}.{_part}"] = _AnyName(_part)
transforms = sys.modules[f"{__name__}.transforms"]
