"""The bench of block-wise FP8, without a GPU: operands, budget, rivals' layouts, options."""

from __future__ import annotations

import csv
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from taut_bench import (
    plots,
    report,
    scaled_mm,
    scaled_mm_layer,
    scaled_mm_quantised,
    scaled_mm_rivals,
)
from taut_bench import scaled_mm_block_rivals as block_rivals
from taut_bench.scaled_mm_layer import KINDS, OUT_DTYPE, Layer, make_layer
from taut_bench.shapes import PRODUCTS
from taut_bench.testing.scaled_mm import ScaledMmCase
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import rule as tiles_scaled_mm_rule
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.tuner import timing
from tuning import scaled_mm_compile, tune_scaled_mm

N, K, M = 272, 400, 9


def _layer(m: int = M) -> Layer:
    """Return a layer whose blocks of both sides are cut off."""
    return make_layer(fp8.BLOCK_OP, N, K, m, device="cpu")


def _case(layer: Layer) -> ScaledMmCase:
    operands = (layer.x, layer.weight, layer.x_scale, layer.weight_scale)
    return ScaledMmCase("fp8_gemm", *operands, None, None, None, layer.x, OUT_DTYPE)


def test_a_layer_holds_scales_of_blocks_and_groups() -> None:
    layer = _layer()
    assert (layer.x.shape, layer.weight.shape) == ((M, K), (N, K))
    assert layer.x.dtype == layer.weight.dtype == fp8.DTYPE
    assert (layer.x_scale.shape, layer.weight_scale.shape) == ((M, 4), (3, 4))
    assert layer.x_scale.dtype == layer.weight_scale.dtype == torch.float32
    assert layer.weight_bytes() == N * K + 4 * 3 * 4
    assert (layer.gold.dtype, layer.reference.dtype) == (torch.float64, OUT_DTYPE)
    # `ScaledMmCase` writes the product out on its own.
    assert torch.allclose(layer.gold, _case(layer).gold(), rtol=1e-12, atol=1e-12)
    assert 0.5 < layer.gold.std() < 2


@pytest.mark.parametrize("op", sorted(KINDS.values()))
def test_the_other_kinds_keep_a_scale_a_token_and_a_channel(op: str) -> None:
    layer = make_layer(op, N, K, M, device="cpu")
    assert (layer.x_scale.shape, layer.weight_scale.shape) == ((M, 1), (N, 1))
    assert layer.weight_bytes() == N * K + 4 * N
    assert layer.why_wrong(layer.reference) is None


def test_the_budget_is_that_of_the_ops_tests() -> None:
    layer = _layer()
    case, largest = _case(layer), layer.gold.abs().max().item()
    assert layer.why_wrong(layer.reference) is None
    assert layer.why_wrong(layer.reference[:4]) is None
    budget = 2 * ((layer.reference - layer.gold).abs().max().item() + 2.0**-7 * largest)
    budget += 4 * 2.0**-14 * largest
    at, value = divmod(int(layer.gold.abs().argmin()), N), layer.gold.abs().min().item()
    for share, right in ((0.98, True), (1.05, False)):
        y = layer.reference.clone()
        y[at] = value + share * budget
        for reason in (layer.why_wrong(y), case.why_wrong(y)):
            assert (reason is None) is right, reason


@pytest.mark.parametrize("wrong", ["group left out", "scales shifted", "not finite"])
def test_a_wrong_product_is_seen(wrong: str) -> None:
    layer = _layer()
    x_scale, weight_scale = layer.x_scale.clone(), layer.weight_scale.clone()
    if wrong == "group left out":
        x_scale[:, 1] = 0
    elif wrong == "scales shifted":
        weight_scale = weight_scale.roll(1, 0)
    else:
        x_scale[3, 2] = float("nan")
    y = fp8.fp8_gemm_ref(layer.x, layer.weight, x_scale, weight_scale, None, None, OUT_DTYPE)
    assert layer.why_wrong(y) is not None


