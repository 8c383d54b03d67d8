"""From a checkpoint to vLLM's argv and environment; nothing here starts vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_manifest import tiny_manifest
from tiny_models import write_llama

from taut_deploy import cli
from taut_deploy.checkpoint import Manifest, seal
from taut_deploy.errors import CheckpointError, ModelError, WorkerError
from taut_deploy.models.store import RECORD_FILE, describe_directory
from taut_deploy.worker import WorkerSpec, command_for, engine_options, launch
from taut_deploy.worker import asked_for as asked_for_option
from taut_deploy.worker.checks import (
    check_eight_bit_weights,
    check_int8,
    check_kernels,
    check_own_format,
    check_served,
    check_tables,
    verify_model,
)
from taut_deploy.worker.command import build_command

CHECKPOINT = Path("checkpoint")


def manifest(scheme: str = "W8A8") -> Manifest:
    return tiny_manifest(name="tiny", scheme=scheme, max_model_len=2048)


def build(platform="cpu", scheme="W8A8", environment=None, **spec):
    request = WorkerSpec(checkpoint=CHECKPOINT, **spec)
    return build_command(request, manifest(scheme), platform, "key-1", environment or {})


ARGUMENTS = [
    *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "8101"),
    *("--max-model-len", "2048", "--kv-cache-dtype", "auto", "--shutdown-timeout", "30"),
    *("--additional-config", '{"taut": "key-1"}'),
]


def test_the_command_on_a_cpu():
    command = build("cpu")
    assert list(command.argv) == [
        *(sys.executable, "-m", "taut_deploy.worker.cpu_server", "--model", "checkpoint"),
        *ARGUMENTS,
        *("--dtype", "bfloat16"),
    ]
    assert command.environment == {
        "PYTHONSAFEPATH": "1",
        "TAUT_KERNELS": "prefer",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def test_the_command_on_a_gpu():
    command = build("cuda")
    assert list(command.argv) == [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "checkpoint"),
        *ARGUMENTS,
    ]
    assert "VLLM_CPU_KVCACHE_SPACE" not in command.environment


def test_what_is_asked_for_replaces_the_defaults():
    command = build(
        name="n",
        port=9,
        max_model_len=64,
        kv_cache_dtype="fp8",
        shutdown_timeout_s=5,
        kv_cache_gib=3,
        extra=("--enforce-eager", "--dtype", "float32"),
    )
    flags = dict(zip(command.argv[5:-3:2], command.argv[6:-3:2], strict=True))
    assert flags == {
        "--served-model-name": "n",
        "--host": "127.0.0.1",
        "--port": "9",
        "--max-model-len": "64",
        "--kv-cache-dtype": "fp8",
        "--shutdown-timeout": "5",
        "--additional-config": '{"taut": "key-1"}',
        "--dtype": "bfloat16",
    }
    assert command.argv[-3:] == ("--enforce-eager", "--dtype", "float32"), "the last one counts"
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_kv_cache_memory_set_in_the_environment_stays():
    command = build(environment={"VLLM_CPU_KVCACHE_SPACE": "7"})
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "7"


@pytest.mark.parametrize(
    ("platform", "scheme", "asked", "mode"),
    [
        ("cpu", "W4A16", None, "require"),
        ("cpu", "W8A8", None, "prefer"),
        ("cpu", "W4A16", "off", "off"),
        ("cpu", "W8A8", "require", "require"),
        ("cuda", "W4A16", None, "prefer"),
        ("cuda", "W4A16", "require", "require"),
    ],
)
def test_schemes_with_faster_kernels_of_ours_require_them(platform, scheme, asked, mode):
    command = build(platform=platform, scheme=scheme, kernels=asked)
    assert command.environment["TAUT_KERNELS"] == mode


def test_the_command_line_of_a_worker_needs_no_tensor_library():
    """It starts in an image whose vLLM brings torch, and says its help without loading it."""
    code = (
        "import sys, taut_deploy.commands.worker as _; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def _model_of(tmp_path, num_bits):
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if num_bits == 8 else None,
    }
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return tmp_path


@pytest.mark.parametrize(
    ("num_bits", "platform", "mode", "wrong", "refused"),
    [
        (8, "cpu", "off", "it saturates", True),
        (8, "cpu", "off", None, False),
        (8, "cpu", "prefer", "it saturates", False),
        (8, "cuda", "off", "it saturates", False),
        (4, "cpu", "off", "it saturates", False),
    ],
)
def test_int8_is_not_served_by_a_product_that_saturates(
    num_bits, platform, mode, wrong, refused, tmp_path, monkeypatch
):
    from taut_kernels.vllm_plugin import selfcheck

    monkeypatch.setattr(selfcheck, "why_int8_wrong", lambda: wrong)
    model = _model_of(tmp_path, num_bits)
    if not refused:
        check_int8(model, platform, mode)
        return
    with pytest.raises(WorkerError, match="--kernels off: it saturates; leave it out"):
        check_int8(model, platform, mode)


@pytest.mark.parametrize(
    ("layer", "platform", "mode", "message"),
    [
        ("mlp.down_proj", "cpu", "off", "^--kernels off: .* 8-bit weights .* leave it out"),
        ("mlp.down_proj", "cpu", "prefer", None),
        ("mlp.down_proj", "cuda", "off", None),
    ],
)
def test_eight_bit_weights_are_served_by_who_can(layer, platform, mode, message, tmp_path):
    _write_one_layer(tmp_path, layer, WEIGHTS | {"num_bits": 8})
    if message is None:
        check_eight_bit_weights(tmp_path, platform, mode)
        return
    with pytest.raises(WorkerError, match=message):
        check_eight_bit_weights(tmp_path, platform, mode)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
IN_32 = {"strategy": "group", "group_size": 32}
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
AS_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FIXED = AS_FP8 | {"strategy": "tensor", "dynamic": False}
EXPERT, DENSE = "mlp.experts.0.down_proj", "mlp.down_proj"


def _write_one_layer(folder, layer, weights, inputs=None):
    """A directory with one quantised layer; its tensors' sizes do not matter."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    entry = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": entry}))
    name = f"model.layers.0.{layer}"
    stored = {
        f"{name}.weight_packed": torch.zeros(64, 8, dtype=torch.int32),
        f"{name}.weight_scale": torch.ones(64, 1),
    }
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("layer", "weights", "inputs", "platform", "message"),
    [
        (DENSE, WEIGHTS | {"num_bits": 3}, None, "cuda", "without gaps.* in a word; store"),
        (DENSE, WEIGHTS | IN_32, BY_TOKEN | {"type": "float"}, "cuda", "groups of 128 alone"),
        (DENSE, WEIGHTS | IN_32, BY_TOKEN, "cuda", None),
        (DENSE, WEIGHTS | IN_32, None, "cpu", None),
        (DENSE, AS_FP8, FIXED, "cuda", None),
        (EXPERT, WEIGHTS | IN_32, BY_TOKEN, "cuda", "unpacked, and they are stored packed"),
        (EXPERT, AS_FP8, FIXED, "cuda", "inputs rounded by token alone; store it otherwise"),
        (EXPERT, AS_FP8, BY_TOKEN | {"type": "float"}, "cuda", None),
        (EXPERT, WEIGHTS | {"num_bits": 8}, None, "cuda", None),
        (EXPERT, WEIGHTS | {"num_bits": 8}, None, "cpu", "8-bit weights on a CPU; serve it on a G"),
        (EXPERT, WEIGHTS | {"num_bits": 8, "symmetric": False}, None, "cuda", "8-bit .* zero"),
        (EXPERT, WEIGHTS | {"symmetric": False}, None, "cpu", "with zero points on a CPU; serve"),
        (EXPERT, WEIGHTS | IN_32, None, "cpu", "in groups of 32 on a CPU; serve it on a GPU, or"),
        (EXPERT, WEIGHTS | IN_32, None, "cuda", None),
        (EXPERT, WEIGHTS, None, "cpu", None),
    ],
)
def test_what_vllm_does_not_load_here_is_refused_by_layer(
    layer, weights, inputs, platform, message, tmp_path
):
    _write_one_layer(tmp_path, layer, weights, inputs)
    if message is None:
        check_served(tmp_path, platform)
        return
    with pytest.raises(WorkerError, match=rf"model\.layers\.0\.{layer}: vLLM.*{message}"):
        check_served(tmp_path, platform)


