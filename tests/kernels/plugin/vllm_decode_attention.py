"""Run by test_decode_attention.py: our backend in an installed vLLM, without a card, as JSON.

vLLM's FlashAttention is replaced where it would compute, and writes down what it was called with.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TAUT_KERNELS"] = "prefer"
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn, registry

from taut_kernels.attention.decode import reference as decode_reference
from taut_kernels.vllm_plugin import compat, decode_attention, record, register

HEADS, KV_HEADS, DIM, PAGE, SCALE = 8, 2, 128, 16, 0.06
CPU = torch.device("cpu")
ANSWER: dict[str, Any] = {}
CALLS: list[dict[str, Any]] = []
UPDATES: list[tuple[Any, ...]] = []


def registered() -> None:
    custom = registry.AttentionBackendEnum.CUSTOM
    ANSWER["before"] = custom.is_overridden()
    register()
    register()
    backend = custom.get_class()
    ANSWER["class"], ANSWER["name"] = backend.__name__, backend.get_name()
    # A layer looks its backend up by that name.
    ANSWER["member"] = registry.AttentionBackendEnum[backend.get_name()] is custom
    again = compat.register_attention_backend(
        registry, decode_attention.BACKEND, decode_attention.CLASS_PATH
    )
    other = compat.register_attention_backend(registry, decode_attention.BACKEND, "other.Backend")
    ANSWER["registers"] = [again, other]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    (flag, value), *rest = decode_attention.engine_options("NVIDIA H200", "prefer").items()
    parsed = parser.parse_args([flag, value]).attention_backend
    ANSWER["parsed"] = [getattr(parsed, "name", parsed), len(rest)]


def pretend_h200() -> Any:
    current_platform.is_cuda = lambda: True
    current_platform.get_device_name = lambda: "NVIDIA H200"

    def forward(self: Any, layer: Any, query: Any, *operands: Any) -> torch.Tensor:
        CALLS.append(
            {"dtype": str(query.dtype), "told": self.supports_quant_query_input, "query": query}
        )
        if layer.fails:
            raise RuntimeError("theirs fails")
        output: torch.Tensor = operands[4]
        return output.fill_(7)

    flash_attn.FlashAttentionImpl.forward = forward
    flash_attn.FlashAttentionImpl.do_kv_cache_update = lambda self, *a: UPDATES.append(a)
    if hasattr(flash_attn, "flash_attn_supports_kv_cache_dtype"):
        flash_attn.flash_attn_supports_kv_cache_dtype = lambda *_, **__: True
    compat.quantised_queries = lambda query, scale: (query / scale).to(torch.float8_e4m3fn)
    from taut_kernels.vllm_plugin import attention_backend

    return attention_backend


def impl(backend: Any, kv_cache_dtype: str = "auto", window: int | None = None, **more: Any) -> Any:
    found = backend.TautAttentionImpl(
        HEADS, DIM, SCALE, KV_HEADS, None, window, kv_cache_dtype, **more
    )
    found.prepare(PAGE, torch.bfloat16, 16, CPU)
    return found


def asked(backend: Any) -> None:
    """What layers ask for as they are made, and what they compile where the cache is laid out."""
    seen: dict[str, list[Any]] = {"ahead": [], "then": []}
    warm_up = backend.warm_up_decode
    warm_up.ask_decode = lambda form, most, device: seen["ahead"].append([repr(form), most])
    warm_up.compile_decode = lambda form, most, device: seen["then"].append([repr(form), most])
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=64),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        cache_config=SimpleNamespace(block_size=PAGE),
        model_config=SimpleNamespace(dtype=torch.bfloat16, enable_sleep_mode=False),
    )
    theirs = backend.get_current_vllm_config_or_none
    backend.decode_attention.shared_arrivals = lambda count, device: None
    for there, on_cpu in ((config, False), (config, True), (None, False)):
        backend.get_current_vllm_config_or_none = lambda there=there: there
        backend.current_platform.is_cpu = lambda on_cpu=on_cpu: on_cpu
        for kv_cache_dtype, window in (("auto", None), ("fp8", 100)):
            made = backend.TautAttentionImpl(
                HEADS, DIM, SCALE, KV_HEADS, None, window, kv_cache_dtype
            )
            if there is not None and not on_cpu:
                made.prepare(PAGE, torch.bfloat16, 64, torch.device("cuda"))
    backend.get_current_vllm_config_or_none = theirs
    ANSWER["asked"] = seen


def batch(lens: list[int], window: tuple[int, int] = (-1, -1), **changes: Any) -> Any:
    """A batch's metadata as this vLLM has it, of contexts `lens`."""
    count = len(lens)
    fields = {
        "num_actual_tokens": count,
        "max_query_len": 1,
        "query_start_loc": torch.arange(count + 1, dtype=torch.int32),
        "max_seq_len": max(lens),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "block_table": torch.randperm(4 * count).int().view(count, 4),
        "use_cascade": False,
        "sliding_window": window,
        **changes,
    }
    known = {field.name for field in dataclasses.fields(flash_attn.FlashAttentionMetadata)}
    optional = dict.fromkeys(known - fields.keys())
    optional |= {"causal": changes.get("causal", True)}
    given = {name: value for name, value in (optional | fields).items() if name in known}
    return flash_attn.FlashAttentionMetadata(**given)


