"""Forms of the loss kernels compiled ahead of time: every tile a table or the rule names.

The vocabularies stand for the ways a row is cut: one step, GPT-2's, which divides by nothing,
Llama-2's, Llama-3's and Gemma-2's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taut_kernels.launch.variant import KernelVariant
from taut_kernels.loss import block_softmax, cross_entropy_ring, gradient_scale, row_weights
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.loss.cross_entropy_kernel import cross_entropy_kernel
from taut_kernels.loss.cross_entropy_ring_kernel import cross_entropy_ring_kernel
from taut_kernels.loss.divergence import FORMS
from taut_kernels.loss.divergence_kernel import divergence_kernel
from taut_kernels.loss.row_weights_kernel import row_weights_kernel, weighted_sum_kernel
from taut_kernels.loss.scale_kernel import scale_kernel
from taut_kernels.loss.tiles import LossTile, RingTile, launch_options
from taut_kernels.loss.vocabulary_block_kernel import block_gradient_kernel, block_statistics_kernel

VOCABULARIES = (1000, 32000, 50257, 128256, 256000)
SOFTMAX_COLUMNS = (24576, 131072, 262144)
BLOCK_COLUMNS = (1024, 2048, 3584, 8192)
_STATE = ("maximum_ptr", "sums_ptr", "z_target_ptr", "z_sums_ptr")


def _tiles(op: str, V: int) -> dict[LossTile, None]:
    """Return the distinct tiles of one op and vocabulary, of the rule and of every card's table."""
    tables = tiles_loss.tables().values()
    measured = [table.tiles[op, V] for table in tables if (op, V) in table.tiles]
    return dict.fromkeys((tiles_loss.rule(op, V), *measured))


def _cross_entropy(
    form: str, element: str, V: int, tile: LossTile, *, extras: bool = False, strided: bool = False
) -> KernelVariant:
    """Describe ``loss``, ``loss and gradient``, or ``gradient`` from a given lse."""
    pointers = {"logits_ptr": element, "target_ptr": "i64", "loss_ptr": "fp32", "lse_ptr": "fp32"}
    constants: dict[str, Any] = {"V": V, "HAS_LSE": form == "gradient", "STRIDED": strided}
    constants |= {"HAS_SMOOTHING": extras, "HAS_SOFTCAP": extras}
    constants |= {"BLOCK": tile.block, "STAGES": tile.stages}
    if form == "loss":
        constants |= {"scale_ptr": None, "grad_ptr": None}
    else:
        pointers |= {"scale_ptr": "fp32", "grad_ptr": element}
    strides = ("stride_b", "stride_t", "stride_gb", "stride_gt")
    marks = ("+" if extras else "") + (" strided" if strided else "")
    return KernelVariant(
        label=f"cross_entropy{marks} {form} {element} V={V}",
        kernel=cross_entropy_kernel,
        tile=tile,
        pointers=pointers,
        integers=("T", *strides, "stride_n", "ignore_index"),
        divisible_by_16=strides if V % 16 == 0 else (),
        constants=constants,
        floats=("label_smoothing", "z_loss", "softcap"),
        options=launch_options(tile.num_warps),
    )


def _rings(V: int) -> dict[RingTile, None]:
    """Return the distinct rings of one vocabulary, of the rule and of every card's table."""
    found = [table.rings.get(V) for table in tiles_loss.tables().values()]
    return dict.fromkeys(tile for tile in (tiles_loss.ring_rule(V), *found) if tile)


def _ring(
    V: int,
    tile: RingTile,
    *,
    batched: bool = False,
    softmax: bool = False,
    element: str = "bf16",
) -> KernelVariant:
    pointers = {"logits_ptr": element, "grad_ptr": element}
    constants = cross_entropy_ring.launch_constants(tile, V, batched=batched)
    optional = {"cells_ptr": None if tile.parts == 1 else "i64"}
    optional |= {"target_ptr": None if softmax else "i64"}
    optional |= dict.fromkeys(("scale_ptr", "loss_ptr", "lse_ptr"), None if softmax else "fp32")
    pointers |= {name: element for name, element in optional.items() if element}
    constants |= dict.fromkeys(name for name, element in optional.items() if not element)
    mark = " batched" if batched else ""
    strides = ("stride_b", "stride_t", "stride_gb", "stride_gt")
    return KernelVariant(
        label=f"{'softmax' if softmax else 'cross_entropy'}_ring{mark} {element} V={V}",
        kernel=cross_entropy_ring_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", "T", *strides, "ignore_index"),
        divisible_by_16=strides,
        constants=constants,
        floats=("z_loss",),
        options=cross_entropy_ring.launch_options(tile),
        targets=("sm_90",),
    )


def _every_ring() -> Iterator[KernelVariant]:
    measured = (V for table in tiles_loss.tables().values() for V in table.rings)
    for V in dict.fromkeys((*VOCABULARIES, *measured)):
        if V >= cross_entropy_ring.MIN_COLUMNS and V % 16 == 0:
            yield from (_ring(V, tile) for tile in _rings(V))
    for V in SOFTMAX_COLUMNS:
        for element in ("bf16", "fp16"):
            yield from (_ring(V, tile, softmax=True, element=element) for tile in _rings(V))
    yield from (_ring(32000, tile, batched=True) for tile in _rings(32000))


