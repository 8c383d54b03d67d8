"""A CPU model's compiled graph: vLLM 0.32 saves it and, without this, cannot load it.

On a CPU vLLM has Inductor compile the whole model and saves the result in torch's ahead-of-time
format. Loading it ends in an AttributeError: vLLM calls ``finalize_loading``, a method of what its
own backend compiles, on what Inductor compiled. So every start compiles again, for a minute of
CPU time and more. Here Inductor's, whose loading is complete, gets that method.

Only where :data:`VARIABLE` says that the directory belongs to this machine: a saved graph has loops
for one CPU's vectors and one number of threads, and vLLM's own key holds neither.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "TAUT_LOAD_COMPILED"
"""``1``: the cache directory was keyed by CPU and threads; ``taut worker --cache`` sets it."""


def allow_loading() -> None:
    """Let vLLM load a graph that Inductor compiled, where :data:`VARIABLE` is ``1``."""
    if os.environ.get(VARIABLE) != "1":
        return
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Compiled

    if not hasattr(Compiled, "finalize_loading"):
        setattr(Compiled, "finalize_loading", _nothing_is_left)  # noqa: B010 - no such attribute


def _nothing_is_left(compiled: Any, vllm_config: Any) -> None:
    """Stand for ``VllmSerializableFunction.finalize_loading``, which compiles what it was left."""
