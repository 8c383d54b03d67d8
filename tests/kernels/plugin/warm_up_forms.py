"""Run by test_warm_up_coverage.py: what serving asks Triton for that loading did not, as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
from launch_recorder import Compiled, Compiler, pretend_hopper
from vllm import ir
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from warm_up_subjects import (
    BF16,
    BLOCKS,
    FP8,
    FP16,
    INT8,
    LLAMA,
    META,
    SHAPES,
    Call,
    Prepare,
    activation_calls,
    block,
    decode_attention,
    fp8_layer,
    input_calls,
    int8_layer,
    norm_calls,
    pretend_cuda,
    use_card,
    w4a16_layer,
)

from taut_kernels.attention.tiles import MOST_LENGTHS
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.vllm_plugin import (
    custom_ops,
    fused_ops,
    ir_ops,
    known_answer,
    known_ops,
    linear,
    scaled_mm,
    scaled_mm_op,
    warm_up,
    warm_up_decode,
)

H200, UNKNOWN = "NVIDIA H200", "NVIDIA X"
MOST = 16384
EDGES = {1, MOST, *(2**i + d for i in range(1, 14) for d in (-1, 0, 1))}
MEASURED = {320, 384, 512, 640, 768, 896, 1280, 1664, 1920, *tiles_wgmma.BUCKETS}
"""Ends of buckets in the tables, or numbers that may be one no more."""
FEW = sorted(
    {*EDGES, *MEASURED, *(M + 1 for M in MEASURED), *random.Random(0).sample(range(1, MOST), 9)}
)
SMALL = sorted({*range(1, 301), *FEW})
EVERY = sorted({*SMALL, *(16 * i + d for i in range(1, 1024) for d in (-1, 0, 1))})
"""Numbers of tokens."""
FEW_BATCHES = (1, 2, 9, 16, 17, 33, 34, 64, 65, 256)
"""Sequences of a batch."""


def late(
    compiler: Compiler, prepare: Prepare, calls: Sequence[Call], tokens: Sequence[int]
) -> list[str]:
    """Return what calls compile after loading, with the number of tokens that did."""
    compiler.forget_forms()
    prepare()
    found: list[str] = []
    for M, call in itertools.product(tokens, calls):
        if tokens in (FEW, FEW_BATCHES):
            compiler.forget_keys()
        before = len(compiler.forms)
        call(M)
        found += [f"M = {M}: {form}" for form in compiler.forms[before:]]
    return found


Thing = tuple[str, Prepare, list[Call], Sequence[int]]


def w4a16_layers(most: Sequence[int]) -> Iterator[Thing]:
    kinds = [(BF16, group, zeros) for group in (128, 32, 64, -1) for zeros in (False, True)]
    kinds += [(FP16, 128, False), (FP16, 32, True)]
    for name, shapes in SHAPES.items():
        for (N, K), (dtype, group, zeros) in itertools.product(shapes, kinds):
            what = f"{name} w4a16 {N}x{K} {dtype} groups {group} zeros {zeros}"
            yield what, *w4a16_layer(N, K, dtype, group, zeros), FEW
        for N, K in shapes:
            prepare, calls = w4a16_layer(N, K, BF16, 128, False)
            yield f"{name} w4a16 {N}x{K}", prepare, calls[:1], most if name == LLAMA else SMALL


def scaled_mm_layers(most: Sequence[int]) -> Iterator[Thing]:
    kinds = [*itertools.product((BF16,), (False, True), (False, True)), (FP16, False, True)]
    for name, shapes in SHAPES.items():
        for layer, (N, K) in itertools.product((int8_layer, fp8_layer), shapes):
            for dtype, static, other in kinds:
                what = f"{name} {layer.__name__} {N}x{K} {dtype} static {static} {other}"
                yield what, *layer(N, K, dtype, static, other), FEW
            prepare, calls = layer(N, K, BF16, False, True)
            tokens = most if name == LLAMA and layer is fp8_layer else SMALL
            yield f"{name} {layer.__name__} {N}x{K}", prepare, calls[:1], tokens


def models(most: Sequence[int]) -> Iterator[Thing]:
    kinds = [*itertools.product(BLOCKS, (BF16,), (None, INT8, FP8)), (LLAMA, FP16, FP8)]
    for name, dtype, quantised in kinds:
        model = block(name, dtype, quantised)
        calls = norm_calls(name, dtype, quantised)
        calls += activation_calls(model, name, dtype, quantised)
        calls += input_calls(name, dtype, quantised)
        tokens = SMALL if most is EVERY and (name, quantised) == (LLAMA, FP8) else FEW
        yield f"{name} fused {dtype} {quantised}", loading(model), calls, tokens


def attentions(most: Sequence[int]) -> Iterator[Thing]:
    batches = [*[B for B in most if B <= 300][:: 1 if most is EVERY else 7], 512, 1024]
    for name, (_, _, heads, kv_heads) in BLOCKS.items():
        kinds = itertools.product((64, 128), (16, 32), (0, 100), (BF16, FP8), (BF16, FP16))
        for dim, page, window, cache_dtype, dtype in kinds:
            cached = FP8 if cache_dtype == FP8 else dtype
            form = warm_up_decode.DecodeForm(heads, kv_heads, dim, page, window, dtype, cached)
            few = (name, dim, page, window) != (LLAMA, 128, 16, 0)
            counts = FEW_BATCHES if few else batches
            yield f"{name} {form}", *decode_attention(form, max(counts)), counts


def loading(model: torch.nn.Module) -> Prepare:
    return lambda: fused_ops._warm_up(model)


def survey(compiler: Compiler) -> dict[str, Any]:
    """Load and serve every layer and model on every card and in both modes."""
    found: dict[str, Any] = {}
    for card, mode in ((H200, "prefer"), (H200, "require"), (UNKNOWN, "require")):
        use_card(card)
        scaled_mm.requested_mode = lambda mode=mode: mode
        for kind, things in (
            ("w4a16", w4a16_layers),
            ("8 bits", scaled_mm_layers),
            ("fused", models),
            ("attention", attentions),
        ):
            if kind != "8 bits" and mode == "prefer":
                continue  # the mode chooses layers there, not kernels
            part = {"layers": 0, "loaded": 0, "late": []}
            before = Compiled.launches
            for what, prepare, calls, tokens in things(EVERY if card == H200 else SMALL):
                missing = late(compiler, prepare, calls, tokens)
                part["layers"] += 1
                part["loaded"] += len(compiler.forms) - len(missing)
                part["late"] += [f"{card} {mode}: {what}: {form}" for form in missing]
            part["launches"] = Compiled.launches - before
            found[f"{kind}, {card}, {mode}"] = part
    return found


def mutations(compiler: Compiler) -> tuple[list[str], list[str]]:
    """Take one thing at a time out of the warm-up; return all that, and what nobody noticed."""
    use_card(H200)
    scaled_mm.requested_mode = lambda: "require"
    done, unnoticed = [], []

    def expect_late(what: str, prepare: Prepare, calls: Sequence[Call]) -> None:
        done.append(what)
        if not late(compiler, prepare, calls, FEW):
            unnoticed.append(what)

    tokens = linear.WARM_UP_TOKENS
    for left_out in tokens:
        rest = tuple(size for size in tokens if size != left_out)
        for N, K in SHAPES[LLAMA]:
            alone = w4a16_forms(compiler, N, K, (left_out,))
            if alone <= w4a16_forms(compiler, N, K, rest):
                continue  # other sizes compile all of it
            linear.WARM_UP_TOKENS = rest
            prepare, calls = w4a16_layer(N, K, BF16, 128, False)
            expect_late(f"w4a16 {N}x{K}, M = {left_out}", prepare, calls[:1])
    linear.WARM_UP_TOKENS = tokens
    N, K = SHAPES[LLAMA][0]
    sizes, tiles = scaled_mm_op.warm_up_tokens, tiles_scaled_mm.buckets("fp8_gemm", H200, N, K)
    for left_out, bucket in zip(sizes(FP8, H200, N, K), tiles, strict=True):
        if sum(other.tile == bucket.tile for other in tiles) > 1:
            continue  # another bucket compiles it
        scaled_mm_op.warm_up_tokens = lambda *shape, M=left_out: {*sizes(*shape)} - {M}
        prepare, calls = fp8_layer(N, K, BF16, False, True)
        expect_late(f"fp8, M = {left_out}", prepare, calls[:1])
    scaled_mm_op.warm_up_tokens = sizes
    for what, prepare, calls in attention_mutations():
        expect_late(what, prepare, calls)
    for what, prepare in fused_mutations():
        calls = norm_calls(LLAMA, BF16, FP8)
        calls += activation_calls(block(LLAMA, BF16, FP8), LLAMA, BF16, FP8)
        calls += input_calls(LLAMA, BF16, FP8)
        expect_late(what, prepare, calls)
    return done, unnoticed


def w4a16_forms(compiler: Compiler, N: int, K: int, tokens: tuple[int, ...]) -> set[str]:
    """Return what a layer compiles when its warm-up has these numbers of tokens only."""
    linear.WARM_UP_TOKENS = tokens
    compiler.forget_forms()
    prepare, _ = w4a16_layer(N, K, BF16, 128, False)
    prepare()
    return set(compiler.forms)


def attention_mutations() -> Iterator[tuple[str, Prepare, list[Call]]]:
    _, _, heads, kv_heads = BLOCKS[LLAMA]
    form = warm_up_decode.DecodeForm(heads, kv_heads, 128, 16, 0, BF16, BF16)
    prepare, calls = decode_attention(form, MOST_LENGTHS)
    launches = warm_up_decode._bounded_launches
    for left_out in launches(form, MOST_LENGTHS, META):

        def without(left_out: Any = left_out) -> None:
            def rest(*args: Any) -> dict[Any, Any]:
                return {key: each for key, each in launches(*args).items() if key != left_out}

            warm_up_decode._bounded_launches = rest
            prepare()
            warm_up_decode._bounded_launches = launches

        yield f"attention, {left_out}", without, calls
    write = warm_up_decode._write_nowhere

    def without_write() -> None:
        warm_up_decode._write_nowhere = lambda *_: 0
        prepare()
        warm_up_decode._write_nowhere = write

    yield "attention, cache write", without_write, calls
    narrow = dataclasses.replace(form, window=9)
    yield "attention, window", decode_attention(narrow, MOST_LENGTHS)[0], calls


def fused_mutations() -> Iterator[tuple[str, Prepare]]:
    widths = warm_up.widths_of(block(LLAMA, BF16, FP8))
    for field in dataclasses.fields(widths):
        less = dataclasses.replace(widths, **{field.name: type(getattr(widths, field.name))()})
        yield f"fused, {field.name}", lambda less=less: warm_up.compile_all(less, META, H200)
    for rotation in sorted(widths.rotations, key=str):
        less = dataclasses.replace(widths, rotations=widths.rotations - {rotation})
        yield f"fused, {rotation}", lambda less=less: warm_up.compile_all(less, META, H200)
    every_tile = tiles_fused.every_tile
    hidden, intermediate, heads, kv_heads = BLOCKS[LLAMA]
    for op, N in sorted({*tiles_fused.tables()[H200].choices, ("row_quant", 4096)}):
        if N not in (hidden, intermediate, heads + kv_heads):
            continue  # another model's
        for tile in every_tile(H200, op, N, True):

            def without(gpu: str, asked: str, *rest: Any, tile: Any = tile, op: str = op) -> Any:
                return [t for t in every_tile(gpu, asked, *rest) if (asked, t) != (op, tile)]

            def prepare(without: Any = without) -> None:
                tiles_fused.every_tile = without
                warm_up.compile_all(widths, META, H200)
                tiles_fused.every_tile = every_tile

            yield f"fused, {op} {N} {tile}", prepare


def norms_chosen_by_vllms_flag(compiler: Compiler) -> dict[str, Any]:
    """Load and serve where ``--ir-op-priority`` alone brings our norms in, on another card."""
    use_card(UNKNOWN)
    ir_ops.install(supported=True)
    model = block(LLAMA, BF16, None)
    calls = norm_calls(LLAMA, BF16, None)
    found: dict[str, Any] = {}
    for provider in ("native", "taut"):
        with ir.ops.rms_norm.set_priority([provider]):
            missing = late(compiler, lambda: fused_ops.conclude(model, "prefer"), calls, FEW)
        found[provider] = {"loaded": len(compiler.forms) - len(missing), "late": len(missing)}
    return found


def forget_known_answers() -> None:
    """Leave known answers out: tensors have no values here, and what they launch is no warm-up."""
    known_answer.check = lambda *_, **__: None
    known_ops.check_ops = known_ops.check_attention = lambda *_: None


def late_after_asking(compiler: Compiler) -> dict[str, Any]:
    """Let what is asked for as a layer is made, before it has weights, be all that is loaded."""
    asked: list[tuple[Any, Any]] = []
    linear.ask = lambda run, alike: asked.append((run, alike))
    found: list[str] = []
    kinds = [(BF16, group, zeros) for group in (128, 32, -1) for zeros in (False, True)]
    for (N, K), kind in itertools.product(SHAPES[LLAMA], [*kinds, (FP16, 128, False)]):
        prepare, calls = w4a16_layer(N, K, *kind)
        prepare()
        found += late(compiler, asked[-1][0], calls[:1], FEW)
    return {"late": found, "alike": len({alike for _, alike in asked}), "layers": len(asked)}


def main() -> None:
    forget_known_answers()
    compiler = pretend_hopper()
    pretend_cuda()
    eager = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    with set_current_vllm_config(eager):
        custom_ops.install()
        answer: dict[str, Any] = {"survey": survey(compiler)}
        answer["mutations"], answer["unnoticed"] = mutations(compiler)
        answer["asked"] = late_after_asking(compiler)
        answer["by_flag"] = norms_chosen_by_vllms_flag(compiler)
    answer["monitor"] = get_args(EngineArgs.__annotations__["jit_monitor_mode"])
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