def _around() -> Iterator[KernelVariant]:
    tile = f"{row_weights.BLOCK}/{row_weights.NUM_WARPS}w"
    options = launch_options(row_weights.NUM_WARPS)
    yield KernelVariant(
        label="row_weights",
        kernel=row_weights_kernel,
        tile=tile,
        pointers={"target_ptr": "i64", "weights_ptr": "fp32"},
        integers=("M", "ignore_index"),
        divisible_by_16=(),
        constants={"MEAN": True, "BLOCK": row_weights.BLOCK},
        options=options,
    )
    yield KernelVariant(
        label="weighted_sum",
        kernel=weighted_sum_kernel,
        tile=tile,
        pointers=dict.fromkeys(("losses_ptr", "weights_ptr", "loss_ptr"), "fp32"),
        integers=("M",),
        divisible_by_16=(),
        constants={"BLOCK": row_weights.BLOCK},
        options=options,
    )


def _divergence(form: str, gradient: bool, V: int, tile: LossTile) -> KernelVariant:
    pointers = {"student_ptr": "bf16", "teacher_ptr": "bf16", "keep_ptr": "i8", "loss_ptr": "fp32"}
    constants: dict[str, Any] = {"V": V, "FORM": form, "BLOCK": tile.block, "STAGES": tile.stages}
    if gradient:
        pointers |= {"scale_ptr": "fp32", "grad_ptr": "bf16"}
    else:
        constants |= {"scale_ptr": None, "grad_ptr": None}
    strides = ("stride_sm", "stride_tm", "stride_gm")
    return KernelVariant(
        label=f"divergence {form}{' and gradient' if gradient else ''} V={V}",
        kernel=divergence_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", *strides),
        divisible_by_16=strides if V % 16 == 0 else (),
        constants=constants,
        floats=("temperature", "beta"),
        options=launch_options(tile.num_warps),
    )


def _blocks(columns: int, extras: bool) -> Iterator[KernelVariant]:
    block, num_warps = block_softmax.block_options(columns)
    shared: dict[str, Any] = {"HAS_SMOOTHING": extras, "HAS_SOFTCAP": extras, "BLOCK": block}
    shared["COLUMNS"] = columns
    options = launch_options(num_warps)
    tile, mark = f"{block}/{num_warps}w", "+" if extras else ""
    yield KernelVariant(
        label=f"block_statistics{mark} bf16",
        kernel=block_statistics_kernel,
        tile=tile,
        pointers={"logits_ptr": "bf16", "target_ptr": "i64"} | dict.fromkeys(_STATE, "fp32"),
        integers=("stride_m", "start"),
        divisible_by_16=("stride_m",),
        constants=shared,
        floats=("softcap",),
        options=options,
    )
    rows = {"target_ptr": "i64", "scale_ptr": "fp32", "lse_ptr": "fp32"}
    yield KernelVariant(
        label=f"block_gradient{mark} bf16",
        kernel=block_gradient_kernel,
        tile=tile,
        pointers={"logits_ptr": "bf16", "grad_ptr": "bf16"} | rows,
        integers=("stride_m", "stride_gm", "start", "ignore_index"),
        divisible_by_16=("stride_m", "stride_gm"),
        constants=shared | {"V": 256000},
        floats=("label_smoothing", "z_loss", "softcap"),
        options=options,
    )


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every specialisation of the loss kernels that is compiled ahead of time."""
    for V in VOCABULARIES:
        for tile in _tiles("cross_entropy", V):
            yield _cross_entropy("loss and gradient", "bf16", V, tile)
    V = 128256
    for tile in _tiles("cross_entropy", V):
        yield _cross_entropy("loss and gradient", "bf16", V, tile, extras=True)
        yield _cross_entropy("loss and gradient", "fp32", V, tile, extras=True)
        yield _cross_entropy("loss", "bf16", V, tile)
        yield _cross_entropy("gradient", "fp16", V, tile)
    yield from _every_ring()
    yield from _around()
    scalar = tiles_loss.SCALAR_LOADS
    yield _cross_entropy("loss and gradient", "bf16", V, scalar, strided=True)
    for form in FORMS:
        for tile in _tiles("divergence", V):
            yield _divergence(form, True, V, tile)
    for V in (1000, 50257, 256000):
        for tile in _tiles("divergence", V):
            yield _divergence("jsd", True, V, tile)
    yield _divergence("forward_kl", False, 128256, tiles_loss.rule("divergence", 128256))
    for columns in BLOCK_COLUMNS:
        yield from _blocks(columns, extras=columns == 2048)
    yield KernelVariant(
        label="scale bf16",
        kernel=scale_kernel,
        tile=f"{gradient_scale.BLOCK}/{gradient_scale.NUM_WARPS}w",
        pointers={"x_ptr": "bf16", "factor_ptr": "fp32"},
        integers=("n",),
        divisible_by_16=("n",),
        constants={"BLOCK": gradient_scale.BLOCK},
        options=launch_options(gradient_scale.NUM_WARPS),
    )
