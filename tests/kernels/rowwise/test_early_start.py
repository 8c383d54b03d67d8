"""Fused kernels that start before the kernel in front has ended: who does, and what they may do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from taut_bench.instruments import aot
from taut_bench.instruments.forms import rowwise
from taut_bench.instruments.recorder import KernelVariant
from taut_kernels.activation import silu_mul, silu_mul_launch
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.launch import early_start, launcher
from taut_kernels.norm import rms_norm, rms_norm_launch
from taut_kernels.rope import op as rope
from taut_kernels.rope import rope_launch
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tile_options import tile_of
from taut_kernels.rowwise.tiles import FusedTile

N, HEADS, KV_HEADS, D = 4096, 32, 8, 128
EPSILON = 1e-5


def launched_tile(
    module: Any, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> FusedTile:
    """Return the tile an op's launcher takes."""
    seen: list[FusedTile] = []
    monkeypatch.setattr(module, "_prepared", lambda tile, *_: seen.append(tile))
    module.plan.cache_clear()  # a process has one card
    call()
    module.plan.cache_clear()
    (tile,) = seen
    return tile


def _calls(M: int) -> list[tuple[Any, Callable[[], Any]]]:
    """Return the launchers of all ops on M rows, and the modules of their plans."""
    x = torch.zeros(M, N, dtype=torch.bfloat16)
    q, k = torch.zeros(M, HEADS, D), torch.zeros(M, KV_HEADS, D)
    positions, cache, scale = torch.zeros(M, dtype=torch.int64), torch.zeros(1, D), torch.ones(1)
    plain: tuple[Any, ...] = (x, 1.0, 0.0, None, False)
    norms, gates, turns = rms_norm_launch, silu_mul_launch, rope_launch
    return [
        (norms, lambda: rms_norm._launch_rms_norm(x, None, None, EPSILON)),
        (norms, lambda: rms_norm._launch_rms_norm(x, None, x, EPSILON)),
        (norms, lambda: rms_norm._launch_rms_norm_quant(x, None, None, EPSILON, torch.int8)),
        (norms, lambda: rms_norm._launch_rms_norm_quant(x, None, x, EPSILON, torch.int8)),
        (norms, lambda: rms_norm._launch_rms_norm_static_quant(x, None, x, EPSILON, scale)),
        (gates, lambda: silu_mul._launch_silu_mul(*plain)),
        (gates, lambda: silu_mul._launch_silu_mul_quant(*plain, torch.int8)),
        (gates, lambda: silu_mul._launch_silu_mul_static_quant(*plain, scale)),
        (turns, lambda: rope._launch_rope(positions, q, k, cache, True)),
        (turns, lambda: rope._launch_rope_apart(positions, q, k, cache, True)),
    ]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("M", [1, 64, 65])
def test_launchers_start_few_rows_early_on_hopper_only(
    M: int, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "capability", lambda device: capability)
    for module, call in _calls(M):
        tile = launched_tile(module, call, monkeypatch)
        assert tile.pdl is (capability == (9, 0) and M <= 64)


def _instructions(variant: KernelVariant, path: Path) -> list[str]:
    """Return the names of a kernel's machine instructions for sm_90, in order."""
    target = GPUTarget("cuda", 90, 32)
    compiled: Any = triton.compile(aot.source_of(variant), target=target, options=variant.options)
    path.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)", text)


def _early_forms() -> list[KernelVariant]:
    """Return one form that starts early of each kernel, output and order of columns."""
    found: dict[tuple[Any, ...], KernelVariant] = {}
    for variant in rowwise.kernel_variants():
        if variant.tile.pdl and "bf16" in variant.pointers.values():  # type: ignore[attr-defined]
            constants = variant.constants
            rest = tuple(constants.get(name) for name in ("OUT", "NEOX", "INTERLEAVED"))
            copies = constants.get("REST", 0) > 0, constants.get("D", 0) > 0
            residual = "residual_ptr" in variant.pointers
            found.setdefault((variant.kernel._fn_name, rest, copies, residual), variant)
    return list(found.values())


EARLY_FORMS = _early_forms()
TOUCHES = re.compile(r"(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|UBLKCP|UTMALDG)(\.|$)")


