"""Asking for AMX: where a CPU has it, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from taut_kernels.vllm_plugin.amx import allow_amx


@pytest.mark.parametrize(
    ("has", "granted", "asked", "may"),
    [(True, True, 1, True), (True, False, 1, False), (False, True, 0, False)],
)
def test_only_a_cpu_that_has_it_asks(
    has: bool, granted: bool, asked: int, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks: list[bool] = []

    def ask() -> bool:
        asks.append(granted)
        return granted

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has)
    monkeypatch.setattr(torch.cpu, "_init_amx", ask)
    assert allow_amx() is may
    assert len(asks) == asked


def test_this_cpu_answers() -> None:
    assert allow_amx() is torch.cpu._is_amx_tile_supported()