@pytest.mark.parametrize(
    ("tied", "platform", "mode", "target", "message"),
    [
        (True, "cuda", "off", "Embedding", "tied to its head"),
        (False, "cpu", "off", "Embedding", "which vLLM looks up on a GPU alone"),
        (False, "cuda", "off", "Embedding", None),
        (True, "cuda", "prefer", "Embedding", None),
        (True, "cpu", "off", "Linear", None),
    ],
)
def test_quantised_embeddings_are_served_by_who_can(
    tied, platform, mode, target, message, tmp_path
):
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": [target], "weights": weights}
    entry = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    config = {"tie_word_embeddings": tied, "quantization_config": entry}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if message is None:
        check_tables(tmp_path, platform, mode)
        return
    with pytest.raises(WorkerError, match=f"^--kernels off: .* embeddings, {message}; leave it"):
        check_tables(tmp_path, platform, mode)


def _own_format(tmp_path, **layer):
    from taut_kernels.formats import layer_description as told

    entry = told.write({"model.layers.0.mlp.up_proj": told.LowRank(4)})
    entry["layers"]["model.layers.0.mlp.up_proj"] |= layer
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": entry}))
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "extra", "message"),
    [
        ("off", (), "--kernels off: .* is of quant_method taut, which only taut's plugin loads"),
        ("prefer", ("--tensor-parallel-size", "2"), "--tensor-parallel-size 2: .* on one device"),
        ("prefer", ("--tensor_parallel_size=4",), "--tensor_parallel_size 4: .* on one device"),
        ("prefer", ("-tp", "2"), "-tp 2: .* on one device"),
        ("prefer", ("-tp",), "-tp : .* on one device"),
    ],
)
def test_a_checkpoint_of_our_own_method_is_served_by_the_plugin_on_one_device(
    mode, extra, message, tmp_path
):
    with pytest.raises(WorkerError, match=message):
        check_own_format(_own_format(tmp_path), mode, extra)


