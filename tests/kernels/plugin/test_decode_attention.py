"""Our decode attention in vLLM: who decides, which batches it takes, what vLLM holds then."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from taut_bench.testing import assert_within_budget
from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.decode import cut
from taut_kernels.attention.decode import op as decode
from taut_kernels.attention.decode import reference as decode_reference
from taut_kernels.launch.tile_tables import Table
from taut_kernels.vllm_plugin import compat, decode_attention
from taut_kernels.vllm_plugin.decode_attention import LayerFacts

H200 = "NVIDIA H200"
SCRIPT = Path(__file__).with_name("vllm_decode_attention.py")
LLAMA = LayerFacts(heads=32, kv_heads=8, head_dim=128, kv_cache_dtype="auto")
CPU = torch.device("cpu")


# --- who decides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "mode", "reason"),
    [
        (H200, "prefer", None),
        (H200, "require", None),
        ("other", "require", None),
        ("other", "prefer", "not measured against vLLM's on other; TAUT_KERNELS=require"),
        (H200, "off", "TAUT_KERNELS=off"),
        (None, "require", "no CUDA device"),
    ],
)
def test_reasons_and_options_agree(gpu: str | None, mode: str, reason: str | None) -> None:
    found = decode_attention.why_not_used(gpu, mode)
    options = decode_attention.engine_options(gpu, mode)
    if reason is None:
        assert found is None
        assert options == {"--attention-backend": "CUSTOM"}
        assert decode_attention.why_not_layer(LLAMA, gpu, "require") is None
    else:
        assert reason in str(found)
        assert options == {}
        assert decode_attention.why_not_layer(LLAMA, gpu, mode) == found


def test_a_table_without_decode_rows_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = {("forward", 128, 2, "large"): attention_tiles.AttentionTile(64, 64, 4, 2)}
    table = Table("card", forward)
    monkeypatch.setattr(attention_tiles, "tables", lambda: {"card": table})
    assert "not measured" in str(decode_attention.why_not_used("card", "prefer"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"kv_cache_dtype": "fp8_e5m2"}, "KV cache of fp8_e5m2"),
        ({"head_dim": 80}, "heads of 80 elements"),
        ({"heads": 12}, "12 query heads over 8 key heads"),
        ({"decoder": False}, "no decoder's attention"),
        ({"extras": ("ALiBi", "a soft cap")}, "with ALiBi and a soft cap"),
        ({"context_parallel": True}, "context parallel"),
        ({"batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
        ({"two_streams": True}, "two halves of a batch"),
        ({"sleeps": True}, "sleep mode"),
    ],
)
def test_layers_are_refused_by_name(changes: dict[str, Any], reason: str | None) -> None:
    for mode in ("prefer", "require"):
        found = decode_attention.why_not_layer(replace(LLAMA, **changes), H200, mode)
        assert (found is None) == (reason is None)
        assert (reason or "") in str(found or "")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_heads_nobody_measured_are_ours_only_where_required(kv_cache_dtype: str) -> None:
    facts = replace(LLAMA, head_dim=64, kv_cache_dtype=kv_cache_dtype)
    bits = 8 if kv_cache_dtype == "fp8" else 16
    found = decode_attention.why_not_layer(facts, H200, "prefer")
    assert f"on {H200} with heads of 64 and {bits} bits" in str(found)
    assert decode_attention.why_not_layer(facts, H200, "require") is None


# --- which batches -------------------------------------------------------------------------------


def _metadata(version: str, **changes: Any) -> SimpleNamespace:
    fields = {
        "max_query_len": 1,
        "num_actual_tokens": 4,
        "seq_lens": torch.tensor([5, 0, 3, 9]),
        "causal": True,
        "rswa_prefix_lens": None,
    }
    if version == "0.26":
        fields |= {"use_cascade": False, "sliding_window": (-1, -1), "mm_prefix_range_tensor": None}
    else:
        fields |= {"mm_prefix_query_range_tensor": None}
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize("version", ["0.26", "0.32"])
def test_a_token_a_sequence_is_a_plain_decode(version: str) -> None:
    assert decode_attention.is_plain_decode(_metadata(version), (-1, -1))
    assert not decode_attention.is_plain_decode(_metadata(version, max_query_len=2), (-1, -1))
    # A sequence without a new token among others: rows and sequences part.
    assert not decode_attention.is_plain_decode(_metadata(version, num_actual_tokens=3), (-1, -1))
    assert not decode_attention.is_plain_decode(_metadata(version, causal=False), (-1, -1))
    causal = torch.ones(4, dtype=torch.int32)
    assert not decode_attention.is_plain_decode(_metadata(version, causal=causal), (-1, -1))
    for mask in decode_attention.SPECIAL_MASKS:
        masked = _metadata(version, **{mask: torch.zeros(1)})
        assert not decode_attention.is_plain_decode(masked, (-1, -1))


def test_windows_and_cascades_of_older_versions_are_seen() -> None:
    assert not decode_attention.is_plain_decode(_metadata("0.26", use_cascade=True), (-1, -1))
    windowed = _metadata("0.26", sliding_window=(99, 0))
    assert decode_attention.is_plain_decode(windowed, (99, 0))
    # The group's window is not the layer's: vLLM's code follows the group's.
    assert not decode_attention.is_plain_decode(windowed, (-1, -1))
    assert decode_attention.is_plain_decode(_metadata("0.32"), (99, 0))


# --- what a launch gets --------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("heads_first", [False, True])
def test_the_cache_is_read_as_keys_and_values(kv_heads: int, heads_first: bool) -> None:
    kv = torch.randn(3, 16, kv_heads, 2 * 64)
    if heads_first:
        kv = kv.transpose(1, 2).contiguous().transpose(1, 2)
    theirs = kv.transpose(1, 2)
    k, v = compat.keys_and_values(theirs, 64)
    assert torch.equal(k, kv[..., :64])
    assert torch.equal(v, kv[..., 64:])
    assert k.data_ptr() == theirs.data_ptr()
    assert k.stride() == v.stride()
    # A single head's stride would be compiled in where it is 1, and taken apart where it is odd.
    degenerate = theirs.as_strided(theirs.shape, (theirs.stride(0), 1, *theirs.stride()[2:]))
    if kv_heads == 1:
        k, _ = compat.keys_and_values(degenerate, 64)
        assert all(stride % 16 == 0 for stride in k.stride()[:3])
        assert torch.equal(k, kv[..., :64])


def test_another_cache_is_refused() -> None:
    with pytest.raises(compat.IncompatibleVllmError, match=r"page size, 2 x 64.*\(2, 3, 2, 16\)"):
        compat.keys_and_values(torch.zeros(2, 3, 2, 16), 64)


def test_decode_writes_to_the_callers_memory() -> None:
    torch.manual_seed(0)
    q, kv = torch.randn(3, 1, 4, 64).half(), torch.randn(8, 16, 2, 128).half()
    table = torch.randperm(8).int()[:6].view(3, 2)
    contexts = torch.tensor([20, 0, 7], dtype=torch.int32)
    settings = decode.Settings(table, contexts, None, None, None, 32, 0, 0.1)
    out = torch.full((3, 1, 4, 80), 5.0).half()
    decode.decode_into(out[..., :64], q, kv[..., :64], kv[..., 64:], settings)
    expected = decode_reference.paged_decode_ref(q, kv[..., :64], kv[..., 64:], *settings)
    assert torch.equal(out[..., :64], expected)
    assert (out[..., 64:] == 5).all()


def test_counters_are_shared_and_grow_without_those_in_use_going(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_attention, "_arrivals", {})
    first = decode_attention.shared_arrivals(8, CPU)
    assert decode_attention.shared_arrivals(5, CPU) is first
    larger = decode_attention.shared_arrivals(9, CPU)
    assert larger.numel() == 9
    assert larger is not first
    assert decode_attention.shared_arrivals(8, CPU) is larger
    assert not larger.any()
    assert larger.dtype == torch.int32


@pytest.mark.parametrize(
    ("size", "sequences", "most", "load", "min_keys", "splits", "shares"),
    [
        (2, 1, 131072, "large", 64, 33, 0),  # one sequence, as the op: all run at once
        (2, 1, 1024, "small", 64, 16, 0),
        (2, 1, 64, "small", 64, 1, 0),
        (2, 2, 131072, "large", 128, 1, 33),
        (2, 8, 1024, "small", 512, 1, 16),
        (2, 8, 131072, "large", 512, 1, 33),
        (2, 16, 1024, "small", 1024, 1, 0),
        (2, 16, 131072, "large", 1024, 1, 33),
        (2, 17, 131072, "many", 1024, 1, 66),  # "large" would leave no places free
        (2, 32, 1024, "many", 1024, 1, 0),
        (2, 64, 1024, "many", 1024, 1, 0),
        (2, 64, 1025, "many", 1024, 1, 66),
        (2, 64, 131072, "many", 1024, 1, 66),
        (2, 1024, 131072, "many", 1024, 1, 66),
        (2, 1025, 131072, "many", 1024, 1, 0),  # more lengths than a program reads
        (1, 16, 1024, "small", 1024, 1, 0),
        (1, 16, 131072, "large", 1024, 1, 49),
        (1, 64, 1024, "many", 1024, 1, 0),
        (1, 64, 131072, "large", 1024, 1, 49),
        (1, 256, 131072, "large", 1024, 1, 49),
    ],
)
def test_a_grid_for_the_longest_context_keeps_short_ones_whole(
    size: int, sequences: int, most: int, load: str, min_keys: int, splits: int, shares: int
) -> None:
    tile, *found = attention_tiles.bounded_decode(
        H200, 128, size, 8 * sequences, most, 132, sequences
    )
    assert tile == replace(attention_tiles.decode(H200, 128, size, load), min_keys=min_keys)
    assert found == [splits, shares]


def test_a_grid_for_the_longest_context_is_bounded() -> None:
    for dim, size in ((64, 2), (128, 1), (128, 2), (256, 2)):
        for heads, sequences in itertools.product((1, 2, 5, 8, 64), (1, 5, 33, 256, 1024, 8192)):
            for most in (0, 1, 64, 1024, 8192, 131072, 2**20):
                kind = (H200, dim, size, heads * sequences, most, 132, sequences)
                tile, splits, shares = attention_tiles.bounded_decode(*kind)
                assert (
                    tile.min_keys >= attention_tiles.decode(H200, dim, size, "small").min_keys // 2
                )
                assert 1 <= splits <= max(1, -(-most // tile.min_keys))
                # The kernel counts places in 15 bits.
                assert 0 <= shares < 2**15 - attention_tiles.MOST_LENGTHS
                divided = most > tile.min_keys and sequences <= attention_tiles.MOST_LENGTHS
                assert (shares > 0) == (divided and sequences > 1)
                assert splits == 1 or sequences == 1


def test_blocks_of_lengths_are_few_and_fit() -> None:
    blocks = [cut.lengths_read(count) for count in range(1, attention_tiles.MOST_LENGTHS + 1)]
    assert all(block >= count for count, block in enumerate(blocks, 1))
    assert blocks == sorted(blocks)
    assert len({*blocks}) <= 3
    assert all(block & (block - 1) == 0 for block in blocks)


# --- the record ----------------------------------------------------------------------------------


def test_summary_is_one_line() -> None:
    rows: list[dict[str, Any]] = [
        {"owner": "taut", "reason": None, "layers": 30},
        {"owner": "vllm", "reason": "with a soft cap", "layers": 2},
    ]
    line = "decode attention=taut ×30, decode attention=vllm ×2 (with a soft cap)"
    assert decode_attention.summary(rows) == line
    assert decode_attention.summary([]) == "no attention layer"


def test_a_registry_that_is_not_the_one_we_know_is_said() -> None:
    with pytest.raises(compat.IncompatibleVllmError, match="attention backends are not where"):
        compat.register_attention_backend(ModuleType("registry"), "CUSTOM", "a.B")


# --- in vLLM -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answer(run_with_vllm: Any) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    process = run_with_vllm(str(SCRIPT))
    assert process.returncode == 0, process.stderr[-3000:]
    line = next(line for line in process.stdout.splitlines() if line.startswith("ANSWER "))
    found: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return found


@pytest.mark.vllm
def test_vllm_finds_the_backend_by_the_flag_a_launcher_gives(answer: dict[str, Any]) -> None:
    assert answer["before"] is False
    assert answer["class"] == "TautAttentionBackend"
    assert answer["name"] == "CUSTOM"
    assert answer["member"] is True
    assert answer["registers"] == [True, False]
    assert answer["parsed"] == ["CUSTOM", 0]


@pytest.mark.vllm
def test_plain_decodes_are_ours_and_leave_the_rest_of_the_output_alone(
    answer: dict[str, Any],
) -> None:
    assert set(answer["routed"]) == {
        "bf16", "bf16 HND", "bf16 window", "fp8", "fp8 HND window",
    }  # fmt: skip
    for kind, found in answer["routed"].items():
        assert found == [True, True, True, 0], kind


@pytest.mark.vllm
def test_everything_else_is_vllms(answer: dict[str, Any]) -> None:
    assert len(answer["fell_through"]) >= 7
    for name, found in answer["fell_through"].items():
        assert found == [1, True], name


@pytest.mark.vllm
def test_what_falls_through_over_an_fp8_cache_has_fp8_queries(answer: dict[str, Any]) -> None:
    found = answer["quantised"]
    assert found["stock"] is True
    assert found["layer"] is False
    assert (found["dtype"], found["told"]) == ("torch.float8_e4m3fn", True)
    assert found["values"] is True
    assert found["after"] is False
    assert found["error"] == "theirs fails"
    assert found["after error"] is False
    assert found["capped"] == ["with a soft cap", True, 1]


@pytest.mark.vllm
def test_layers_of_ours_write_their_cache_and_others_have_it_written(
    answer: dict[str, Any],
) -> None:
    found = dict(answer["written"])
    for kind in ("auto", "auto HND", "fp8", "fp8_e4m3 HND"):
        assert found.pop(kind) == [True, 0], kind
    reasons = {
        "soft cap": None,  # refused at loading
        "encoder": None,
        "unprepared": None,
        "other keys": "keys of torch.float16 and values of torch.float16 where the model has",
        "other values": "keys of torch.bfloat16 and values of torch.float16 where the model has",
        "other cache": "keys of torch.bfloat16 for a cache of torch.float16",
        "short slots": "slots of torch.int32",
        "columns apart": "elements of a key or value that are not next to each other",
    }
    assert found.keys() == reasons.keys()
    for name, (*handed, reason) in found.items():
        assert handed == [1, True, True], name
        assert (reason is None) == (reasons[name] is None)
        assert (reasons[name] or "") in (reason or "")


@pytest.mark.vllm
def test_what_turns_out_after_loading_is_recorded_and_logged_once(answer: dict[str, Any]) -> None:
    found, slots, pages = answer["recorded"], "slots of torch.int32", "pages of 48 keys"
    counts = []
    for stage in found["stages"]:
        assert stage["reason"] is None  # the record's other parts stay
        for row in (*stage["attention"], *stage["cache_writes"]):
            assert row["owner"] == ("taut" if row["reason"] is None else "vllm")
        parts = (stage["attention"], stage["cache_writes"])
        counts.append([{row["reason"]: row["layers"] for row in part} for part in parts])
    # Three layers, of which one reads another's cache.
    assert counts == [
        [{None: 3}, {None: 2}],
        [{None: 3}, {None: 2}],
        [{None: 3}, {None: 1, slots: 1}],
        [{None: 3}, {None: 1, slots: 1}],
        [{None: 3}, {slots: 2}],
        [{None: 2, pages: 1}, {slots: 1, pages: 1}],
    ]
    assert found["lines"][0] == f"cache writes not ours: {slots}"
    assert "not JSON" in found["lines"][1]
    assert len(found["lines"]) == 2
    # A cache laid out anew is not served from what an earlier one was prepared for.
    assert found["theirs"] == 1


@pytest.mark.vllm
def test_layers_say_why_they_are_not_ours(answer: dict[str, Any]) -> None:
    found = answer["refused"]
    assert found["plain"] is None
    assert found["same type"] is None
    assert found["soft cap"] == "with a soft cap"
    assert "no decoder" in found["encoder"]
    assert found["int8"] == "KV cache of int8_per_token_head"
    assert found["asleep"] == "sleep mode"
    assert "DBO" in found["halves"]
    assert found["pages"] == "pages of 48 keys"
    assert found["other type"] == "torch.bfloat16 queries over a cache of float16"


def test_a_layer_asks_for_its_decodes_when_it_is_made(answer: dict[str, Any]) -> None:
    seen = answer["asked"]
    assert len(seen["ahead"]) == 2
    assert seen["ahead"] == seen["then"]
    assert "window=100" in seen["ahead"][1][0]
    assert "float8" in seen["ahead"][1][0]


@pytest.mark.vllm
def test_graphs_of_mixed_batches_are_refused_and_schedules_left_out(
    answer: dict[str, Any],
) -> None:
    assert answer["graphs"] == {
        "ALWAYS": "UNIFORM_BATCH",
        "UNIFORM_BATCH": "UNIFORM_BATCH",
        "UNIFORM_SINGLE_TOKEN_DECODE": "UNIFORM_SINGLE_TOKEN_DECODE",
        "NEVER": "NEVER",
    }
    # No schedule for decodes of layers that are all ours, after the first batch.
    assert answer["fast"] == [False, True, False] + [False] * 3
    assert answer["counters"] == [64 * 8, 64 * 8]


@pytest.mark.vllm
def test_the_record_counts_layers(answer: dict[str, Any]) -> None:
    assert answer["concluded"]["cache_writes"] == answer["concluded"]["attention"]
    ours, theirs = answer["concluded"]["attention"]
    assert ours == {"owner": "taut", "reason": None, "layers": 2}
    assert (theirs["owner"], theirs["layers"]) == ("vllm", 1)
    reason = "not asked for (taut worker --decode-attention); vLLM FlashAttentionImpl"
    assert theirs["reason"] == reason


# --- on a card -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("most", [1024, 131072])
@pytest.mark.parametrize("sequences", [1, 16, 64])
@pytest.mark.parametrize("eight_bit", [False, True], ids=["bf16", "fp8"])
def test_a_graph_follows_lengths_and_pages(
    eight_bit: bool, sequences: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from taut_kernels.vllm_plugin import attention_backend

    monkeypatch.setenv("TAUT_KERNELS", "require")
    heads, kv_heads, dim, page, count = 32, 8, 128, 16, 2048
    impl = attention_backend.TautAttentionImpl(
        heads, dim, 0.1, kv_heads, None, None, "fp8" if eight_bit else "auto"
    )
    impl.prepare(page, torch.bfloat16, sequences, torch.device("cuda"))
    assert impl.why_not_ours is None
    generator = torch.Generator("cuda").manual_seed(0)
    kv = torch.randn(count, page, kv_heads, 2 * dim, device="cuda", generator=generator).bfloat16()
    kv = kv.to(torch.float8_e4m3fn).view(torch.uint8) if eight_bit else kv
    scales = (torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda"))
    layer = SimpleNamespace(_q_scale=scales[0], _k_scale=scales[0], _v_scale=scales[1])
    q = torch.randn(sequences, (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
    q = q[:, : heads * dim].unflatten(1, (heads, dim))
    out = torch.empty(sequences, heads, dim, dtype=torch.bfloat16, device="cuda")
    fields = {
        "num_actual_tokens": sequences,
        "max_seq_len": most,
        "seq_lens": torch.ones(sequences, dtype=torch.int32, device="cuda"),
        "block_table": torch.zeros(sequences, most // page, dtype=torch.int32, device="cuda"),
    }
    metadata = _metadata("0.26", **fields)

    def run() -> None:
        impl.forward(layer, q, None, None, kv.transpose(1, 2), metadata, out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    both = kv.view(torch.float8_e4m3fn) if eight_bit else kv
    for seed in range(3):
        generator.manual_seed(seed)
        lens = torch.randint(0, 1000, (sequences,), device="cuda", generator=generator)
        lens[0] = min(most, 5000)
        lens[sequences - sequences // 4 :] = 0  # pads the graph
        fields["seq_lens"].copy_(lens)
        table = fields["block_table"]
        table.copy_(torch.randint(0, count, table.shape, device="cuda", generator=generator))
        out.fill_(float("nan"))
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(first, out)
        settings: Any = (table, fields["seq_lens"], *(scales if eight_bit else (None, None)))
        operands = (both[..., :dim], both[..., dim:], *settings, None, most, 0, 0.1)
        reference = decode_reference.paged_decode_ref(q[:, None], *operands)
        gold = decode_reference.paged_decode_ref(q[:, None].double(), *operands)
        assert_within_budget(out[:, None], gold, reference)
        assert impl._arrivals is not None
        assert not impl._arrivals.any()
