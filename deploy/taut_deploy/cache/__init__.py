"""Compiled artefacts of a worker: what they depend on, where they lie, and how they are made early.

A vLLM worker compiles for minutes before it serves. What it compiled can be kept on a volume, in
one directory for each :func:`key <taut_deploy.cache.key.cache_key_of>`: everything known to change
the compiled code is in the key, so that another model, device or version never meets it. ``taut
cache warm`` fills such a directory before traffic comes; ``taut worker --cache`` uses it.
"""

from taut_deploy.cache.key import CacheKey, cache_key_of
from taut_deploy.cache.place import CachePlace, open_cache, read_marker

__all__ = ["CacheKey", "CachePlace", "cache_key_of", "open_cache", "read_marker"]