@pytest.mark.parametrize(
    "extra", [(), ("-tp", "1"), ("--tensor-parallel-size=1",), ("--seed", "2")]
)
def test_on_one_device_our_own_method_is_served(extra, tmp_path):
    check_own_format(_own_format(tmp_path), "prefer", extra)


def test_a_description_that_is_not_known_is_refused_before_vllm_starts(tmp_path):
    with pytest.raises(ModelError, match=r"layers\.model\.layers\.0\.mlp\.up_proj\.alpha: is not"):
        check_own_format(_own_format(tmp_path, alpha=1), "prefer", ())


@pytest.mark.parametrize(
    ("platform", "dtype", "accepted"),
    [
        ("cpu", "auto", True),
        ("cpu", "fp8", True),
        ("cpu", "int8_per_token_head", False),
        ("cpu", "fp8_per_token_head", False),
        ("cpu", "turbo", False),
        ("cuda", "int8_per_token_head", True),
        ("cuda", "turbo", False),
    ],
)
@pytest.mark.parametrize("way", ["option", "extra", "extra=", "extra_"])
def test_only_kv_cache_dtypes_a_platform_implements(platform, dtype, accepted, way):
    spec = {
        "option": {"kv_cache_dtype": dtype},
        "extra": {"extra": ("--kv-cache-dtype", dtype)},
        "extra=": {"extra": (f"--kv-cache-dtype={dtype}",)},
        "extra_": {"extra": ("--kv_cache_dtype", dtype)},
    }[way]
    if accepted:
        argv = build(platform, **spec).argv
        assert argv.count("--kv-cache-dtype") == 1
        assert argv[argv.index("--kv-cache-dtype") + 1] == dtype
        assert not any("_dtype" in argument for argument in argv)
    else:
        message = rf"--kv-cache-dtype {dtype}: not implemented on {platform}; use one of auto"
        with pytest.raises(WorkerError, match=message):
            build(platform, **spec)