def test_every_kernel_has_forms_that_start_early() -> None:
    kernels = {variant.kernel._fn_name.rpartition(".")[2] for variant in EARLY_FORMS}
    rows = {"row_quant_kernel", "row_quant_long_kernel"}
    pointwise = {"silu_mul_kernel", "silu_mul_quant_kernel", "silu_mul_quant_long_kernel"}
    assert kernels == {"rms_norm_kernel", "rms_norm_long_kernel", "rope_kernel", *pointwise, *rows}
    assert all(variant.target == "sm_90" for variant in EARLY_FORMS)


@pytest.mark.parametrize("variant", EARLY_FORMS, ids=lambda variant: variant.label)
def test_memory_is_not_touched_before_the_kernel_in_front_has_ended(
    variant: KernelVariant, tmp_path: Path
) -> None:
    names = _instructions(variant, tmp_path / "kernel.cubin")
    (wait,) = [i for i, name in enumerate(names) if name.startswith("ACQBULK")]
    assert "PREEXIT" in names[:wait]
    assert not [name for name in names[:wait] if TOUCHES.match(name)]
    assert [name for name in names[wait:] if TOUCHES.match(name)]
    # The norm's weight is asked for, into L2 alone: it may not be final yet.
    asked = any(name.startswith("CCTL") for name in names[:wait])
    assert asked == variant.kernel._fn_name.endswith("rms_norm_kernel")


def _chain(M: int) -> tuple[dict[str, torch.Tensor], Callable[[], tuple[torch.Tensor, ...]]]:
    """Return the inputs of a chain of products with fused ops between, and the chain."""
    generator = torch.Generator(device="cuda").manual_seed(M)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    inputs = {"x": draw(M, N), "residual": draw(M, N), "weight": draw(N)}
    inputs["positions"] = torch.randint(0, 512, (M,), generator=generator, device="cuda")
    width = (HEADS + 2 * KV_HEADS) * D
    qkv_weight, o_weight, gate_up = draw(width, N), draw(N, HEADS * D), draw(2 * N, N)
    down = torch.randint(-127, 128, (N, N), generator=generator, device="cuda").to(torch.int8)
    down_scale = torch.full((N, 1), 1e-5, device="cuda")
    cache = draw(512, D)

    def chain() -> tuple[torch.Tensor, ...]:
        taut = torch.ops.taut
        y = inputs["x"] @ o_weight.t()
        # A weight that the kernel right in front writes, as that of Gemma's norm.
        weight = inputs["weight"] * 2
        qkv = taut.rms_norm.plain(y, weight, EPSILON) @ qkv_weight.t()
        q, k, v = (part.unflatten(1, (-1, D)) for part in qkv.split([HEADS * D, 1024, 1024], 1))
        new_q, new_k = taut.rope_apart(inputs["positions"], q, k, cache, True)
        taut.rope(inputs["positions"], q, k, cache, True)
        residual = inputs["residual"].clone()
        y = new_q.flatten(1) @ o_weight.t()
        y = taut.rms_norm.default(y, inputs["weight"], residual, EPSILON)
        gated = taut.silu_mul(y @ gate_up.t(), 1.0, 0.0, None, False)
        normed, scales = taut.rms_norm_quant(gated, weight, residual, EPSILON, torch.int8)
        z = w8a8.w8a8_gemm(normed, down, scales, down_scale, out_dtype=torch.bfloat16)
        return qkv, new_q, new_k, v, residual, gated, normed, scales, z

    return inputs, chain


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("M", [1, 7, 64, 256])
def test_gpu_a_chain_that_starts_early_has_the_bits_of_one_that_does_not(
    M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, chain = _chain(M)
    graphs, results = [], []
    for early in (256, 0):
        monkeypatch.setattr(early_start, "EARLY_TOKENS", early)
        tiles_fused.lookup.cache_clear()
        assert tile_of("rope", HEADS, M, torch.device("cuda")).pdl is bool(early)
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Twice: the second reads and writes memory the first is done with.
            results.append((chain(), chain()))
        graphs.append(graph)
    tiles_fused.lookup.cache_clear()
    for _ in range(30):
        for name, tensor in inputs.items():
            fresh = torch.randn_like(tensor) if name != "positions" else tensor.roll(1).add(1) % 512
            tensor.copy_(fresh)
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        for ours, alone in zip(*results, strict=True):
            for found, wanted in zip(ours, alone, strict=True):
                assert torch.equal(found, wanted)
