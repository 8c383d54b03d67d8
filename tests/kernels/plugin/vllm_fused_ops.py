"""Run by test_fused_ops_plugin.py: what the plugin changes in an installed vLLM, as JSON."""

import json
import sys


def parsed_options() -> dict[str, object]:
    """What vLLM's own parser makes of the options a launcher passes."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from taut_kernels.vllm_plugin import fused_ops

    argv = []
    for flag, value in fused_ops.engine_options("card", "require").items():
        argv += [flag, json.dumps(value)]
    found = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(argv)
    compilation = found.compilation_config
    return {
        "priority": found.ir_op_priority.rms_norm,
        "passes": compilation.inductor_passes,
        "custom_ops": compilation.custom_ops,
        "fuse": [
            compilation.pass_config.fuse_norm_quant,
            compilation.pass_config.fuse_act_quant,
            compilation.pass_config.fuse_allreduce_rms,
        ],
    }


def in_graph() -> list[bool]:
    """Whether the plugin sees that the launcher's options were given: not, compiled, eager."""
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        VllmConfig,
        set_current_vllm_config,
    )

    from taut_kernels.vllm_plugin import fused_ops

    told = fused_ops.engine_options("card", "require")["--compilation-config"]["inductor_passes"]
    found = [fused_ops.in_graph()]
    for passes, mode in (({}, "VLLM_COMPILE"), (told, "VLLM_COMPILE"), (told, "NONE")):
        config = CompilationConfig(mode=CompilationMode[mode], inductor_passes=dict(passes))
        with set_current_vllm_config(VllmConfig(compilation_config=config)):
            found.append(fused_ops.in_graph())
    return found


def rotated(mode: str) -> dict[str, object]:
    """What a rotary embedding does where vLLM compiles (mode VLLM_COMPILE) or not (NONE)."""
    from unittest import mock

    import torch
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.custom_op import op_registry_oot

    config = CompilationConfig(mode=CompilationMode[mode])
    with set_current_vllm_config(VllmConfig(compilation_config=config)):
        sizes = (64, 48, 32, 10000.0, True, torch.float32)
        rotary = op_registry_oot["RotaryEmbedding"](*sizes)
        off = CompilationConfig(mode=CompilationMode[mode], custom_ops=["none", "-RotaryEmbedding"])
    with set_current_vllm_config(VllmConfig(compilation_config=off)):
        answer: dict[str, object] = {"off": not type(rotary).enabled()}
    # From here on outside vLLM's configuration, as where a graph is traced.
    positions, qkv = torch.arange(3), torch.randn(3, 512)
    before = qkv.clone()
    q, k, _ = qkv.split([256, 128, 128], dim=1)
    natives = [rotary.forward_native(positions, before[:, :256], x) for x in (k.clone(), None)]
    if mode != "NONE":
        with torch.no_grad():
            graph = torch.compile(rotary.forward_cuda, fullgraph=True, backend="aot_eager")
            traced = graph(positions, q, k)
        answer["traced"] = all(torch.equal(a, b) for a, b in zip(traced, natives[0], strict=True))
        alone = rotary.forward_cuda(positions, q)
        answer["alone"] = torch.equal(alone[0], natives[1][0]) and alone[1] is None
    found = rotary.forward_cuda(positions, q, k)
    if mode != "NONE":
        with mock.patch.object(type(rotary), "_rotate_apart") as ours:
            rotary.forward_cuda(positions, q, k)
        answer["taken"] = ours.call_count
    answer["error"] = max((a - b).abs().max() for a, b in zip(found, natives[0], strict=True))
    answer["shapes"] = [list(x.shape) for x in found]
    answer["in_place"] = found[0] is q and found[1] is k
    answer["untouched"] = torch.equal(qkv, before)
    if mode == "NONE":
        return answer
    # What ours does not take is native, never vLLM's op in place.
    with (
        mock.patch.object(type(rotary), "_rotate_apart") as ours,
        mock.patch("vllm._custom_ops.rotary_embedding") as theirs,
    ):
        rotary.forward_cuda(positions, q, k.half())
        rotary.forward_cuda(positions.view(1, 3), q, k)
        rotary.forward_cuda(positions, q.unflatten(1, (4, 64)), k.unflatten(1, (2, 64)))
        rotary.forward_cuda(positions, q.double(), k.double())
        rotary.forward_cuda(positions, q.half(), k.half())  # the table is not in fp16
        answer["fallbacks"] = [ours.call_count, theirs.call_count]
    return answer


