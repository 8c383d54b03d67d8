"""Run by test_fusion.py: the pass on graphs of AOTAutograd, with stand-ins for vLLM's ops on CPU.

In its own process, since vLLM's real ops of these names would clash. Each check compiles a layer
twice, with and without the pass, and compares the results; it prints how many layers those were.
"""

import operator
import sys

import torch
from torch._dynamo.backends.common import aot_autograd

from taut_kernels import fuse_for_vllm
from taut_kernels.norm import rms_norm
from taut_kernels.rowwise import row_quant
from taut_kernels.vllm_plugin import fusion

EPSILON = 1e-5


def define(name, schema, implementation, fake):
    torch.library.define(name, schema)
    torch.library.impl(name, "CPU", implementation)
    torch.library.register_fake(name, fake)


def quantise_int8(result, input, scale, azp):
    q, s = row_quant.quantize_rows_ref(input.flatten(0, -2), torch.int8)
    result.copy_(q.view(input.shape))
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


def attention(q, output):
    output.copy_(q * 0.5)


def nothing(*_):
    return None


define("vllm_test::attention", "(Tensor q, Tensor(a!) output) -> ()", attention, nothing)
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


def check(layer, *inputs, left=(), **fused):
    """Expect these counts of what is fused, and these ops of vLLM in the graph then."""
    before = fusion.fused_so_far()
    plain, ours, names = run(layer, *inputs)
    for expected, found in zip(plain, ours, strict=True):
        assert torch.equal(expected, found), (expected - found).abs().max()
    counts = {name: n - before[name] for name, n in fusion.fused_so_far().items()}
    assert {name: n for name, n in counts.items() if n} == fused, (counts, names)
    found = [name.removesuffix(".default") for name in names if name.startswith(("_C.", "vllm_ir"))]
    assert found == list(left), names
    return 1


X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
RESIDUAL = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
WEIGHT = torch.rand(64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16) + 0.5


def fuses_norms():
    count = 0
    for kind in ("int8", "fp8"):

        def layer(x, weight, kind=kind):
            return (quantised(IR.rms_norm(x * 2, weight, EPSILON), kind),)

        count += check(layer, X, WEIGHT, norms=1)

        def add_layer(x, residual, weight, kind=kind):
            y, residual = IR.fused_add_rms_norm(x * 2, residual, weight, EPSILON)
            z = quantised(y, kind)
            return z, residual + z.to(residual.dtype)

        count += check(add_layer, X, RESIDUAL, WEIGHT, norms=1)
    return count


def fuses_a_static_scale():
    def layer(x, weight, scale):
        q = torch.empty(x.shape, dtype=row_quant.FP8)
        C.static_scaled_fp8_quant(q, IR.rms_norm(x, weight, EPSILON), scale, None)
        return (q.float(),)

    return check(layer, X, WEIGHT, torch.tensor([0.03]), norms=1)


def fuses_activations():
    count = 0
    for kind in ("int8", "fp8"):

        def layer(x, kind=kind):
            y = torch.ops.taut.silu_mul(x * 2, 1.0, 0.0, None, False)
            return (quantised(y, kind),)

        count += check(layer, X, activations=1)
    return count


def keeps_the_callers_residual():
    """The residual is a graph input that is read again later: the op must update a copy."""

    def layer(x, residual, weight):
        y, summed = IR.fused_add_rms_norm(x, residual, weight, EPSILON)
        return quantised(y, "int8"), summed * 2, residual * 3

    return check(layer, X, RESIDUAL, WEIGHT, norms=1)


def replaces_quantisations_with_nothing_to_fuse():
    """Of a graph's input, of what a mutating op wrote, of cut rows; in fp8 and int8."""
    count = 0
    for kind in ("int8", "fp8"):

        def plain(x, kind=kind):
            return (quantised(x, kind),)

        count += check(plain, X, quantisations=1)
        count += check(plain, X.half(), quantisations=1)
        count += check(plain, X.float(), quantisations=1)

        def behind_attention(q, kind=kind):
            output = torch.empty(q.shape[0], 8, 8, dtype=q.dtype)
            torch.ops.vllm_test.attention(q.view(-1, 8, 8), output)
            return quantised(output.view(-1, 64), kind), output * 2

        count += check(behind_attention, X, quantisations=1)

        def cut(x, kind=kind):
            return (quantised(x[:, 16:48], kind),)

        count += check(cut, X, quantisations=1)

        def two(x, kind=kind):
            return quantised(x, kind) + quantised(x * 2, kind), quantised(x, kind)

        count += check(two, X, quantisations=3)
    return count