def layer(fails: bool = False) -> Any:
    one = torch.tensor
    return SimpleNamespace(_q_scale=one(0.5), _k_scale=one(0.25), _v_scale=one(3.0), fails=fails)


def cache(eight_bit: bool, heads_first: bool = False) -> torch.Tensor:
    kv = torch.randn(64, PAGE, KV_HEADS, 2 * DIM).bfloat16()
    if heads_first:
        kv = kv.transpose(1, 2).contiguous().transpose(1, 2)
    if eight_bit:
        kv = kv.to(torch.float8_e4m3fn).view(torch.uint8)
    return kv.transpose(1, 2)


def expected(q: Any, kv: Any, meta: Any, eight_bit: bool, window: int) -> torch.Tensor:
    both = kv.transpose(1, 2)
    scales: Any = (None, None)
    if eight_bit:
        both, scales = both.view(torch.float8_e4m3fn), (torch.tensor(0.25), torch.tensor(3.0))
    o = decode_reference.paged_decode_ref(
        q[:, None], both[..., :DIM], both[..., DIM:], meta.block_table, meta.seq_lens, *scales,
        None, 0, window, SCALE,
    )  # fmt: skip
    return o[:, 0]


def routed(backend: Any) -> None:
    """Plain decodes: our values in the caller's memory; FlashAttention is not asked."""
    found = {}
    for kind, eight_bit, window, heads_first in (
        ("bf16", False, None, False),
        ("bf16 HND", False, None, True),
        ("bf16 window", False, 20, False),
        ("fp8", True, None, False),
        ("fp8 HND window", True, 33, True),
    ):
        ours = impl(backend, "fp8" if eight_bit else "auto", window)
        meta = batch([50, 1, 0, 37], ours.sliding_window)
        kv = cache(eight_bit, heads_first)
        # Cut out of a projection, as a model's queries are, with two padding rows.
        q = torch.randn(6, (HEADS + 2) * DIM).bfloat16()[:, : HEADS * DIM].unflatten(1, (-1, DIM))
        out = torch.full((6, HEADS, DIM), 9.0).bfloat16()
        CALLS.clear()
        same = ours.forward(layer(), q, None, None, kv, meta, out) is out
        right = torch.equal(out[:4], expected(q[:4], kv, meta, eight_bit, window or 0))
        found[kind] = [same, right, bool((out[4:] == 9).all()), len(CALLS)]
    ANSWER["routed"] = found


