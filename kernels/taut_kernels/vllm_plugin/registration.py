"""The part of :func:`taut_kernels.vllm_plugin.register` that imports vLLM."""

from __future__ import annotations

import logging

import torch
from vllm.model_executor.kernels import linear as kernel_selection
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from taut_kernels.vllm_plugin import compat, selection
from taut_kernels.vllm_plugin.linear import TautW4A16LinearKernel, refusal


def _make_our_log_lines_visible() -> None:
    # vLLM configures only its own logger; ours would vanish in the worker.
    ours, theirs = logging.getLogger("taut_kernels"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = False


def install(mode: str) -> None:
    """Insert our kernels and the audit into this process.

    Args:
        mode: ``prefer`` or ``require``.

    Raises:
        IncompatibleVllmError: this vLLM lacks an extension point.
    """
    _make_our_log_lines_visible()
    compat.insert_first(TautW4A16LinearKernel, kernel_selection)

    def conclude(model: torch.nn.Module) -> None:
        selection.conclude(list(selection.audit(model, refusal)), mode)

    compat.after_model_load(BaseModelLoader, conclude)
