"""Run by test_fusion.py: the pass on graphs of AOTAutograd, with stand-ins for vLLM's ops on CPU.

In its own process, since vLLM's real ops of these names would clash. Each check compiles a layer
twice, with and without the pass, and compares the results; it prints how many pairs were fused.
"""

import operator
import sys

import torch
from torch._dynamo.backends.common import aot_autograd

from taut_kernels import fuse_for_vllm
from taut_kernels.fused import rms_norm, row_quant
from taut_kernels.vllm_plugin import fusion

EPSILON = 1e-5


def define(name, schema, implementation, fake):
    torch.library.define(name, schema)
    torch.library.impl(name, "CPU", implementation)
    torch.library.register_fake(name, fake)


def quantise_int8(result, input, scale, azp):
    q, s = row_quant.quantize_rows_ref(input, torch.int8)
    result.copy_(q)
    scale.copy_(s)


def quantise_fp8(result, input, scale, scale_ub):
    q, s = row_quant.quantize_rows_ref(input, row_quant.FP8)
    result.copy_(q)
    scale.copy_(s)


def quantise_static(result, input, scale, group_shape):
    result.copy_(row_quant.quantize_static_ref(input, scale))


def norm(x, weight, epsilon, variance_size=None):
    return rms_norm.rms_norm_ref(x, weight, None, epsilon)


def add_norm(x, x_residual, weight, epsilon, variance_size=None):
    residual = x_residual.clone()
    return rms_norm.rms_norm_ref(x, weight, residual, epsilon), residual


def nothing(*_):
    return None


define(
    "_C::dynamic_scaled_int8_quant",
    "(Tensor(a!) result, Tensor input, Tensor(b!) scale, Tensor(c!)? azp) -> ()",
    quantise_int8,
    nothing,
)
define(
    "_C::dynamic_per_token_scaled_fp8_quant",
    "(Tensor(a!) result, Tensor input, Tensor(b!) scale, Tensor? scale_ub) -> ()",
    quantise_fp8,
    nothing,
)
define(
    "_C::static_scaled_fp8_quant",
    "(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape) -> ()",
    quantise_static,
    nothing,
)
define(
    "vllm_ir::rms_norm",
    "(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor",
    norm,
    lambda x, *_: torch.empty_like(x),
)
define(
    "vllm_ir::fused_add_rms_norm",
    "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None)"
    " -> (Tensor, Tensor)",
    add_norm,
    lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)
C, IR = torch.ops._C, torch.ops.vllm_ir


def quantised(y, kind):
    """Quantise as vLLM's Python wrappers do, and give the values back as floats."""
    dtype = torch.int8 if kind == "int8" else row_quant.FP8
    q = torch.empty(y.shape, dtype=dtype)
    if kind == "static":
        scale = torch.full((1,), 0.03)
        C.static_scaled_fp8_quant(q, y, scale, None)
        return q.float() * scale
    scales = torch.empty(y.shape[0], 1)
    if kind == "int8":
        C.dynamic_scaled_int8_quant(q, y, scales, None)
    else:
        C.dynamic_per_token_scaled_fp8_quant(q, y, scales, None)
    return q.float() * scales


def run(layer, *inputs):
    """Return (results without the pass, with it, the ops left in the graph)."""
    names = []

    def compiler(with_pass):
        def compile_graph(module, _):
            if with_pass:
                fuse_for_vllm(module.graph)
                module.graph.lint()
                module.recompile()
                for node in module.graph.nodes:
                    if node.op == "call_function" and node.target is not operator.getitem:
                        target = node.args[0] if "auto_func" in str(node.target) else node.target
                        names.append(str(target))
            return module

        return compile_graph

    results = []
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        for with_pass in (False, True):
            torch._dynamo.reset()
            backend = aot_autograd(fw_compiler=compiler(with_pass))
            compiled = torch.compile(layer, backend=backend, fullgraph=True)
            with torch.no_grad():
                results.append(compiled(*(x.clone() for x in inputs)))
    return (*results, names)