def replaces_for_every_number_of_tokens():
    """With a symbolic number of rows, as vLLM compiles."""

    def layer(x):
        return (quantised(x + 1, "fp8"),)

    torch._dynamo.mark_dynamic(x := X.clone(), 0)
    seen = []

    def compile_graph(module, _):
        fuse_for_vllm(module.graph)
        module.graph.lint()
        module.recompile()
        for node in module.graph.nodes:
            if node.target is torch.ops.taut.row_quant.default:
                assert [value.dtype for value in node.meta["val"]] == [row_quant.FP8, torch.float32]
                seen.append(node.meta["val"][0].shape[0])
        return module

    torch._dynamo.reset()
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False), torch.no_grad():
        compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=compile_graph))
        for rows in (x, X.repeat(3, 1)):
            assert torch.equal(compiled(rows)[0], layer(rows)[0])
    assert len(seen) == 1
    assert isinstance(seen[0], torch.SymInt)
    return 1


def leaves_a_norm_that_is_read_twice():
    """It stays vLLM's; its quantisation alone is ours."""

    def layer(x, weight):
        y = IR.rms_norm(x, weight, EPSILON)
        return quantised(y, "int8"), y + 1

    return check(layer, X, WEIGHT, quantisations=1, left=["vllm_ir.rms_norm"])


def leaves_quantisations_that_ours_cannot_do():
    def static(x):
        return (quantised(x, "static"),)

    def by_columns(x):
        return (quantised(x.t(), "int8"),)

    def in_three_dimensions(x):
        q = torch.empty(x.shape, dtype=torch.int8)
        C.dynamic_scaled_int8_quant(q, x, scales := torch.empty(40, 1), None)
        return q.float(), scales

    def bounded(x):
        q, scales = torch.empty(x.shape, dtype=row_quant.FP8), torch.empty(5, 1)
        C.dynamic_per_token_scaled_fp8_quant(q, x, scales, torch.full((), 1e3))
        return (q.float() * scales,)

    int8, fp8 = "_C.dynamic_scaled_int8_quant", "_C.dynamic_per_token_scaled_fp8_quant"
    count = check(static, X, left=["_C.static_scaled_fp8_quant"])
    count += check(by_columns, X, left=[int8])
    count += check(in_three_dimensions, X.view(5, 8, 8), left=[int8])
    count += check(lambda x: (quantised(x, "fp8"),), X.double(), left=[fp8])
    wide = X[:, :1].expand(5, 262145).contiguous()
    count += check(lambda x: (quantised(x, "fp8"),), wide, left=[fp8])
    return count + check(bounded, X, left=[fp8])


def leaves_a_partial_variance():
    def layer(x, weight):
        return (quantised(IR.rms_norm(x, weight, EPSILON, 32), "int8"),)

    return check(layer, X, WEIGHT, quantisations=1, left=["vllm_ir.rms_norm"])


def leaves_an_asymmetric_quantisation():
    def layer(x, weight):
        y = IR.rms_norm(x, weight, EPSILON)
        q = torch.empty(y.shape, dtype=torch.int8)
        scales, azp = torch.empty(5, 1), torch.zeros(5, 1, dtype=torch.int32)
        C.dynamic_scaled_int8_quant(q, y, scales, azp)
        return q.float() * scales, azp

    left = ["vllm_ir.rms_norm", "_C.dynamic_scaled_int8_quant"]
    return check(layer, X, WEIGHT, left=left)


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
        alone = quantised(summed * 2, "fp8")
        return quantised(y, "int8"), summed * 2, residual * 3, alone

    settings = {"enable_auto_functionalized_v2": False, "fx_graph_cache": False}
    patch = torch._inductor.config.patch(post_grad_custom_post_pass=Pass(), **settings)
    with patch, torch.no_grad():
        residual = RESIDUAL.clone()
        found = torch.compile(layer, fullgraph=True)(X, residual, WEIGHT)
        expected = layer(X, RESIDUAL.clone(), WEIGHT)
    assert fusion.fused_so_far() == {"norms": 1, "activations": 0, "quantisations": 1}
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
        replaces_quantisations_with_nothing_to_fuse,
        replaces_for_every_number_of_tokens,
        leaves_quantisations_that_ours_cannot_do,
        leaves_a_norm_that_is_read_twice,
        leaves_a_partial_variance,
        leaves_an_asymmetric_quantisation,
        inductor_compiles_the_fused_graph,
    )
}


def main(names):
    for name in names:
        sys.stdout.write(f"{name} {CHECKS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
