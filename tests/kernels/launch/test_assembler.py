"""Which `ptxas` Triton is given: the newer of the two it brings, where the same drivers load it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from emulator import gluon, hopper
from triton import knobs

from taut_bench.instruments import aot
from taut_bench.instruments.forms import scaled_mm as scaled_mm_forms
from taut_bench.testing.scaled_mm import make_scaled_mm_case
from taut_kernels.gemm.scaled_mm import blocks_hopper as fp8_block_hopper
from taut_kernels.gemm.scaled_mm import tile as tiles_scaled_mm_tile
from taut_kernels.gemm.scaled_mm.blocks_tall_kernel import fp8_block_tall_kernel
from taut_kernels.gemm.scaled_mm.dispatch import launch_block
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch import assembler as launch_assembler
from taut_kernels.launch import launcher

Brought = Callable[[str, str], tuple[str, str]]


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Brought]:
    """Let Triton bring two assemblers of given versions; return their paths."""
    monkeypatch.setattr(knobs, "propagate_env", False)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)

    def bring(usual: str, other: str) -> tuple[str, str]:
        for name, version in (("ptxas", usual), ("ptxas_blackwell", other)):
            tool = tmp_path / f"{name}-{version}"
            tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V1'\n")
            tool.chmod(0o755)
            setattr(knobs.nvidia, name, str(tool))
        return knobs.nvidia.ptxas.path, knobs.nvidia.ptxas_blackwell.path

    with knobs.nvidia.scope():
        yield bring


def test_the_newer_of_the_same_major_version_assembles(brought: Brought) -> None:
    usual, newer = brought("12.8", "12.10")
    with launch_assembler.newest_ptxas():
        assert knobs.nvidia.ptxas.path == newer
        with launch_assembler.newest_ptxas():
            assert knobs.nvidia.ptxas.path == newer
    assert knobs.nvidia.ptxas.path == usual


@pytest.mark.parametrize("other", ["12.8", "12.7", "13.4"])
def test_one_that_is_no_newer_or_wants_newer_drivers_does_not(other: str, brought: Brought) -> None:
    usual, _ = brought("12.8", other)
    with launch_assembler.newest_ptxas():
        assert knobs.nvidia.ptxas.path == usual


def test_a_path_of_the_users_stays(brought: Brought, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, _ = brought("12.8", "12.9")
    monkeypatch.setenv("TRITON_PTXAS_PATH", usual)
    with launch_assembler.newest_ptxas():
        assert knobs.nvidia.ptxas.path == usual
    assert os.environ["TRITON_PTXAS_PATH"] == usual


def test_what_raises_inside_leaves_the_usual_one(brought: Brought) -> None:
    usual, _ = brought("12.8", "12.9")
    with pytest.raises(KeyError), launch_assembler.newest_ptxas():
        raise KeyError
    assert knobs.nvidia.ptxas.path == usual


def test_variants_are_compiled_by_what_their_launcher_takes() -> None:
    """Both block-wise kernels that TMA feeds want the newest, others the usual one."""
    chosen = {
        v.tile.block_m: v.assembler
        for v in scaled_mm_forms.kernel_variants()
        if v.tile.kernel == "blocks"
    }
    assert set(chosen.values()) == {launch_assembler.newest_ptxas}
    for tile in tiles_scaled_mm_tile.tiles_of_blocks():
        assert chosen[tile.block_m] is fp8_block_hopper.launcher(tile).assembler
    entered = []

    @contextmanager
    def assembler() -> Iterator[None]:
        entered.append(True)
        yield

    variant = next(v for v in aot.every_variant() if v.target == "sm_90")
    assert aot.compile_variant(replace(variant, assembler=assembler)).failure is None
    assert entered == [True]


def test_nothing_is_assembled_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def assembler() -> Iterator[None]:
        raise AssertionError("asked for")
        yield

    kernel = gluon.OnNumPy(fp8_block_tall_kernel, hopper.run)
    monkeypatch.setattr(fp8_block_hopper, "_tall", launcher.Launcher(kernel, assembler))
    case = make_scaled_mm_case("fp8_gemm", 3, 8, 16, scaling="block")
    tile = ScaledMmTile("blocks", 256, 128, 128, 4, 4)
    operands = (case.x, case.weight, case.x_scale, case.weight_scale, None, case.arrivals)
    assert case.why_wrong(launch_block(tile, *operands, case.out_dtype)) is None