def check(layer, *inputs, fused):
    before = sum(fusion.fused_so_far().values())
    plain, ours, names = run(layer, *inputs)
    for expected, found in zip(plain, ours, strict=True):
        assert torch.equal(expected, found), (expected - found).abs().max()
    count = sum(fusion.fused_so_far().values()) - before
    assert count == fused, (count, names)
    left = [name for name in names if name.startswith(("_C.", "vllm_ir."))]
    assert bool(left) == (fused == 0), names
    return 1


X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
RESIDUAL = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
WEIGHT = torch.rand(64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16) + 0.5


def fuses_norms():
    count = 0
    for kind in ("int8", "fp8"):

        def layer(x, weight, kind=kind):
            return (quantised(IR.rms_norm(x * 2, weight, EPSILON), kind),)

        count += check(layer, X, WEIGHT, fused=1)

        def add_layer(x, residual, weight, kind=kind):
            y, residual = IR.fused_add_rms_norm(x * 2, residual, weight, EPSILON)
            z = quantised(y, kind)
            return z, residual + z.to(residual.dtype)

        count += check(add_layer, X, RESIDUAL, WEIGHT, fused=1)
    return count


def fuses_a_static_scale():
    def layer(x, weight, scale):
        q = torch.empty(x.shape, dtype=row_quant.FP8)
        C.static_scaled_fp8_quant(q, IR.rms_norm(x, weight, EPSILON), scale, None)
        return (q.float(),)

    return check(layer, X, WEIGHT, torch.tensor([0.03]), fused=1)


def fuses_activations():
    count = 0
    for kind in ("int8", "fp8"):

        def layer(x, kind=kind):
            y = torch.ops.taut.silu_mul(x * 2, 1.0, 0.0, None, False)
            return (quantised(y, kind),)

        count += check(layer, X, fused=1)
    return count


def keeps_the_callers_residual():
    """The residual is a graph input that is read again later: the op must update a copy."""

    def layer(x, residual, weight):
        y, summed = IR.fused_add_rms_norm(x, residual, weight, EPSILON)
        return quantised(y, "int8"), summed * 2, residual * 3

    return check(layer, X, RESIDUAL, WEIGHT, fused=1)


def leaves_a_norm_that_is_read_twice():
    def layer(x, weight):
        y = IR.rms_norm(x, weight, EPSILON)
        return quantised(y, "int8"), y + 1

    return check(layer, X, WEIGHT, fused=0)


def leaves_a_partial_variance():
    def layer(x, weight):
        return (quantised(IR.rms_norm(x, weight, EPSILON, 32), "int8"),)

    return check(layer, X, WEIGHT, fused=0)


def leaves_an_asymmetric_quantisation():
    def layer(x, weight):
        y = IR.rms_norm(x, weight, EPSILON)
        q = torch.empty(y.shape, dtype=torch.int8)
        scales, azp = torch.empty(5, 1), torch.zeros(5, 1, dtype=torch.int32)
        C.dynamic_scaled_int8_quant(q, y, scales, azp)
        return q.float() * scales, azp

    return check(layer, X, WEIGHT, fused=0)


def inductor_compiles_the_fused_graph():
    """As vLLM runs it: after functionalisation, with nothing behind it but Inductor."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph):
            fuse_for_vllm(graph)

        def uuid(self):
            return "fuse_graph"

    def layer(x, residual, weight):
        y, summed = IR.fused_add_rms_norm(x * 2, residual, weight, EPSILON)
        return quantised(y, "int8"), summed * 2, residual * 3

    settings = {"enable_auto_functionalized_v2": False, "fx_graph_cache": False}
    patch = torch._inductor.config.patch(post_grad_custom_post_pass=Pass(), **settings)
    with patch, torch.no_grad():
        residual = RESIDUAL.clone()
        found = torch.compile(layer, fullgraph=True)(X, residual, WEIGHT)
        expected = layer(X, RESIDUAL.clone(), WEIGHT)
    assert fusion.fused_so_far()["norms"] == 1
    assert torch.equal(residual, RESIDUAL)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    return 1


CHECKS = {
    check.__name__: check
    for check in (
        fuses_norms,
        fuses_a_static_scale,
        fuses_activations,
        keeps_the_callers_residual,
        leaves_a_norm_that_is_read_twice,
        leaves_a_partial_variance,
        leaves_an_asymmetric_quantisation,
        inductor_compiles_the_fused_graph,
    )
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(f"{name} {CHECKS[name]()}\n")