def fell_through(backend: Any) -> None:
    """What is no plain decode: FlashAttention, with what it wants to be handed."""
    found: dict[str, Any] = {}
    q, kv = torch.randn(4, HEADS, DIM).bfloat16(), cache(False)
    uses = "use_cascade" in {f.name for f in dataclasses.fields(flash_attn.FlashAttentionMetadata)}
    changes: dict[str, dict[str, Any]] = {
        "prefill": {"max_query_len": 2},
        "fewer tokens than sequences": {"num_actual_tokens": 3},
        "not causal": {"causal": False},
        "causal by sequence": {"causal": torch.ones(4, dtype=torch.int32)},
        "R-SWA": {"rswa_prefix_lens": torch.ones(4)},
    }
    if uses:
        changes |= {"cascade": {"use_cascade": True}, "other window": {"sliding_window": (9, 0)}}
    ours = impl(backend)
    for name, change in changes.items():
        CALLS.clear()
        out = torch.zeros(4, HEADS, DIM).bfloat16()
        ours.forward(layer(), q, q, q, kv, batch([9, 9, 9, 9], **change), out)
        found[name] = [len(CALLS), bool((out == 7).all())]
    CALLS.clear()
    ours.forward(layer(), q, q, q, kv, None, torch.zeros(4, HEADS, DIM).bfloat16())
    found["profiling"] = [len(CALLS), True]
    scale = torch.ones(1)
    ours.forward(layer(), q, q, q, kv, batch([9] * 4), torch.zeros(4, HEADS, DIM).bfloat16(), scale)
    found["quantised output"] = [len(CALLS) - 1, True]
    ANSWER["fell_through"] = found


def quantised(backend: Any) -> None:
    """Over an fp8 cache the layer hands 16-bit queries; FlashAttention gets fp8 ones."""
    ours, q = impl(backend, "fp8"), torch.randn(3, HEADS, DIM).bfloat16()
    theirs = flash_attn.FlashAttentionImpl(
        HEADS, DIM, SCALE, KV_HEADS, None, None, "fp8"
    ).supports_quant_query_input
    answer: dict[str, Any] = {"stock": theirs, "layer": ours.supports_quant_query_input}
    mixed, out = batch([9, 9, 9], max_query_len=3), torch.zeros(3, HEADS, DIM).bfloat16()
    CALLS.clear()
    ours.forward(layer(), q, q, q, cache(True), mixed, out)
    answer["dtype"], answer["told"] = CALLS[0]["dtype"], CALLS[0]["told"]
    values = (q / 0.5).to(torch.float8_e4m3fn)
    answer["values"] = torch.equal(CALLS[0]["query"].float(), values.float())
    answer["after"] = ours.supports_quant_query_input
    try:
        ours.forward(layer(fails=True), q, q, q, cache(True), mixed, out)
    except RuntimeError as error:
        answer["error"] = str(error)
    answer["after error"] = ours.supports_quant_query_input
    # A layer that is not ours is vLLM's in everything.
    capped = impl(backend, "fp8", logits_soft_cap=30.0)
    CALLS.clear()
    capped.forward(layer(), q.to(torch.float8_e4m3fn), q, q, cache(True), batch([9] * 3), out)
    answer["capped"] = [capped.why_not_ours, capped.supports_quant_query_input, len(CALLS)]
    ANSWER["quantised"] = answer


