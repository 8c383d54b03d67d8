"""An 8-bit KV cache: its scales are what attention saw, and readers of the checkpoint use them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from stood_for import logits_of, stored
from tiny_models import (
    job_for,
    make_recipe,
    recipe_data,
)
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from taut_deploy.compress import driver
from taut_deploy.compress.calibrate.calibration import make_calibration_set
from taut_deploy.compress.formats.codebook import CodebookFormat
from taut_deploy.compress.kv_cache import BlockCache, cached, cached_int8
from taut_deploy.diagnose.default_kernels import suits_decode_attention
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.recipe import KvCache
from taut_deploy.sizing import kv_bytes_per_token
from taut_deploy.validate.checkpoint_source import CheckpointSource
from taut_deploy.worker import WorkerSpec
from taut_deploy.worker.arguments import with_asked_cache

MARGIN = 2.0


def job(room, output, **cache):
    data = recipe_data(room / "text.txt", scheme="W8A16", algorithm="rtn") | {"kv_cache": cache}
    return job_for(room / "model", data, output)


@pytest.fixture(scope="module", params=["tensor", "head"])
def checkpoint(request, room, tmp_path_factory):
    """A finished job of each strategy."""
    asked = job(room, tmp_path_factory.mktemp("out") / "out", strategy=request.param)
    driver.compress(asked)
    return asked


def largest_by_head(request) -> dict[tuple[int, str], torch.Tensor]:
    """Largest |k|, |v| of each head over the calibration set, by the model's own projections.

    Keys are rotated by transformers' function, whose result is the only thing taken.
    """
    model = AutoModelForCausalLM.from_pretrained(request.output)
    config = json.loads((request.output / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["num_bits"] == 8
    for block in model.model.layers:  # the cache is not rounded while scales are taken
        block.self_attn.quantization_enabled = False
    tokens = make_calibration_set(request.recipe.calibration, request.model, request.cache).tokens
    found: dict[tuple[int, str], torch.Tensor] = {}
    rotate = modeling_llama.apply_rotary_pos_emb

    def keep(index, what, states):
        now = states.abs().amax((0, 2, 3))
        found[index, what] = torch.maximum(found.get((index, what), now), now)

    calls = []

    def rotated(query, key, *rest, **options):
        result = rotate(query, key, *rest, **options)
        calls.append(result)
        return result

    handles = []
    for index, block in enumerate(model.model.layers):
        handles.append(
            block.self_attn.v_proj.register_forward_hook(
                lambda _m, _a, out, index=index: keep(
                    index, "v", out.unflatten(-1, (2, 16)).transpose(1, 2)
                )
            )
        )
    modeling_llama.apply_rotary_pos_emb = rotated
    try:
        with torch.inference_mode():
            model(tokens)
    finally:
        modeling_llama.apply_rotary_pos_emb = rotate
    for index, (_query, key) in enumerate(calls):
        keep(index, "k", key)
    return found


def test_scales_are_the_largest_magnitudes_attention_saw(checkpoint):
    tensors, largest = stored(checkpoint.output), largest_by_head(checkpoint)
    per_head = checkpoint.recipe.kv_cache.strategy == "head"
    for index in range(2):
        for what in "kv":
            scale = tensors[f"model.layers.{index}.self_attn.{what}_scale"]
            expected = largest[index, what] * MARGIN / 448
            assert expected.shape == (2,)
            assert scale.shape == ((2, 1, 1) if per_head else (1,))
            wanted = expected if per_head else expected.max().reshape(1)
            torch.testing.assert_close(scale.flatten(), wanted, rtol=1e-4, atol=0)


class Rounded:
    """A cache that gives keys and values back as torch's own FP8 holds them."""

    def __init__(self, tensors, index):
        names = [f"model.layers.{index}.self_attn.{what}_scale" for what in "kv"]
        self._scales = [tensors[name].float() for name in names]

    def update(self, *states):
        """Round keys and values."""
        return tuple(
            (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for part, scale in zip(states, self._scales, strict=False)
        )


def give_cache(model, tensors):
    """Let every attention of a Llama read its keys and values from such a cache."""
    for index, block in enumerate(model.model.layers):
        cache = Rounded(tensors, index)
        block.self_attn.register_forward_pre_hook(
            lambda _m, args, kwargs, cache=cache: (args, kwargs | {"past_key_values": cache}),
            with_kwargs=True,
        )
    return model


def test_stock_transformers_and_we_round_the_same_cache(checkpoint):
    tensors = stored(checkpoint.output)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.output).eval()
    with_cache = logits_of(theirs)
    for block in theirs.model.layers:
        block.self_attn.quantization_enabled = False
    without = logits_of(theirs)
    cost = (with_cache - without).norm()
    assert 0 < cost < 0.1 * without.norm()
    ours = logits_of(give_cache(theirs, tensors))
    assert (with_cache - ours).norm() < 0.02 * cost


