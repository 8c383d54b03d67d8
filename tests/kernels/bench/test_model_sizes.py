"""Products of the models whose kernels are to be chosen by measurement."""

from __future__ import annotations

import torch

from taut_bench import model_sizes
from taut_bench.model_sizes import Model
from taut_kernels.gemm.w4a16 import op


def test_ranks_cut_columns_and_rows_and_repeat_key_heads() -> None:
    """Qwen2.5-7B on four ranks: 28 heads, 4 key heads of 128, an MLP of 18944."""
    model = model_sizes.cut(model_sizes.BENCHMARKED["qwen2.5-7b"], 4)
    assert model.products() == {
        "gate_up": (9472, 3584),
        "down": (3584, 4736),
        "qkv": (1152, 3584),
        "o": (3584, 896),
    }
    # GLM-4 has two key heads: four ranks hold one each, every one of them twice.
    glm = model_sizes.cut(model_sizes.OTHERS["glm4-9b"], 4)
    assert glm.products()["qkv"] == ((8 + 1 + 1) * 128, 4096)


def test_a_model_is_cut_only_where_heads_and_width_divide() -> None:
    assert Model(4096, 14336, 32, 8, ranks=8).divides
    assert not Model(3584, 18944, 28, 4, ranks=8).divides  # 28 heads
    assert not Model(5120, 17920, 40, 10, ranks=4).divides  # 10 key heads
    names = dict(model_sizes.every_model())
    assert "qwen2.5-7b-tp4" in names
    assert "qwen2.5-7b-tp8" not in names
    assert "llama3.2-1b-tp8" not in names


def test_products_are_counted_once_a_model() -> None:
    """Of several models each, as 3072 × 3072 is the o of both llama3.2-3b and phi3-mini."""
    products = model_sizes.every_product(128)
    having = [
        name
        for name, model in model_sizes.every_model()
        if (3072, 3072) in model.products().values()
    ]
    assert products[3072, 3072] == len(having) >= 2
    # 896 = Qwen2.5-0.5B's width divides by 128 and by 32; its MLP of 4864 likewise.
    assert all(K % 128 == 0 for _, K in products)
    assert set(products) <= set(model_sizes.every_product(32))


def test_our_kernel_takes_every_product_of_the_list() -> None:
    refused = {
        (N, K, group): reason
        for group in (32, 128)
        for N, K in model_sizes.every_product(group)
        if (reason := op.why_not_supported(N, K, group, torch.bfloat16))
    }
    assert not {size for size in refused if size[2] == 128}
    # A lane loads 64 columns at once: other widths are vLLM's, and the reason says so.
    assert all(K % 64 for _, K, _ in refused)