def test_a_kv_cache_flag_without_a_value_is_refused():
    with pytest.raises(WorkerError, match="--kv-cache-dtype"):
        build(extra=("--kv-cache-dtype",))


@pytest.mark.parametrize(
    ("extra", "way_out"),
    [
        (("--host", "0.0.0.0"), "taut worker's own --host"),
        (("--host=0.0.0.0",), "taut worker's own --host"),
        (("--ho", "0.0.0.0"), "taut worker's own --host"),
        (("--uds", "/tmp/s"), "--port"),
        (("--port", "1"), "--port"),
        (("--served-model-name", "x"), "--name"),
        (("--served_model_name=x",), "--name"),
        (("--served", "x"), "--name"),
        (("--max-model-len", "9"), "--max-model-len"),
        (("--shutdown-timeout", "0"), "--shutdown-timeout"),
        (("--additional-config", "{}"), "taut's kernels"),
        (("--additional_config.taut", "x"), "taut's kernels"),
        (("--model", "x"), "first argument"),
        (("--config", "f.yaml"), "give the arguments themselves"),
        (("--config=f.yaml",), "give the arguments themselves"),
        (("--kv-cache", "fp8"), "in full"),
    ],
)
def test_extra_arguments_cannot_undo_what_taut_promises(extra, way_out):
    with pytest.raises(WorkerError, match=rf"^{extra[0].partition('=')[0]}: .*{way_out}"):
        build(extra=("--enforce-eager", *extra))


@pytest.mark.parametrize(
    "extra",
    [
        ("--max-num-seqs", "4"),
        ("--compilation-config.level", "0"),
        ("-O0",),
        ("--enable-prefix-caching",),
        ("--max-num-batched-tokens=64",),
    ],
)
def test_other_extra_arguments_pass_as_they_are(extra):
    assert build(extra=extra).argv[-len(extra) :] == extra


FUSED = {"--ir-op-priority": {"rms_norm": ["taut"]}, "--compilation-config": {"mode": 3}}


def build_fused(*extra):
    request = WorkerSpec(checkpoint=CHECKPOINT, fused_ops=True, extra=extra)
    return build_command(request, manifest(), "cuda", "key-1", {}, FUSED)


def test_fused_ops_are_told_to_vllm_as_json():
    argv = build_fused("-O2").argv
    assert argv[-5::2] == ("--ir-op-priority", "--compilation-config", "-O2")
    assert [json.loads(value) for value in argv[-4::2]] == list(FUSED.values())


@pytest.mark.parametrize(
    "flag",
    ["--compilation-config", "--compilation_config.mode", "-cc.mode=3", "-cc", "--ir-op", "--kern"],
)
def test_fused_ops_and_flags_that_would_undo_them_do_not_go_together(flag):
    with pytest.raises(WorkerError, match=rf"^{flag.partition('=')[0]}: .*leave out --fused-ops"):
        build_fused(flag, "{}")
    assert build("cuda", extra=(flag, "{}")).argv[-2:] == (flag, "{}")


def on_card(monkeypatch, name):
    monkeypatch.setattr("torch.cuda.is_available", lambda: name is not None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)


def test_fused_ops_that_cannot_run_here_are_refused_with_the_reason(monkeypatch):
    options = partial(engine_options.fused_engine_options, suited=False)
    assert options(False, "off") == {}
    on_card(monkeypatch, None)
    with pytest.raises(WorkerError, match=r"^--fused-ops: no CUDA device"):
        options(True, "prefer")
    on_card(monkeypatch, "NVIDIA H200")
    assert options(True, "prefer")["--ir-op-priority"]["rms_norm"] == ["taut"]
    with pytest.raises(WorkerError, match=r"^--fused-ops: TAUT_KERNELS=off"):
        options(True, "off")