def not_ours(mode: str) -> dict[str, object]:
    """What is counted and logged of modules and calls that ours does not take, in a bf16 model.

    Angles in fp32 are gpt-oss's; heads in a dimension of their own those of latent attention.
    """
    import logging
    from unittest import mock

    import torch
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.activation import SiluAndMul

    from taut_kernels.vllm_plugin import custom_ops

    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())
    custom_ops._logger.addHandler(heard)
    custom_ops._logger.setLevel(logging.INFO)
    custom_ops._said.clear()
    bf16, config = torch.bfloat16, CompilationConfig(mode=CompilationMode[mode])
    torch.set_default_dtype(bf16)
    with set_current_vllm_config(VllmConfig(compilation_config=config)):
        rotary = op_registry_oot["RotaryEmbedding"]
        plain, wide = (rotary(64, 64, 32, 1e4, True, dtype) for dtype in (bf16, torch.float32))
        another = rotary(64, 64, 32, 1e4, True, torch.float32)
        activation = op_registry_oot["SiluAndMul"]()
        live = custom_ops.live_ops(torch.nn.ModuleList([plain, wide, another]))
    torch.set_default_dtype(torch.float32)
    answer: dict[str, object] = {"live": live, "loaded": lines.copy()}
    positions, x = torch.arange(3), torch.randn(3, 384).to(bf16)
    q, k = x.split([256, 128], dim=1)
    with (
        torch.no_grad(),
        mock.patch("vllm._custom_ops.rotary_embedding"),
        mock.patch.object(SiluAndMul, "forward_cuda", lambda self, x: self.forward_native(x)),
    ):
        for name, module, operands in (
            ("ours", plain, (positions, q, k)),
            ("queries alone", plain, (positions, q)),
            ("angles", another, (positions, q, k)),
            ("heads", plain, (positions, q.unflatten(1, (-1, 64)), k.unflatten(1, (-1, 64)))),
            ("positions", plain, (positions[None], q, k)),
            ("keys", plain, (positions, q, k.half())),
            ("gaps", activation, (x[:, :128],)),
        ):
            lines.clear()
            for backend in ("aot_eager", "eager"):  # traced anew
                forward = module.forward_cuda
                if mode != "NONE":  # as vLLM does: the whole model is one graph
                    forward = torch.compile(forward, fullgraph=True, backend=backend)
                forward(*operands)
                torch._dynamo.reset()
            answer[name] = lines.copy()
    custom_ops._logger.removeHandler(heard)
    return answer


def refusals() -> dict[str, object]:
    """What the record says of norms that ours does not take, asked as vLLM asks."""
    import os
    import tempfile
    from pathlib import Path

    import torch
    from vllm import ir

    from taut_kernels.vllm_plugin import fused_ops, ir_ops, record

    x, weight = torch.randn(3, 64), torch.ones(64)
    norm, add_norm = (getattr(ir.ops, op).impls["taut"].supports_args for op in ir_ops.OPS)

    def traced(y: torch.Tensor) -> torch.Tensor:
        return y + 1 if norm(y, weight, 1e-5) else y - 1

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "record.json"
        os.environ[record.REPORT_VARIABLE] = str(path)
        ops = fused_ops.conclude(torch.nn.Linear(1, 1), "require")
        record.write([], "require", path, ops)
        found = [record.read(path)["ops"]["refused"]]
        norm(x, weight, 1e-5)
        # Dynamo may keep nothing of it, so nothing is said.
        torch.compile(traced, backend="eager", fullgraph=True)(x.double())
        found.append(record.read(path)["ops"]["refused"])
        for _ in range(2):
            norm(x, weight, 1e-5, 32)
            norm(x.double(), weight, 1e-5)
            add_norm(x, x.half(), weight, 1e-5)
            add_norm(x, torch.zeros(64, 3).t(), weight, 1e-5)
        found.append(record.read(path)["ops"]["refused"])
        # As vLLM asks: in a backend, while Dynamo has a session.
        torch.compile(
            lambda y: y + 1, backend=lambda graph, _: norm(x, weight.double(), 1e-5) or graph
        )(x)
        found.append(record.read(path)["ops"]["refused"]["rms_norm"][-1])
        record.write([], "require", path)
        norm(x, weight.half(), 1e-5)
        found.append("ops" in record.read(path))
        # A record that is gone must not end a worker.
        path.unlink()
        norm(x.half(), weight.half().double(), 1e-5)
        again = fused_ops.conclude(torch.nn.Linear(1, 1), "require")["refused"]
        del os.environ[record.REPORT_VARIABLE]
    return {"found": found, "again": [again, dict(ir_ops.refused)]}