def test_a_validation_scores_the_rounded_cache(checkpoint):
    prompt = list(range(2, 40))
    source = CheckpointSource(checkpoint.output, "candidate", "cpu")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.output).eval()
    scored = []
    for rounded in (True, False):
        for block in model.model.layers:
            block.self_attn.quantization_enabled = rounded
        with torch.inference_mode():
            scored.append(model(torch.tensor([prompt])).logits[0, :-1])
    got = source.score(prompt).logits
    assert torch.equal(got, scored[0])
    assert not torch.equal(got, scored[1])


@pytest.mark.parametrize("strategy", ["tensor", "head"])
def test_a_block_is_emulated_with_its_cache(strategy, room):
    model = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    block = model.model.layers[1]
    cache = BlockCache(KvCache(strategy=strategy), block, "model.layers.1", torch.float32)
    with cache.observed():
        plain = logits_of(model)
    with cache.emulated():
        emulated = logits_of(model)
    assert not torch.equal(plain, emulated)
    assert torch.equal(logits_of(model), plain), "and only for a while"
    expected = {f"model.layers.0.self_attn.{what}_scale": torch.tensor(1e-6) for what in "kv"}
    expected |= cache.tensors()
    give_cache(model, expected).model.layers[0].self_attn._forward_pre_hooks.clear()
    torch.testing.assert_close(emulated, logits_of(model), rtol=1e-4, atol=1e-5)


def test_values_beyond_the_calibrated_range_become_its_end():
    states = torch.tensor([1.0, -3.0, 0.3]).view(1, 1, 1, 3)
    got = cached(states, torch.tensor([1 / 448]))
    assert got.flatten().tolist() == pytest.approx([1.0, -1.0, 0.3], rel=2**-4)
    assert got.flatten()[:2].tolist() == pytest.approx([1.0, -1.0], rel=1e-6)


def test_attention_that_is_not_seen_or_not_finite_is_refused(room):
    model = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    with (
        pytest.raises(ModelError, match=r"model\.layers\.0: kv_cache: no attention was seen"),
        BlockCache(KvCache(), model.model.layers[0], "model.layers.0", torch.float32).observed(),
    ):
        pass
    model.model.layers[0].self_attn.v_proj.weight.data[3, 3] = torch.nan
    cache = BlockCache(KvCache(), model.model, "model", torch.float32)
    with (
        pytest.raises(ModelError, match=r"layers\.0\.self_attn: its keys or values hold"),
        cache.observed(),
    ):
        logits_of(model)