@pytest.mark.parametrize(
    ("card", "mode", "asked", "suited", "used"),
    [
        ("NVIDIA H200", "prefer", None, True, True),
        ("NVIDIA H200", "prefer", None, False, False),
        ("NVIDIA H200", "prefer", False, True, False),
        ("NVIDIA H200", "off", None, True, False),
        ("NVIDIA H100 80GB HBM3", "prefer", None, True, True),
        ("NVIDIA H100 80GB HBM3", "prefer", None, False, False),
        ("NVIDIA H100 80GB HBM3", "prefer", True, False, True),
        # Nobody measured one of its engines.
        ("NVIDIA H100 PCIe", "prefer", None, True, False),
        ("card 9", "require", None, True, False),
        (None, "require", None, True, False),
    ],
)
def test_fused_ops_are_used_by_default_where_engines_were_measured(
    monkeypatch, card, mode, asked, suited, used
):
    on_card(monkeypatch, card)
    found = engine_options.fused_engine_options(asked, mode, suited=suited)
    assert bool(found) is used


ATTENTION = {"--attention-backend": "CUSTOM"}


def build_attention(*extra):
    request = WorkerSpec(checkpoint=CHECKPOINT, decode_attention=True, extra=extra)
    return build_command(request, manifest(), "cuda", "key-1", {}, None, ATTENTION)


def test_decode_attention_is_told_to_vllm_by_its_backend_s_name():
    assert build_attention("-O2").argv[-3:] == ("--attention-backend", "CUSTOM", "-O2")


@pytest.mark.parametrize("flag", ["--attention-backend", "--attention_config.backend=X", "-ac"])
def test_decode_attention_and_flags_that_would_undo_it_do_not_go_together(flag):
    name = flag.partition("=")[0]
    with pytest.raises(WorkerError, match=rf"^{name}: .*leave out --decode-attention"):
        build_attention(flag, "FLASH_ATTN")
    assert build("cuda", extra=(flag, "{}")).argv[-2:] == (flag, "{}")


def test_decode_attention_that_cannot_run_here_is_refused_with_the_reason(monkeypatch):
    options = partial(engine_options.attention_engine_options, suited=False)
    assert options(False, "off") == {}
    on_card(monkeypatch, None)
    with pytest.raises(WorkerError, match=r"^--decode-attention: no CUDA device"):
        options(True, "prefer")
    on_card(monkeypatch, "NVIDIA H200")
    assert options(True, "prefer") == ATTENTION
    with pytest.raises(WorkerError, match=r"^--decode-attention: TAUT_KERNELS=off"):
        options(True, "off")
    on_card(monkeypatch, "card 9")
    with pytest.raises(WorkerError, match=r"^--decode-attention: not measured .* card 9"):
        options(True, "prefer")


def test_an_option_is_asked_for_refused_or_left_open():
    asked_for = partial(asked_for_option, "fused-ops")
    assert asked_for(given=True, refused=False) is True
    assert asked_for(given=False, refused=True) is False
    assert asked_for(given=False, refused=False) is None
    with pytest.raises(WorkerError, match="--fused-ops and --no-fused-ops: give one of them"):
        asked_for(given=True, refused=True)


@pytest.mark.parametrize(
    ("card", "mode", "asked", "suited", "used"),
    [
        ("NVIDIA H200", "prefer", None, True, True),
        ("NVIDIA H200", "prefer", None, False, False),
        ("NVIDIA H200", "prefer", False, True, False),
        ("NVIDIA H200", "prefer", True, False, True),
        ("NVIDIA H200", "off", None, True, False),
        ("card 9", "prefer", None, True, False),
        (None, "require", None, True, False),
    ],
)
def test_decode_attention_is_used_by_default_where_it_was_measured(
    monkeypatch, card, mode, asked, suited, used
):
    on_card(monkeypatch, card)
    found = engine_options.attention_engine_options(asked, mode, suited=suited)
    assert found == (ATTENTION if used else {})


