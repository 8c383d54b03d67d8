"""The options of a worker that decide what it compiles: those of ``taut worker`` and ``cache``."""

from dataclasses import dataclass
from typing import Annotated, cast

import typer

from taut_deploy.errors import WorkerError
from taut_deploy.worker import KernelMode, asked_for

KvCacheGib = Annotated[int, typer.Option(min=1, help="CPU only: memory for the KV cache, GiB.")]


@dataclass(frozen=True)
class ContextOptions:
    """How much context a worker holds, and as what."""

    max_model_len: Annotated[int | None, typer.Option(min=16, help="Context in tokens.")] = None
    kv_cache_dtype: Annotated[str, typer.Option(help="KV-cache element type.")] = "auto"


@dataclass(frozen=True)
class KernelOptions:
    """Which of taut's kernels a worker runs."""

    kernels: Annotated[
        str | None, typer.Option(help="require, prefer or off; default by scheme.")
    ] = None
    fused_ops: Annotated[
        bool,
        typer.Option(
            "--fused-ops",
            help="CUDA only: taut's norms and quantising activations in vLLM's graph; the default"
            " for Llama, Mistral and Qwen in W4A16 or 8 bits on a card whose engines were"
            " measured.",
        ),
    ] = False
    no_fused_ops: Annotated[
        bool, typer.Option("--no-fused-ops", help="Leave norms and quantisation to vLLM.")
    ] = False
    decode_attention: Annotated[
        bool,
        typer.Option(
            "--decode-attention",
            help="CUDA only: taut's attention where a batch has one new token a sequence; the"
            " default for Llama, Mistral and Qwen on cards it was measured on.",
        ),
    ] = False
    no_decode_attention: Annotated[
        bool, typer.Option("--no-decode-attention", help="Leave all attention to vLLM.")
    ] = False

    def mode(self) -> KernelMode | None:
        """Return ``--kernels``; None chooses by scheme.

        Raises:
            WorkerError: it is no mode.
        """
        if self.kernels not in {None, "require", "prefer", "off"}:
            raise WorkerError(f"--kernels {self.kernels}: use require, prefer or off")
        return cast("KernelMode | None", self.kernels)

    def fused(self) -> bool | None:
        """Return whether fused ops were asked for; None leaves it to the model and the card.

        Raises:
            WorkerError: asked for and refused.
        """
        return asked_for("fused-ops", given=self.fused_ops, refused=self.no_fused_ops)

    def attention(self) -> bool | None:
        """Return likewise for decode attention.

        Raises:
            WorkerError: asked for and refused.
        """
        return asked_for(
            "decode-attention", given=self.decode_attention, refused=self.no_decode_attention
        )