def test_models_with_another_cache_are_refused_in_the_plan(room, tmp_path):
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
    )

    from taut_deploy.compress.kv_cache import require_suited

    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=1, vocab_size=64))
    with pytest.raises(RecipeError, match="one latent vector"):
        require_suited(model, [], KvCache())
    without = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(RecipeError, match="finds no attention in GPT2LMHeadModel"):
        require_suited(without, [], KvCache())
    model = AutoModelForCausalLM.from_pretrained(room / "model")
    codebook = CodebookFormat.__new__(CodebookFormat)
    with pytest.raises(RecipeError, match="not with low-rank or codebook layers"):
        require_suited(model, [codebook], KvCache())
    model._supports_attention_backend = False
    with pytest.raises(RecipeError, match="cannot be seen; leave 'kv_cache' out"):
        require_suited(model, [], KvCache())


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"dtype": "int4"}, "kv_cache.dtype.*'fp8'"),
        ({"dtype": "int8", "strategy": "head"}, "reads stored scales for FP8 alone"),
        ({"strategy": "token-head"}, "reads stored scales for FP8 alone"),
        ({"dtype": "int8", "margin": 1.5}, "drop 'margin'"),
        ({"margin": 0.5}, "kv_cache.margin"),
        ({"stratgy": "head"}, "did you mean 'strategy'"),
    ],
)
def test_wrong_settings_are_refused(cache, message, room):
    with pytest.raises(RecipeError, match=message):
        make_recipe(recipe_data(room / "text.txt") | {"kv_cache": cache})


def test_an_int8_cache_has_a_scale_for_every_token_and_head():
    """As vLLM's kernel: absmax / 127, rounded to nearest."""
    states = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    states[0, 1, 2] = 0
    got = cached_int8(states)
    for batch, head, token in itertools.product(range(2), range(3), range(5)):
        row = states[batch, head, token]
        scale = max(float(row.abs().max()) / 127, 1e-6)
        expected = torch.tensor([round(float(x) / scale) * scale for x in row])
        torch.testing.assert_close(got[batch, head, token], expected, rtol=1e-4, atol=1e-6)


def test_an_int8_cache_is_followed_and_asked_for_by_the_worker_alone(room, tmp_path):
    asked = job(room, tmp_path / "out", dtype="int8")
    manifest = driver.compress(asked)
    entry = json.loads((asked.output / "config.json").read_text())["quantization_config"]
    assert entry.get("kv_cache_scheme") is None, "vLLM refuses one of integers"
    assert not any(name.endswith((".k_scale", ".v_scale")) for name in stored(asked.output))
    assert make_recipe(manifest.recipe).hash == asked.recipe.hash
    model = AutoModelForCausalLM.from_pretrained(asked.output).eval()
    block = model.model.layers[0]
    cache = BlockCache(asked.recipe.kv_cache, block, "model.layers.0", torch.float32)
    plain = logits_of(model)
    with cache.emulated():
        assert 0 < (logits_of(model) - plain).norm() < 0.02 * plain.norm()
    spec = WorkerSpec(checkpoint=asked.output)
    served, said = with_asked_cache(spec, manifest, "cuda")
    assert (served.kv_cache_dtype, said) == (
        "int8_per_token_head",
        "KV cache: int8_per_token_head, as the checkpoint asks",
    )
    own = replace(spec, extra=("--kv-cache-dtype=fp8",))
    assert with_asked_cache(own, manifest, "cuda") == (own, None)
    kept, said = with_asked_cache(spec, manifest, "cpu")
    assert kept == spec
    assert "stay in 16 bits (a GPU has it)" in said
    # 2 layers of 2 heads of 16, keys and values, a float32 for each.
    assert kv_bytes_per_token(asked.output) == 2 * 2 * 2 * (16 + 4)


def test_recipes_without_a_cache_keep_their_hash(room):
    plain = make_recipe(recipe_data(room / "text.txt"))
    with_cache = make_recipe(recipe_data(room / "text.txt") | {"kv_cache": {}})
    assert plain.hash != with_cache.hash
    assert "kv_cache" not in json.dumps(plain.model_dump(mode="json", exclude_none=True))


@pytest.mark.parametrize(("strategy", "suited"), [("tensor", True), ("attn_head", False)])
def test_our_decode_attention_is_not_named_where_every_head_has_a_scale(strategy, suited):
    cache = {"num_bits": 8, "type": "float", "strategy": strategy}
    config = {"model_type": "llama", "quantization_config": {"kv_cache_scheme": cache}}
    assert suits_decode_attention(config, "auto", ()) is suited