@pytest.mark.parametrize(
    ("config", "change", "suits"),
    [
        ('{"model_type": "llama"}', {}, True),
        ('{"model_type": "qwen3"}', {"extra": ("--max-num-seqs", "4")}, True),
        ('{"model_type": "phi3"}', {}, True),
        ('{"model_type": "llama"}', {"kv_cache_dtype": "fp8"}, True),
        ('{"model_type": "llama"}', {"kv_cache_dtype": "fp8_e5m2"}, False),
        ('{"model_type": "llama"}', {"extra": ("--kv-cache-dtype", "fp8_e5m2")}, False),
        ('{"model_type": "llama"}', {"extra": ("--kv_cache_dtype=fp8",)}, True),
        ('{"model_type": "llama"}', {"extra": ("--attention-backend", "FLASH_ATTN")}, False),
        ('{"model_type": "llama"}', {"extra": ("--attention_config.backend=X",)}, False),
        ('{"model_type": "llama"}', {"extra": ("-ac", "{}")}, False),
        ('{"model_type": "llama"}', {"extra": ("--speculative-config", "{}")}, False),
        ('{"model_type": "llama"}', {"extra": ("--spec-model=m",)}, False),
        ('{"model_type": "deepseek_v3"}', {}, False),
        ('{"model_type": "gpt_oss"}', {}, False),
        ("[]", {}, False),
        ("no JSON", {}, False),
        (None, {}, False),
    ],
)
def test_default_for_plain_attention_of_which_nobody_chose_the_backend(
    tmp_path, config, change, suits
):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert engine_options.suited_options(WorkerSpec(tmp_path, **change))[1] is suits


def config_in_8_bits(kind="llama", weights=None, activations=None):
    group = {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"} | (weights or {}),
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}
        | (activations or {}),
    }
    return {"model_type": kind, "quantization_config": {"config_groups": {"group_0": group}}}


def config_in_4_bits(kind="llama", **weights):
    found = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128} | weights
    group = {"weights": found, "input_activations": None, "targets": ["Linear"]}
    return {"model_type": kind, "quantization_config": {"config_groups": {"group_0": group}}}


def of_two_groups(first, second):
    groups = [
        config["quantization_config"]["config_groups"]["group_0"] for config in (first, second)
    ]
    return first | {"quantization_config": {"config_groups": dict(enumerate(groups))}}