def main() -> None:
    import torch
    from vllm import ir
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.activation import SiluAndMul

    from taut_kernels.norm import rms_norm
    from taut_kernels.vllm_plugin import custom_ops, ir_ops, register

    register()
    register()
    answer = {"providers": sorted(ir.ops.rms_norm.impls), "replaced": sorted(op_registry_oot)}
    implementation = ir.ops.fused_add_rms_norm.impls["taut"]
    answer["inplace"], answer["supported"] = implementation.inplace, implementation.supported
    x, residual = torch.randn(2, 3, 64).unbind()
    weight = torch.rand(64) + 0.5
    takes = ir.ops.rms_norm.impls["taut"].supports_args
    answer["takes"] = {
        "rows": takes(x, weight, 1e-5),
        "variance": takes(x, weight, 1e-5, 32),
        "fp64": takes(x.double(), weight, 1e-5),
        "heads": takes(torch.zeros(4, 2, 128)[..., :64], weight, 1e-5),
        "columns": takes(torch.zeros(64, 3).t(), weight, 1e-5),
    }
    answer["refusals"] = refusals()
    # The provider is vLLM's own definition: the same values within fp32 rounding.
    y = ir.ops.rms_norm.impls["taut"].impl_fn(x, weight, 1e-5)
    answer["norm_error"] = (
        (y - ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-5)).abs().max()
    )
    expected = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-5)
    found = implementation.impl_fn(x, residual.clone(), weight, 1e-5)
    pairs = zip(found, expected, strict=True)
    answer["add_norm_error"] = max((a - b).abs().max() for a, b in pairs)
    assert y.shape == rms_norm.rms_norm(x, weight, epsilon=1e-5).shape
    custom_ops.install()
    custom_ops.install()
    answer["replaced_by_force"] = sorted(op_registry_oot)
    with set_current_vllm_config(VllmConfig()):
        activation = SiluAndMul()
        answer["class"] = type(activation).__name__
        gates = torch.randn(3, 128)
        native = SiluAndMul.forward_native(gates)
        answer["silu_error"] = (activation.forward_cuda(gates) - native).abs().max()
        answer["enabled"] = type(activation).enabled()
        rotary = op_registry_oot["RotaryEmbedding"](64, 64, 32, 10000.0, True, torch.float32)
        positions = torch.arange(3)
        q, k = torch.randn(3, 256), torch.randn(3, 128)
        native_q, native_k = rotary.forward_native(positions, q.clone(), k.clone())
        q, k = rotary.forward_cuda(positions, q, k)
        answer["rope_error"] = max((q - native_q).abs().max(), (k - native_k).abs().max())
        module = torch.nn.ModuleList([activation, rotary])
        answer["live"] = custom_ops.live_ops(module)
    answer["rotated"] = {mode: rotated(mode) for mode in ("NONE", "VLLM_COMPILE")}
    answer["not_ours"] = {mode: not_ours(mode) for mode in ("NONE", "VLLM_COMPILE")}
    answer["live_providers"] = ir_ops.live_providers()
    answer["parsed"] = parsed_options()
    answer["in_graph"] = in_graph()
    text = json.dumps(answer, default=lambda value: value.item())
    sys.stdout.write(f"\nANSWER {text}\n")


if __name__ == "__main__":
    main()
