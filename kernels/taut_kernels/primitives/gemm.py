"""GEMM as a ladder: ``c = a @ b``, each rung a kernel of its own that adds some ideas.

Maths     c[m, n] = Σ_k a[m, k] · b[k, n]; V4 also act(c + bias): ``relu``, ``silu``, ``gelu`` (erf)
Op        `taut::matmul`
Shapes    a [M, K], b [K, N] bf16|fp16, any strides (``weight.t()`` is read where it lies); bias [N]
          as a → c [M, N] as a, contiguous. M, N, K of 0 are allowed
Rungs     ``v1`` direct: 64×64 tiles, plain pointers, nothing overlapped
          ``v2`` tiled: 128×128, walked in groups for L2, bounds out of the loop
          ``v3`` pipelined: blocks by the copy engine (TMA) stages ahead, persistent programs
          ``v4`` tuned: a measured tile for each shape, K split for small outputs, epilogue
          What each gains is in ``kernels/README.md``, measured by `taut bench kernels primitives`
Layout    TMA needs rows in multiples of 16 bytes; v3 and v4 copy an operand without them once into
          padded rows, and store such a c through pointers
Numerics  fp32 accumulation, one rounding at the store. Split shares are added in a fixed order: the
          same bits from run to run, not from tile to tile
CPU       the reference, in plain torch: the specification of every rung
Limits    forward only; v1 and v2 sm_80 and later, v3 and v4 sm_90 and later
Source    tile order and persistence: the Triton matmul tutorials; split rule: triton_kernels
"""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.launch.autocast import without_autocast
from taut_kernels.launch.op_registration import register_op
from taut_kernels.primitives import gemm_launch, gemm_tiles
from taut_kernels.primitives.gemm_tiles import VERSIONS, GemmTile

DTYPES = (torch.bfloat16, torch.float16)
ACTIVATIONS = ("none", "relu", "silu", "gelu")
_TMA_CAPABILITY = (9, 0)


def matmul_ref(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """Multiply in plain torch: the specification, and the op's CPU implementation.

    Args:
        a: [M, K] floating point; fp64 gives fp64, for gold results.
        b: [K, N] as ``a``.
        bias: [N] or None.
        activation: one of :data:`ACTIVATIONS`.

    Returns:
        [M, N] in the dtype of ``a``.
    """
    accumulator = torch.promote_types(a.dtype, torch.float32)
    c = a.to(accumulator) @ b.to(accumulator)
    if bias is not None:
        c = c + bias.to(accumulator)
    if activation != "none":
        c = getattr(torch.nn.functional, activation)(c)
    return c.to(a.dtype)


def launch(
    version: str,
    tile: GemmTile,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Run a rung with a given tile; what the op does after the look-up, and what tuning calls.

    Args:
        version: one of :data:`VERSIONS`.
        tile: how to cut the work.
        a: [M, K]; none of the sizes 0.
        b: [K, N].
        bias: [N] or None; ``v4`` only.
        activation: one of :data:`ACTIVATIONS`; ``v4`` only.

    Returns:
        [M, N].
    """
    c = launcher.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if version == "v1":
        gemm_launch.launch_direct(tile, a, b, c)
    elif version == "v2":
        gemm_launch.launch_tiled(tile, a, b, c)
    elif version == "v3":
        gemm_launch.launch_tma(tile, a, b, c)
    else:
        gemm_launch.launch_tuned(tile, a, b, bias, activation, c)
    return c


def tile_of(version: str, a: Tensor, b: Tensor) -> GemmTile:
    """Return the tile a call of a rung takes.

    Args:
        version: one of :data:`VERSIONS`.
        a: [M, K], M and K ≥ 1.
        b: [K, N], N ≥ 1.
    """
    fixed = {"v1": gemm_tiles.DIRECT, "v2": gemm_tiles.TILED, "v3": gemm_tiles.PIPELINED}
    if version in fixed:
        return fixed[version]
    return gemm_tiles.lookup(launcher.gpu_name(a.device), a.shape[0], b.shape[1], a.shape[1])


def _launch_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str, version: str
) -> Tensor:
    if 0 in (a.shape[0], a.shape[1], b.shape[1]):
        return matmul_ref(a, b, bias, activation)  # nothing to multiply
    return launch(version, tile_of(version, a, b), a, b, bias, activation)


def _matmul_cpu(a: Tensor, b: Tensor, bias: Tensor | None, activation: str, version: str) -> Tensor:
    del version
    return matmul_ref(a, b, bias, activation)


def _fake_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str, version: str
) -> Tensor:
    del bias, activation, version
    return a.new_empty((a.shape[0], b.shape[1]))


_SCHEMA = "(Tensor a, Tensor b, Tensor? bias, str activation, str version) -> Tensor"
register_op(f"taut::matmul{_SCHEMA}", without_autocast(_matmul_cpu), _launch_matmul, _fake_matmul)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    version: str = "v4",
) -> Tensor:
    """Multiply two matrices.

    Args:
        a: [M, K] bf16 or fp16, any strides.
        b: [K, N] as ``a``, any strides.
        bias: [N] as ``a``, added before the activation, or None; ``v4`` only.
        activation: ``none``, ``relu``, ``silu`` or ``gelu``; ``v4`` only.
        version: the rung, ``v1`` to ``v4``.

    Returns:
        [M, N] in the dtype of ``a``, contiguous.

    Raises:
        ValueError: a shape, dtype, device, option or card the contract does not allow; names the
            argument.
    """
    _check(a, b, bias)
    if version not in VERSIONS:
        raise ValueError(f"version must be one of {', '.join(VERSIONS)}, got {version!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if version != "v4" and (bias is not None or activation != "none"):
        raise ValueError(f"bias and activation need version v4, got {version!r}")
    if version in ("v3", "v4"):
        check_copy_engine(version, a.device, "v2")
    c: Tensor = torch.ops.taut.matmul(a, b, bias, activation, version)
    return c


def check_copy_engine(version: str, device: torch.device, instead: str) -> None:
    """Refuse a rung on a card without TMA.

    Args:
        version: the rung asked for.
        device: where the operands are.
        instead: the best rung such a card runs.

    Raises:
        ValueError: the card's compute capability is below 9.0.
    """
    if device.type == "cuda" and launcher.capability(device) < _TMA_CAPABILITY:
        raise ValueError(f"version {version!r} needs compute capability 9.0 (TMA): use {instead!r}")


def _check(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    if a.dtype not in DTYPES:
        raise ValueError(f"a must be bfloat16 or float16, got {a.dtype}")
    if a.dim() != 2:
        raise ValueError(f"a must have shape [M, K], got {tuple(a.shape)}")
    if b.dim() != 2 or b.shape[0] != a.shape[1]:
        raise ValueError(f"b must have shape [{a.shape[1]}, N], got {tuple(b.shape)}")
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype is not a.dtype or tensor.device != a.device:
            wanted = f"{a.dtype} on {a.device}"
            raise ValueError(f"{name} must be {wanted}, got {tensor.dtype} on {tensor.device}")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{name} requires grad: the op is forward only, use no_grad()")
    if bias is not None and (bias.shape != (b.shape[1],) or bias.stride() != (1,)):
        shape = tuple(bias.shape)
        raise ValueError(f"bias must be contiguous of shape [{b.shape[1]}], got {shape}")