@pytest.mark.parametrize(
    ("config", "extra", "suits"),
    [
        (config_in_8_bits(), (), True),
        (
            config_in_8_bits("qwen2", weights={"type": "float"}, activations={"type": "float"}),
            ("--max-num-seqs", "4"),
            True,
        ),
        (config_in_8_bits("gpt_oss"), (), False),
        (config_in_8_bits(weights={"num_bits": 4, "strategy": "group"}), (), False),
        (config_in_4_bits(), (), True),
        (config_in_4_bits("phi3"), (), True),
        (config_in_4_bits("mistral"), ("-tp", "2"), False),
        (config_in_4_bits("gpt_oss"), (), False),
        (config_in_4_bits(symmetric=False, group_size=32), (), True),
        (config_in_4_bits(num_bits=3), (), False),
        (config_in_4_bits(strategy="channel"), (), False),
        (config_in_4_bits(type="float"), (), False),
        (of_two_groups(config_in_4_bits(), config_in_8_bits()), (), False),
        (config_in_8_bits(weights={"strategy": "block"}), (), False),
        (config_in_8_bits(activations={"dynamic": False}), (), False),
        (config_in_8_bits(activations={"strategy": "tensor"}), (), False),
        ({"model_type": "llama"}, (), False),
        ({"model_type": "llama", "quantization_config": {"config_groups": {}}}, (), False),
        ({"model_type": "llama", "quantization_config": {"config_groups": {"a": None}}}, (), False),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, (), False),
        (config_in_8_bits(activations={"symmetric": False}), (), False),
        (config_in_8_bits(activations={"type": "float"}), (), False),
        (config_in_8_bits(), ("-tp", "2"), False),
        (config_in_8_bits(), ("-pcp=2",), False),
        (config_in_8_bits(), ("--enable-lora",), False),
        (config_in_8_bits(), ("--hf-overrides", "{}"), False),
        (config_in_8_bits(), ("--tensor_parallel_size=2",), False),
        (config_in_8_bits(), ("-cc.mode=0",), False),
        (config_in_8_bits(), ("--ir-op-priority", "{}"), False),
        (config_in_8_bits(), ("--enforce-eager",), False),
        (config_in_8_bits(), ("-O0",), False),
        (config_in_8_bits(), ("--speculative-config", "{}"), False),
    ],
)
def test_fused_ops_suit_w4a16_and_8_bits_on_one_card_that_nobody_compiles_otherwise(
    tmp_path, config, extra, suits
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert engine_options.suited_options(WorkerSpec(tmp_path, extra=extra))[0] is suits


def test_what_suits_a_model_becomes_arguments_of_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("TAUT_KERNELS", "off")
    on_card(monkeypatch, "NVIDIA H200")
    (tmp_path / "config.json").write_text(json.dumps(config_in_8_bits()))
    spec = WorkerSpec(tmp_path, max_model_len=64)
    argv = command_for(spec, None, "cuda").argv
    assert "--ir-op-priority" in argv and "--attention-backend" in argv
    argv = command_for(replace(spec, fused_ops=False), None, "cuda").argv
    assert "--ir-op-priority" not in argv and "--attention-backend" in argv


def test_a_cpu_s_launcher_does_not_ask_what_suits_a_gpu(monkeypatch):
    """The question imports torch."""
    monkeypatch.setenv("TAUT_KERNELS", "off")
    monkeypatch.setattr(engine_options, "suited_options", lambda _: pytest.fail("was asked"))
    found = command_for(WorkerSpec(CHECKPOINT, kernels="off"), manifest(), "cpu")
    assert "--attention-backend" not in found.argv


def test_a_filtered_out_plugin_is_refused_with_the_reason():
    with pytest.raises(WorkerError, match=r"VLLM_PLUGINS='nope' excludes 'taut'.*--kernels off"):
        check_kernels("prefer", {"VLLM_PLUGINS": "nope"})
    check_kernels("off", {"VLLM_PLUGINS": "nope"})
    check_kernels("require", {})


def test_the_worker_becomes_vllm_with_a_key_of_its_own_mode(tmp_path, monkeypatch):
    """``off`` and ``require`` must not share vLLM's compile cache."""
    started = []
    monkeypatch.setattr(launch.os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setenv("TAUT_KERNELS", "nonsense")
    model = write_llama(tmp_path / "m", layers=1)
    for mode in ("off", "require"):
        launch.exec_worker(WorkerSpec(model, kernels=mode))
    for (program, argv, environment), mode in zip(started, ("off", "require"), strict=True):
        assert program == argv[0] == sys.executable
        config = json.loads(argv[argv.index("--additional-config") + 1])
        assert config["taut"].startswith(f"{mode}-")
        assert environment["TAUT_KERNELS"] == mode
        assert argv[argv.index("--max-model-len") + 1] == "128"
        assert argv[argv.index("--served-model-name") + 1] == "m"


def test_an_uncompressed_model_is_checked_against_its_record(tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    assert verify_model(model) is None
    (model / RECORD_FILE).write_text(json.dumps(describe_directory(model).as_json()))
    assert verify_model(model) is None
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=r"differ from taut-model\.json"):
        verify_model(model)


def test_a_checkpoint_is_verified_before_anything_starts(tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    seal(model, manifest())
    assert verify_model(model) is not None
    (model / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json: its sha256 differs"):
        launch.exec_worker(WorkerSpec(model))


def test_a_directory_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no config"):
        verify_model(tmp_path)


def test_worker_listens_where_it_is_told() -> None:
    argv = build(host="10.1.2.3").argv
    assert argv[argv.index("--host") + 1] == "10.1.2.3"


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(WorkerError, match="--host localhost: not an IP address"):
        cli.app(["worker", str(CHECKPOINT), "--host", "localhost"], standalone_mode=False)