def new_tokens(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Keys and values as a model cuts them out of its projection."""
    rows = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
    return rows[:, HEADS * DIM :].unflatten(1, (2, KV_HEADS, DIM)).unbind(1)


def written(backend: Any) -> None:
    """New keys and values: ours where the layer is, of decodes and prefills; else vLLM's."""
    found: dict[str, Any] = {}
    slots = torch.tensor([5, 16 * 63 + 15, -1, 700, 0, -1])
    for kind, heads_first in (("auto", False), ("auto", True), ("fp8", False), ("fp8_e4m3", True)):
        ours, kv = impl(backend, kind), cache(kind != "auto", heads_first)
        key, value = new_tokens(9)
        wanted = kv.clone()
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            row = torch.cat([key[token], value[token]], dim=1)
            if kind != "auto":
                scales = torch.tensor([0.25, 3.0]).repeat_interleave(DIM)
                row = (row.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
                row = row.view(torch.uint8)
            wanted[slot // PAGE, :, slot % PAGE] = row
        UPDATES.clear()
        ours.do_kv_cache_update(layer(), key, value, kv, slots)
        right = torch.equal(kv.view(torch.uint8), wanted.view(torch.uint8))
        found[f"{kind}{' HND' if heads_first else ''}"] = [right, len(UPDATES)]
    key, value = new_tokens(9)
    unprepared = backend.TautAttentionImpl(HEADS, DIM, SCALE, KV_HEADS, None, None, "auto")
    for name, it, operands in (
        ("soft cap", impl(backend, logits_soft_cap=30.0), (key, value, cache(False), slots)),
        ("encoder", impl(backend, attn_type="encoder_only"), (key, value, cache(False), slots)),
        ("unprepared", unprepared, (key, value, cache(False), slots)),
        ("other keys", impl(backend), (*new_tokens(9, torch.float16), cache(False), slots)),
        ("other values", impl(backend), (key, value.half(), cache(False), slots)),
        ("other cache", impl(backend), (key, value, cache(False).half(), slots)),
        ("short slots", impl(backend), (key, value, cache(False), slots.int())),
        ("columns apart", impl(backend), (key, value.mT.contiguous().mT, cache(False), slots)),
    ):
        UPDATES.clear()
        before, one = operands[2].clone(), layer()
        it.do_kv_cache_update(one, *operands)
        handed = all(a is b for a, b in zip(UPDATES[0], (one, *operands), strict=True))
        found[name] = [len(UPDATES), handed, torch.equal(operands[2], before), it.why_not_written]
    ANSWER["written"] = found


def recorded(backend: Any) -> None:
    """What turns out after loading reaches the record and, once, the log."""
    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda line: lines.append(line.getMessage())
    loggers = (decode_attention._logger, record._logger)
    for logger in loggers:
        logger.addHandler(heard)
    decode_attention._said.clear()
    model = torch.nn.ModuleList()
    for shared in (None, None, "layers.0.attn"):
        attention = torch.nn.Module()
        attention.impl, attention.attn_backend = impl(backend), None
        attention.kv_sharing_target_layer_name = shared
        model.append(attention)
    slots, kv = torch.tensor([5, 9]), cache(False)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "record.json"
        os.environ[record.REPORT_VARIABLE] = str(path)
        ops = {"reason": None, **decode_attention.conclude(model, "prefer")}
        record.write([], "prefer", path, ops)
        stages = [record.read(path)["ops"]]
        for layer_of, operands in (
            (model[0], (*new_tokens(2), kv, slots)),
            (model[0], (*new_tokens(2), kv, slots.int())),
            (model[0], (*new_tokens(2, torch.float16), kv, slots)),  # one reason is enough
            (model[1], (*new_tokens(2), kv, slots.int())),
        ):
            layer_of.impl.do_kv_cache_update(layer(), *operands)
            stages.append(record.read(path)["ops"])
        # The builder finds out what pages the cache has.
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context={"a": model[1]}, max_cudagraph_capture_size=64
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        theirs = flash_attn.FlashAttentionMetadataBuilder.__init__
        flash_attn.FlashAttentionMetadataBuilder.__init__ = lambda self, *arguments: None
        backend.TautAttentionMetadataBuilder(SimpleNamespace(block_size=48), ["a"], config, CPU)
        flash_attn.FlashAttentionMetadataBuilder.__init__ = theirs
        stages.append(record.read(path)["ops"])
        path.unlink()
        decode_attention.correct_record()
        path.write_text("{")
        decode_attention.correct_record()
        del os.environ[record.REPORT_VARIABLE]
    CALLS.clear()
    out = torch.zeros(2, HEADS, DIM).bfloat16()
    model[1].impl.forward(layer(), out, out, out, kv, batch([9, 9]), out)
    ANSWER["recorded"] = {"stages": stages, "lines": lines, "theirs": len(CALLS)}
    for logger in loggers:
        logger.removeHandler(heard)


def refused(backend: Any) -> None:
    """Reasons that layers give, and those found out when the cache is laid out."""
    found = {
        "plain": impl(backend).why_not_ours,
        "soft cap": impl(backend, logits_soft_cap=30.0).why_not_ours,
        "encoder": impl(backend, attn_type="encoder_only").why_not_ours,
        "int8": impl(backend, "int8_per_token_head").why_not_ours,
    }
    for name, page, dtype, kv_cache_dtype in (
        ("pages", 48, torch.bfloat16, "auto"),
        ("other type", 16, torch.bfloat16, "float16"),
        ("same type", 16, torch.float16, "float16"),
    ):
        late = backend.TautAttentionImpl(HEADS, DIM, SCALE, KV_HEADS, None, None, kv_cache_dtype)
        late.prepare(page, dtype, 4, CPU)
        found[name] = late.why_not_ours
        if late.why_not_ours:
            CALLS.clear()
            out = torch.zeros(2, HEADS, DIM).bfloat16()
            late.forward(layer(), out, out, out, cache(False), batch([9, 9]), out)
            assert CALLS, name
    plain, config = impl(backend), backend.get_current_vllm_config_or_none
    for name, part, option in (
        ("asleep", "model_config", "enable_sleep_mode"),
        ("halves", "parallel_config", "use_ubatching"),
    ):
        asked = SimpleNamespace(**{part: SimpleNamespace(**{option: True})})
        backend.get_current_vllm_config_or_none = lambda asked=asked: asked
        facts = backend._facts_of(plain)
        found[name] = decode_attention.why_not_layer(facts, "NVIDIA H200", "prefer")
    backend.get_current_vllm_config_or_none = config
    ANSWER["refused"] = found


def built(backend: Any) -> None:
    """The builder: what graphs it allows, whose layers it prepares, when it makes no schedule."""
    builder = backend.TautAttentionMetadataBuilder
    base = flash_attn.FlashAttentionMetadataBuilder
    support = {}
    for theirs in AttentionCGSupport:
        base.get_cudagraph_support = classmethod(lambda cls, config, spec, it=theirs: it)
        support[theirs.name] = builder.get_cudagraph_support(None, None).name
    ANSWER["graphs"] = support
    base.__init__ = lambda self, *arguments: None
    fast = []
    base.build = lambda self, prefix, common, fast_build=False: fast.append(fast_build)
    ours = backend.TautAttentionImpl(HEADS, DIM, SCALE, KV_HEADS, None, None, "auto")
    theirs = flash_attn.FlashAttentionImpl(HEADS, DIM, SCALE, KV_HEADS, None, None, "auto")
    layers = {"a": SimpleNamespace(impl=ours), "b": SimpleNamespace(impl=theirs)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context=layers, max_cudagraph_capture_size=64
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    spec = SimpleNamespace(block_size=PAGE)
    counters = []
    for names in (["a"], ["a", "b"]):
        made = builder(spec, names, config, CPU)
        for window, length in ((None, 1), ((-1, -1), 1), ((-1, -1), 5)):
            made.aot_sliding_window = window
            made.build(0, SimpleNamespace(max_query_len=length))
        counters.append(ours._arrivals.numel())
    ANSWER["fast"], ANSWER["counters"] = fast, counters
    model = torch.nn.ModuleList()
    for one in (ours, ours, theirs):
        attention = torch.nn.Module()
        attention.impl, attention.attn_backend = one, None
        model.append(attention)
    ANSWER["concluded"] = decode_attention.conclude(model, "prefer")


def main() -> None:
    torch.manual_seed(0)
    registered()
    backend = pretend_h200()
    for look in (routed, fell_through, quantised, written, recorded, refused, built, asked):
        look(backend)
    sys.stdout.write(f"\nANSWER {json.dumps(ANSWER)}\n")


if __name__ == "__main__":
    main()
