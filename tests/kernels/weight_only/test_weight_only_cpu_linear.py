"""Weights of 4 and 8 bits compiled on the CPU they run on, in each instruction set it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taut_bench import testing
from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.gemm.weight_only.cpu_linear import Isa

_WHY_NOT = cpu_linear.why_not_here()
needs_op = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
_BEST = Isa.AVX2 if _WHY_NOT else cpu_linear.best_isa()
BF16 = torch.bfloat16
every_isa = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(
            isa,
            id=isa.name,
            marks=pytest.mark.skipif(isa > _BEST, reason=f"this CPU has no {isa.name}"),
        )
        for isa in Isa
    ],
)
# bits, with zero points: what the op takes.
KINDS = [(4, False), (4, True), (8, False), (8, True)]
# N, K, groups: whole blocks and parts of one; one, two and three of a tile; several panels.
LAYERS = [
    (576, 1536, 24),
    (16, 32, 1),
    (33, 64, 2),
    (1, 96, 1),
    (100, 160, 5),
    (48, 1152, 1),
    (80, 2048, 8),
]


class Case:
    """A layer with activations: x [M, K] bf16, codes [N, K], scale and zero [N, G], bias [N]."""

    def __init__(
        self, M: int, N: int, K: int, groups: int, bits: int, *, zeros: bool, bias: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(M + N + K)
        half = 1 << (bits - 1)

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)

        self.x = torch.randn(M, K, generator=generator).bfloat16()
        self.codes, self.bits = codes(N, K), bits
        self.scale = ((2 * torch.rand(N, groups, generator=generator) - 1) / half).bfloat16()
        self.zero = codes(N, groups) if zeros else None
        self.bias = torch.randn(N, generator=generator).bfloat16() if bias else None

    def multiply(self, isa: Isa, x: torch.Tensor | None = None) -> torch.Tensor:
        packed = cpu_linear.pack(self.codes, self.scale, self.zero, self.bits)
        y: torch.Tensor = torch.ops.taut.weight_only_linear_cpu(
            self.x if x is None else x, *packed, self.bias, len(self.codes), int(isa)
        )
        return y

    def reference(self, dtype: torch.dtype = BF16) -> torch.Tensor:
        layer = (self.codes, self.scale, self.zero, self.bias)
        return cpu_linear.weight_only_linear_cpu_ref(self.x.to(dtype), *layer)

    def require_right(self, actual: torch.Tensor) -> None:
        testing.assert_within_budget(actual, self.reference(torch.float64), self.reference())


@needs_op
@every_isa
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
@pytest.mark.parametrize("M", [1, 2, 3, 5, 8, 16, 17, 40])
@pytest.mark.parametrize(("N", "K", "groups"), LAYERS)
def test_matches_reference(
    N: int, K: int, groups: int, M: int, bits: int, zeros: bool, isa: Isa
) -> None:
    case = Case(M, N, K, groups, bits, zeros=zeros, bias=N % 2 == 0)
    case.require_right(case.multiply(isa))


@needs_op
@every_isa
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
def test_every_code_is_multiplied_as_the_number_it_is(bits: int, zeros: bool, isa: Isa) -> None:
    """The identity reads the weights out: code - zero of every pair, at every place in a word."""
    half, K = 1 << (bits - 1), 32
    every = torch.arange(-half, half, dtype=torch.int8)
    zero = every[:, None] if zeros else None
    N = len(every)
    codes = torch.stack([every.roll(n)[torch.arange(K) % N] for n in range(N)])
    packed = cpu_linear.pack(codes, torch.ones(N, 1, dtype=BF16), zero, bits)
    x = torch.eye(K, dtype=BF16)
    y = torch.ops.taut.weight_only_linear_cpu(x, *packed, None, N, int(isa))
    exact = codes.float() - (0 if zero is None else zero.float())
    assert torch.equal(y.float().T, exact)


@needs_op
@every_isa
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
def test_adversarial_values(bits: int, zeros: bool, isa: Isa) -> None:
    case = Case(6, 48, 128, 4, bits, zeros=zeros)
    case.x[0], case.x[1] = 0, -0.0
    case.x[2, 7] = 1e20
    case.x[3] = 2.0**-90
    case.x[4, 5] = float("nan")
    case.x[5] = 3e38 / 256 / 32  # a group of the widest differences of codes, summed
    case.scale[3] = 2.0**-126
    actual, gold, reference = case.multiply(isa), case.reference(torch.float64), case.reference()
    for row in (0, 1, 2, 3, 5):
        testing.assert_within_budget(actual[row], gold[row], reference[row])
    assert not actual[:2].any()
    assert actual[4].isnan().all() and not actual[[0, 1, 2, 3, 5]].isnan().any()


@needs_op
@every_isa
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
def test_what_a_code_of_zero_multiplies_does_not_count(bits: int, zeros: bool, isa: Isa) -> None:
    """Not even an outlier beside which all else vanishes, though its group has other codes."""
    case = Case(2, 16, 64, 1, bits, zeros=zeros)
    case.codes[:, 9] = 0 if case.zero is None else case.zero[:, 0]
    expected = case.multiply(isa)
    case.x[:, 9] = 1e20
    assert torch.equal(case.multiply(isa), expected)


@needs_op
@every_isa
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
def test_rows_do_not_depend_on_their_neighbours_or_the_number_of_threads(
    bits: int, zeros: bool, isa: Isa
) -> None:
    case = Case(33, 960, 576, 9, bits, zeros=zeros)
    whole = case.multiply(isa)
    # AMX leaves one or two rows to AVX-512.
    some = 3 if isa is Isa.AMX else 1
    alone = torch.cat([case.multiply(isa, rows) for rows in case.x.split(some)])
    assert torch.equal(whole, alone)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(whole, case.multiply(isa))
    finally:
        torch.set_num_threads(threads)


@needs_op
@every_isa
def test_no_rows_are_no_results(isa: Isa) -> None:
    case = Case(0, 32, 64, 1, 4, zeros=False)
    assert case.multiply(isa).shape == (0, 32)


@needs_op
def test_op_is_traced_with_the_shape_it_returns() -> None:
    case = Case(3, 24, 64, 2, 4, zeros=True, bias=True)
    packed = cpu_linear.pack(case.codes, case.scale, case.zero, 4)
    operands = (case.x, *packed, case.bias, 24, int(Isa.AVX2))
    torch.library.opcheck(torch.ops.taut.weight_only_linear_cpu.default, operands)


@needs_op
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64)}, "x must be"),
        ({"x": torch.zeros(64, 3, dtype=BF16).T}, "x must be"),
        ({"x": torch.zeros(3, 96, dtype=BF16)}, "weight is not packed for 24 outputs of 96 inputs"),
        ({"N": 40}, "weight is not packed for 40 outputs of 64 inputs"),
        ({"scale": torch.zeros(2, 4, 16, dtype=BF16)}, "groups of a multiple of 32"),
        ({"zero": torch.zeros(2, 1, 16, dtype=torch.int8)}, "zero must be as scale"),
        ({"bias": torch.zeros(23, dtype=BF16)}, "bias must have 24 elements"),
    ],
)
def test_op_refuses_operands_it_would_misread(change: dict[str, Any], message: str) -> None:
    case = Case(3, 24, 64, 2, 4, zeros=True, bias=True)
    weight, scale, zero = cpu_linear.pack(case.codes, case.scale, case.zero, 4)
    good = {"x": case.x, "weight": weight, "scale": scale, "zero": zero, "bias": case.bias}
    arguments = good | {"N": 24, "isa": int(Isa.AVX2)}
    assert torch.ops.taut.weight_only_linear_cpu(**arguments).shape == (3, 24)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.taut.weight_only_linear_cpu(**arguments | change)


CODES, SCALE = torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 2, dtype=BF16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CODES.float(), SCALE, None, 4), r"codes must be \[N, K\] int8"),
        ((CODES + 8, SCALE, None, 4), r"codes must lie in -8\.\.7"),
        ((CODES, SCALE.float(), None, 4), r"scale must be \[4, G\] bf16"),
        ((CODES, SCALE[:3], None, 4), r"scale must be \[4, G\] bf16"),
        ((CODES, SCALE.repeat(1, 2), None, 4), "4 groups of 64 input features"),
        ((CODES, SCALE, None, 3), "codes of 3 bits"),
        ((CODES, SCALE, torch.zeros(4, 1, dtype=torch.int8), 4), r"zero must be int8 \(4, 2\)"),
        ((CODES, SCALE, torch.zeros(4, 2, dtype=torch.int8) - 9, 4), r"zero must lie in -8\.\.7"),
        ((CODES, SCALE, torch.zeros(4, 1, dtype=torch.int8), 8), r"zero must be int8 \(4, 2\)"),
    ],
)
def test_pack_refuses_what_the_op_cannot_multiply(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu_linear.pack(*arguments)


def test_less_is_used_where_torch_or_onednn_are_held_to_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert cpu_linear.best_isa() is Isa.AMX
    for named, isa in {"AVX512_CORE_BF16": Isa.AVX512, "avx512_core_amx": Isa.AMX}.items():
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", named)
        assert cpu_linear.best_isa() is isa
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    assert cpu_linear.best_isa() is Isa.AVX512
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert cpu_linear.best_isa() is Isa.AVX2