def _product(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Multiply what a rival was handed: [M, K] and [N, K], scales [M, G] and [N/128, G]."""
    n, k = (torch.arange(size) // 128 for size in weight.shape)
    y = (x.float() * x_scale[:, k]) @ (weight.float() * weight_scale[n][:, k]).t()
    return y.to(OUT_DTYPE)


def _stand_in(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    found = modules

    def import_module(name: str) -> Any:
        if name not in found:
            raise ImportError(f"No module named {name!r}")
        return found[name]

    monkeypatch.setattr(
        block_rivals, "importlib", types.SimpleNamespace(import_module=import_module)
    )


def _check_every_count(name: str, layer: Layer) -> None:
    call = block_rivals.PREPARE[name](layer, layer.weight)
    for m in (1, 2, 3, 4, 8, M):
        y = call(m)
        assert y.shape == (m, N)
        assert layer.why_wrong(y) is None, m


def test_ours_computes_the_layer() -> None:
    _check_every_count("taut", _layer())


def test_ours_gets_scales_of_as_many_tokens_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of more has a stride vLLM's quantisation never leaves, and is read more slowly."""
    strides = []

    def fp8_gemm(
        x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, *rest: object
    ) -> torch.Tensor:
        assert len(x) == len(x_scale)
        strides.append(x_scale.stride())
        return _product(x, weight, x_scale, layer.weight_scale)

    layer, ops = _layer(), types.SimpleNamespace(taut=types.SimpleNamespace(fp8_gemm=fp8_gemm))
    monkeypatch.setattr(scaled_mm_rivals, "torch", types.SimpleNamespace(ops=ops))
    _check_every_count("taut", layer)
    assert strides == [(1, m) for m in (1, 2, 3, 4, 8, M)]
    tile = tiles_scaled_mm_rule.rule(fp8.BLOCK_OP, N, K, M)
    monkeypatch.setattr(
        scaled_mm_compile,
        "launch_block",
        lambda tile, *operands: strides.append(operands[2].stride()),
    )
    tune_scaled_mm._subject(layer, tile, 4, [layer.weight]).call(0)
    assert strides[-1] == (1, 4)


def test_cutlass_gets_scales_as_vllm_lays_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def cutlass_scaled_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
        bias: None = None,
    ) -> torch.Tensor:
        assert (a.shape[1], b.shape, b.stride()) == (K, (K, N), (1, K))
        assert (scale_a.shape, scale_a.stride()) == ((len(a), 4), (1, len(a)))
        assert (scale_b.shape, scale_b.stride()) == ((4, 3), (1, 4))
        assert out_dtype == OUT_DTYPE
        return _product(a, b.t(), scale_a, scale_b.t())

    ops = types.SimpleNamespace(cutlass_scaled_mm=cutlass_scaled_mm)
    _stand_in(monkeypatch, **{"vllm._custom_ops": ops})
    _check_every_count("CUTLASS", _layer())


