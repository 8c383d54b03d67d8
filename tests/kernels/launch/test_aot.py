"""Kernels × tiles compile for sm_80 and sm_90: no GPU, no spills, within shared memory.

Here every kernel once; what has the mark `long`, CI runs: one tile of every form, or what
TAUT_AOT_EVERY says. `make aot` compiles all.
"""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from taut_bench.instruments import aot
from taut_bench.instruments.forms import w4a16
from taut_bench.instruments.recorder import KernelVariant, variants_of
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile

EVERY = int(os.environ.get("TAUT_AOT_EVERY", "0"))
"""0 compiles some 360; 5 every form and size and a fifth of all, some 1,060; 1 all 2,100, as `make
aot` does: 12 minutes of a core, 30 of an old one."""


def compiled_clean(target: str, every: int | None) -> list[aot.AotResult]:
    """Compile a sample, none of which may fail."""
    # A process more for each core of ours imports torch, and makes every variant, once more.
    cores = len(os.sched_getaffinity(0))
    results = list(aot.compile_all([target], every=every, jobs=cores))
    assert [result for result in results if result.failure is not None] == []
    # A pointwise kernel shares nothing.
    assert all(0 < result.registers <= 255 and result.shared_bytes >= 0 for result in results)
    return results


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_kernel_compiles_clean(target: str) -> None:
    kernels = {variant.kernel for variant in aot.every_variant() if variant.target == target}
    assert len(compiled_clean(target, None)) == len(kernels)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_variants_compile_clean(target: str) -> None:
    results = compiled_clean(target, EVERY)
    of_target = [v for v in aot.every_variant() if v.target == target]
    if EVERY:
        assert len(results) >= len(of_target) / EVERY
        assert {result.label for result in results} == {v.label for v in of_target}
    compiled = {result.label for result in results}
    assert {v.form for v in of_target if v.label in compiled} == {v.form for v in of_target}


def _first() -> KernelVariant:
    return next(v for v in aot.every_variant() if v.target == "sm_90")


def test_a_tile_that_spills_is_reported() -> None:
    tile = WgmmaRingTile(64, 2, 1, 4, 1, 4, registers=64)
    (variant,) = variants_of(w4a16.wgmma_call(tile, 4096, w4a16.LARGEST))
    result = aot.compile_variant(variant)
    assert result.spill_bytes > variant.allowed_spill_bytes
    assert result.failure == f"spills {result.spill_bytes} bytes a thread"


def test_a_variant_that_does_not_compile_is_reported() -> None:
    variant = _first()
    broken = dataclasses.replace(variant, constants=variant.constants | {"ELEMENT": "f64"})
    failure = aot.compile_variant(broken).failure
    assert failure is not None
    assert failure.startswith("does not compile: ")
    assert "\n" not in failure


def test_shared_memory_limit_depends_on_the_target() -> None:
    assert aot._judge(0, 200 * 1024, "sm_90") is None
    assert "sm_80 has 166912" in str(aot._judge(0, 200 * 1024, "sm_80"))


def test_command_line_exits_1_on_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = _first()
    broken = dataclasses.replace(variant, constants=variant.constants | {"ELEMENT": "f64"})
    monkeypatch.setattr(aot, "every_variant", lambda: iter([variant, broken]))
    assert aot.main(["--target", "sm_90", "--json", "--jobs", "1"]) == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert good["failure"] is None
    assert bad["failure"] is not None
    monkeypatch.setattr(aot, "every_variant", lambda: iter([variant]))
    assert aot.main(["--target", "sm_90", "--jobs", "1"]) == 0
    assert "sm_90  w4a16_decode " in capsys.readouterr().out


def test_a_sample_has_every_form_and_every_nth() -> None:
    every, all_of_them = aot.chosen("sm_90", 5), aot.chosen("sm_90")
    assert set(all_of_them[::5]) < set(every) < set(all_of_them)
    variants = list(aot.every_variant())
    labels = {variants[place].label for place in all_of_them}
    assert {variants[place].label for place in every} == labels


def test_the_smallest_sample_has_every_form_once() -> None:
    variants = list(aot.every_variant())
    forms = [variants[place].form for place in aot.chosen("sm_90", 0)]
    assert len(forms) == len(set(forms))
    assert set(forms) == {v.form for v in variants if v.target == "sm_90"}
    labels = {label for _, label in forms}
    assert "w4a16_wgmma_tma bf16 asym group=32 " in labels
    assert {"rms_norm_quant fp8 ", "rope neox ", "paged_decode fp8  g4 T=1 "} <= labels
    assert not [label for label in labels if "N=4096" in label]


def test_the_default_sample_has_every_kernel_once() -> None:
    variants = list(aot.every_variant())
    kernels = [variants[place].kernel for place in aot.chosen("sm_80", None)]
    assert len(kernels) == len(set(kernels))
    assert set(kernels) == {v.kernel for v in variants if v.target == "sm_80"}


@pytest.mark.parametrize("option", ["--every", "--jobs"])
def test_command_line_refuses_none(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        aot.main([option, "0"])
    assert "--every and --jobs must be at least 1" in capsys.readouterr().err