@pytest.mark.parametrize("package", ["deep_gemm", "vllm.third_party.deep_gemm"])
def test_deep_gemm_gets_scales_that_tma_can_load(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: list[bool] = []

    def fp8_gemm_nt(
        a: tuple[torch.Tensor, torch.Tensor],
        b: tuple[torch.Tensor, torch.Tensor],
        d: torch.Tensor,
        *,
        disable_ue8m0_cast: bool,
    ) -> None:
        assert disable_ue8m0_cast, "the scales are no powers of two"
        m = len(a[0])
        assert (a[1].shape, a[1].stride()) == ((m, 4), (1, -(-m // 4) * 4))
        assert b[0].is_contiguous()
        assert b[1].is_contiguous()
        d.copy_(_product(*(a[0], b[0]), *(a[1], b[1])))

    module = types.SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt, set_pdl=early.append)
    _stand_in(monkeypatch, **{package: module})
    _check_every_count("DeepGEMM", _layer())
    assert early == [True]


def test_cublas_gets_tokens_in_fours_and_padded_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = types.SimpleNamespace(BlockWise1x128="1x128", BlockWise128x128="128x128")

    def scaled_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        recipe_a: str,
        scale_b: torch.Tensor,
        recipe_b: str,
        *,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        rows, groups = len(a), -(-a.shape[1] // 128)
        padded = -(-groups // 4) * 4
        assert (recipe_a, recipe_b, output_dtype) == ("1x128", "128x128", OUT_DTYPE)
        assert rows % 4 == 0
        assert (scale_a.shape, scale_a.stride()) == ((rows, groups), (1, rows))
        assert (scale_b.shape, scale_b.stride()) == ((padded, 3), (1, padded))
        return _product(a, b.t(), scale_a, scale_b.t())

    monkeypatch.setattr(functional, "scaled_mm", scaled_mm, raising=False)
    monkeypatch.setattr(functional, "ScalingType", kinds, raising=False)
    for width in (K, 656):
        _check_every_count("cuBLAS blocks", make_layer(fp8.BLOCK_OP, N, width, M, device="cpu"))


def test_triton_gets_operands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def w8a8_triton_block_scaled_mm(
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
        block_size: list[int],
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        assert (block_size, output_dtype) == ([128, 128], OUT_DTYPE)
        assert all(operand.is_contiguous() for operand in (A, B, As, Bs))
        return _product(A, B, As, Bs)

    module = types.SimpleNamespace(w8a8_triton_block_scaled_mm=w8a8_triton_block_scaled_mm)
    _stand_in(monkeypatch, **{block_rivals.FP8_UTILS: module})
    _check_every_count("vLLM Triton", _layer())


def _quantise(
    rows: torch.Tensor, group_size: int, *, column_major_scales: bool, tma_aligned_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for vLLM's kernel; K is whole groups."""
    assert (group_size, column_major_scales) == (128, True)
    count, width = rows.shape
    groups = rows.float().view(count, width // 128, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    x = (groups / scale[..., None]).to(fp8.DTYPE).view(count, width)
    padded = -(-count // 4) * 4 if tma_aligned_scales else count
    return x, scaled_mm_layer.token_major(scale, count, padded)[:count]


def test_products_behind_the_quantisation_get_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fp8_gemm_nt(a: Any, b: Any, y: torch.Tensor, *, disable_ue8m0_cast: bool) -> None:
        assert a[1].stride(1) % 4 == 0
        y.copy_(_product(*(a[0], b[0], a[1], b[1])))

    def cutlass_scaled_mm(
        a: torch.Tensor, b: torch.Tensor, *, out_dtype: Any, scale_a: Any, scale_b: Any
    ) -> torch.Tensor:
        assert scale_a.stride() == (1, len(a))
        return _product(a, b.t(), scale_a, scale_b.t())

    utils = types.SimpleNamespace(per_token_group_quant_fp8=_quantise)
    modules = {
        block_rivals.FP8_UTILS: utils,
        "vllm._custom_ops": types.SimpleNamespace(cutlass_scaled_mm=cutlass_scaled_mm),
        "deep_gemm": types.SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt),
    }
    _stand_in(monkeypatch, **modules)
    drawn = make_layer(fp8.BLOCK_OP, 256, 384, M, device="cpu")
    monkeypatch.setattr(scaled_mm_quantised, "make_layer", lambda *_: drawn)
    layer = scaled_mm_quantised.make_quantised_layer(fp8.BLOCK_OP, 256, 384, M)
    assert not torch.equal(layer.x.float(), drawn.x.float())
    for name, prepare in scaled_mm_quantised.BLOCKS.items():
        call = prepare(layer, layer.weight)
        for count in (1, M):
            reason = layer.why_wrong(call(count))
            assert reason is None, (name, reason)
    wrong = scaled_mm_quantised.BLOCKS["taut"](layer, layer.weight.roll(1, 0))(M)
    assert layer.why_wrong(wrong) is not None


@pytest.mark.parametrize("kind", ["fp8-quantised", "int8-quantised"])
def test_products_by_channel_get_what_the_quantisation_by_token_wrote(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    op, starts = scaled_mm_quantised.KINDS[kind], list[tuple[bool, int]]()

    def quantise(rows: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
        scale = rows.float().abs().amax(1, keepdim=True) / largest
        return rows.float() / scale, scale

    def scaled_fp8_quant(
        rows: torch.Tensor, *, use_per_token_if_dynamic: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert use_per_token_if_dynamic
        x, scale = quantise(rows, 448)
        return x.to(fp8.DTYPE), scale

    def scaled_int8_quant(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scale = quantise(rows, 127)
        return x.round().to(torch.int8), scale, None

    def cutlass_scaled_mm(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, out_dtype: Any
    ) -> torch.Tensor:
        return scaled_mm_layer.product_ref(op, a, b.t(), scale_a, scale_b, out_dtype)

    def launch(tile: ScaledMmTile, *operands: Any) -> torch.Tensor:
        starts.append((tile.early, tile.prefetch))
        return scaled_mm_layer.product_ref(op, *operands[:4], operands[-1])

    ops = types.SimpleNamespace(
        scaled_fp8_quant=scaled_fp8_quant,
        scaled_int8_quant=scaled_int8_quant,
        cutlass_scaled_mm=cutlass_scaled_mm,
    )
    _stand_in(monkeypatch, **{"vllm._custom_ops": ops})
    monkeypatch.setattr(scaled_mm_rivals, "importlib", block_rivals.importlib)
    monkeypatch.setattr(scaled_mm_quantised, "launch", launch)
    drawn = make_layer(op, 256, 384, M, device="cpu")
    monkeypatch.setattr(scaled_mm_quantised, "make_layer", lambda *_: drawn)
    layer = scaled_mm_quantised.make_quantised_layer(op, 256, 384, M)
    assert not torch.equal(layer.x.float(), drawn.x.float())
    for name, prepare in scaled_mm.PREPARE[kind].items():
        for count in (1, M):
            reason = layer.why_wrong(prepare(layer, layer.weight)(count))
            assert reason is None, (name, reason)
    assert starts == [(False, 0)] * 2 + [(True, 2)] * 2
    assert scaled_mm._NOT_RIVALS[kind] != scaled_mm._NOT_RIVALS[scaled_mm_quantised.KIND]


def test_the_dense_product_is_run_and_not_compared() -> None:
    layer, notes = _layer(), list[str]()
    ready = scaled_mm_rivals.prepare_all(
        layer, [scaled_mm_rivals.DENSE], [layer.weight], notes, block_rivals.PREPARE
    )
    y = ready[scaled_mm_rivals.DENSE][0](3)
    assert torch.equal(y, layer.x[:3].bfloat16() @ layer.weight.bfloat16().t())
    assert len(scaled_mm_rivals.checked_subjects(layer, ready, 3, notes)) == 1
    assert notes == []
    assert not report._is_rival(scaled_mm_rivals.DENSE)


def test_scales_laid_out_once_serve_every_copy_of_the_weights() -> None:
    layer = _layer()
    first = scaled_mm_layer.token_major(layer.x_scale, 5, 8)
    assert scaled_mm_layer.token_major(layer.x_scale, 5, 8) is first
    assert torch.equal(first[:5], layer.x_scale[:5])
    assert not first[5:].any()


def test_what_is_missing_or_refuses_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("nvcc")

    _stand_in(
        monkeypatch,
        **{
            "vllm._custom_ops": types.SimpleNamespace(),
            "deep_gemm": types.SimpleNamespace(fp8_gemm_nt=no_compiler),
        },
    )
    monkeypatch.delattr(functional, "scaled_mm", raising=False)
    layer, notes = _layer(), list[str]()
    names = [*block_rivals.PREPARE, "_int_mm"]
    ready = scaled_mm_rivals.prepare_all(layer, names, [layer.weight], notes, block_rivals.PREPARE)
    subjects = scaled_mm_rivals.checked_subjects(layer, ready, 2, notes)
    assert [subject.name for subject in subjects] == ["taut", scaled_mm_rivals.DENSE]
    where = f"fp8_block ({N}, {K})"
    assert [note.split(": not run: ")[0] for note in notes] == [
        f"cuBLAS blocks on {where}",
        f"vLLM Triton on {where}",
        f"_int_mm on {where}",
        f"CUTLASS on {where}, M=2",
        f"DeepGEMM on {where}, M=2",
    ]
    assert "has no torch.nn.functional.scaled_mm" in notes[0]
    assert notes[2].endswith("not among the kernels of this kind")
    assert notes[4].endswith("FileNotFoundError: nvcc")


def test_without_deep_gemm_both_places_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch)
    layer = _layer()
    with pytest.raises(
        scaled_mm_rivals.UnavailableError, match=r"deep_gemm: .*; vllm\.third_party"
    ):
        block_rivals.deep_gemm(layer, layer.weight)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the command line without a card; collects the ops that layers were made of."""
    ops: list[str] = []

    def make(op: str, *sizes: int) -> Layer:
        ops.append(op)
        return make_layer(op, N, K, sizes[-1], device="cpu")

    def measure(subjects: list[timing.Subject], *_: int) -> list[timing.Timing]:
        return [timing.Timing(10.0, 9.0, 11.0) for _ in subjects]

    _stand_in(monkeypatch)
    monkeypatch.setattr(scaled_mm, "make_layer", make)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "copies_needed", lambda _: 2)
    monkeypatch.setattr(timing, "copy_ceiling", lambda: 4e12)
    monkeypatch.setattr(report, "environment", lambda: {"GPU": "card 9"})
    monkeypatch.setattr(plots, "draw_or_say", lambda path: f"{path.name} drawn")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return ops


ONE = ("--shape", "o", "--tokens", "1,8", "--kernel", "taut")


def test_the_kind_runs_only_where_asked_for(made: list[str], tmp_path: Path) -> None:
    assert scaled_mm.main(["--output", str(tmp_path), *ONE]) == 0
    assert made == list(KINDS.values()) == ["fp8_gemm", "w8a8_gemm"]
    assert {path.stem for path in tmp_path.iterdir()} == {"scaled_mm_fp8", "scaled_mm_int8"}


def test_the_kind_writes_files_of_its_own(made: list[str], tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path), "--kind", "fp8-block", *ONE]
    assert scaled_mm.main([*arguments, "--kernel", "DeepGEMM"]) == 0
    assert made == ["fp8_block"]
    assert {path.stem for path in tmp_path.iterdir()} == {"scaled_mm_fp8-block"}
    rows = list(csv.DictReader((tmp_path / "scaled_mm_fp8-block.csv").open()))
    assert [(row["M"], row["kernel"]) for row in rows] == [("1", "taut"), ("8", "taut")]
    rate = (N * K + 4 * 3 * 4) / 10e-6 / 1e9
    assert float(rows[0]["weight_GB_per_s"]) == pytest.approx(rate, abs=0.05)
    text = (tmp_path / "scaled_mm_fp8-block.md").read_text()
    assert "- FlashInfer: no row" in text
    assert f"- DeepGEMM on fp8_block ({N}, {K}): not run: deep_gemm: No module named" in text


def test_a_wrong_product_of_ours_fails_the_run(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(layer: Layer, weight: torch.Tensor) -> scaled_mm_rivals.Call:
        return lambda m: layer.reference[:m] * 1.1

    monkeypatch.setitem(block_rivals.PREPARE, "taut", wrong)
    assert scaled_mm.main(["--output", str(tmp_path), "--kind", "fp8-block", *ONE]) == 1
    text = (tmp_path / "scaled_mm_fp8-block.md").read_text()
    assert f"- taut on fp8_block ({N}, {K}), M=8: WRONG, not timed: " in text
    assert made == ["fp8_block"]


WRONG, RAISES = 5, 6
"""Steps in flight of the tiles that a stand-in of the launcher gets wrong, or does not run."""


@pytest.fixture
def tuned(made: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ScaledMmTile]]:
    """Run the tuner without a card; collects what it would compile."""
    jobs: list[tuple[str, ScaledMmTile]] = []
    compilers = types.SimpleNamespace(compile=jobs.extend, close=lambda: None)

    def launch(tile: ScaledMmTile, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
        x_scale, weight_scale, bias, arrivals, out_dtype = rest
        if tile.num_stages == RAISES:
            raise RuntimeError("no room for so many stages")
        y = torch.ops.taut.fp8_gemm(x, weight, x_scale, weight_scale, bias, arrivals, out_dtype)
        return y * 1.1 if tile.num_stages == WRONG else y

    def cutlass(layer: Layer, weight: torch.Tensor) -> scaled_mm_rivals.Call:
        return lambda m: layer.reference[:m]

    monkeypatch.setattr(tune_scaled_mm, "make_layer", scaled_mm.make_layer)
    monkeypatch.setattr(scaled_mm_compile, "launch_block", launch)
    monkeypatch.setattr(tune_scaled_mm, "Compilers", lambda _: compilers)
    monkeypatch.setattr(tune_scaled_mm, "_import_rivals", lambda: None)
    monkeypatch.setattr(tune_scaled_mm, "RIVALS", ())
    monkeypatch.setitem(block_rivals.PREPARE, "CUTLASS", cutlass)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card 9")
    return jobs


def _tune(output: Path, *arguments: str) -> dict[str, Any]:
    assert tune_scaled_mm.main(["--output", str(output), "--shape", "o", *arguments]) == 0
    rows = json.loads((output / "rows.json").read_text())
    return {f"{row['op']} {row['max_m']}": row for row in rows}


def test_tuning_writes_rows_that_a_block_wise_call_reads(
    tuned: list[tuple[str, ScaledMmTile]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = _tune(tmp_path, "--kind", "fp8-block", "--tokens", "16,128,4096")
    assert list(rows) == ["fp8_block 16", "fp8_block 128", "fp8_block None"]
    assert all(row["vllm_us"] == row["us"] == [10.0] * len(row["M"]) for row in rows.values())
    assert {op for op, _ in tuned} == {"fp8_block"}
    table = tiles_scaled_mm.parse((tmp_path / "table.json").read_text(), "table.json")
    monkeypatch.setattr(tiles_scaled_mm, "tables", lambda: {"card 9": table})
    tiles_scaled_mm.buckets.cache_clear()
    found = [
        tiles_scaled_mm.lookup("fp8_block", "card 9", *PRODUCTS["o"], m).tile for m in (9, 17, 129)
    ]
    tiles_scaled_mm.buckets.cache_clear()
    assert found == [ScaledMmTile(kernel=row["kernel"], **row["tile"]) for row in rows.values()]
    # Neither what was wrong nor what raised gets into the table.
    assert not any(tile.num_stages in (WRONG, RAISES) for tile in found)
    out = capsys.readouterr().out
    assert "/6s/k1: no room for so many stages\n" in out
    assert "WRONG fp8-block o M=128 ring 64x64x128/4w/5s/k1: RMS error" in out
    assert "CUTLASS 10.00 (1.000)" in out
    assert "DeepGEMM" not in out, "it compiles for seconds"


def test_the_kind_neither_lends_nor_borrows_tiles(
    tuned: list[tuple[str, ScaledMmTile]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(tile: ScaledMmTile, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
        return torch.ops.taut.fp8_gemm(x, weight, *rest[:2], *rest[4:])

    monkeypatch.setattr(scaled_mm_compile, "launch", launch)
    rows = _tune(tmp_path, "--kind", "fp8", "--kind", "fp8-block", "--tokens", "32")
    assert list(rows) == ["fp8_gemm 32", "fp8_block 32"]
    of_blocks = {(tile.kernel, tile.block_k) for op, tile in tuned if op == "fp8_block"}
    assert of_blocks == {("ring", 128), ("pairs", 256), ("blocks", 128)}
    assert {tile.block_k for op, tile in tuned if op == "fp8_gemm"} > {128}
    assert len(tuned) == len(set(tuned)), "compiled once, before anything is timed"


def test_tuning_tries_the_kind_only_where_asked_for(
    tuned: list[tuple[str, ScaledMmTile]], tmp_path: Path
) -> None:
    assert tune_scaled_mm.main(["--output", str(tmp_path), "--seconds", "0.000001"]) == 0
    assert {op for op, _ in tuned} == set(KINDS.values())
