"""The options of a worker, in groups that ``taut worker`` and ``taut cache`` share."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from taut_deploy.errors import WorkerError
from taut_deploy.recorded_hashes import Verification
from taut_deploy.worker import LOOPBACK, KernelMode, WorkerSpec, asked_for

CompileCache = Annotated[
    Path | None,
    typer.Option(
        envvar="TAUT_COMPILE_CACHE",
        help="Directory of compiled artefacts and verdicts; 'taut cache warm' fills it.",
    ),
]
TuneBudget = Annotated[
    float,
    typer.Option(
        min=0,
        help="CUDA only: seconds to measure 4-bit products that nobody measured on this card;"
        " 'taut tune' does so beforehand.",
    ),
]
Verify = Annotated[
    Verification,
    typer.Option(
        help="recorded reads the files that changed since they were hashed, full reads them all."
    ),
]
KvCacheGib = Annotated[int, typer.Option(min=1, help="CPU only: memory for the KV cache, GiB.")]


@dataclass(frozen=True)
class ApiOptions:
    """Under which name and address a worker answers.

    Args:
        name: Model name on the API; default from the manifest.
        host: IP address to listen on; workers have no keys: gateways only.
        port: TCP port.
    """

    name: str | None = None
    host: str = LOOPBACK
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8101


@dataclass(frozen=True)
class ProcessOptions:
    """How a worker starts and ends.

    Args:
        shutdown_timeout: Seconds SIGTERM lets requests finish.
    """

    shutdown_timeout: Annotated[int, typer.Option(min=0)] = 30
    cache: CompileCache = None
    tune_budget_s: TuneBudget = 20.0
    verify: Verify = "recorded"


@dataclass(frozen=True)
class VerdictOptions:
    """What a checkpoint must have been shown to be.

    Args:
        require_verdict: PASS: refuse a checkpoint without that verdict.
        trust: Public key in PEM that must have signed the verdict.
    """

    require_verdict: str | None = None
    trust: Path | None = None


@dataclass(frozen=True)
class ContextOptions:
    """How much context a worker holds, and as what.

    Args:
        max_model_len: Context in tokens.
        kv_cache_dtype: KV-cache element type.
    """

    max_model_len: Annotated[int | None, typer.Option(min=16)] = None
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class KernelOptions:
    """Which of taut's kernels a worker runs.

    Args:
        kernels: require, prefer or off; default by scheme.
        fused_ops: CUDA only: taut's norms and quantising activations in vLLM's graph; the default
            for Llama, Mistral and Qwen in W4A16 or 8 bits on a card whose engines were measured.
        no_fused_ops: Leave norms and quantisation to vLLM.
        decode_attention: CUDA only: taut's attention where a batch has one new token a sequence;
            the default for Llama, Mistral and Qwen on cards it was measured on.
        no_decode_attention: Leave all attention to vLLM.
    """

    kernels: str | None = None
    fused_ops: Annotated[bool, typer.Option("--fused-ops")] = False
    no_fused_ops: Annotated[bool, typer.Option("--no-fused-ops")] = False
    decode_attention: Annotated[bool, typer.Option("--decode-attention")] = False
    no_decode_attention: Annotated[bool, typer.Option("--no-decode-attention")] = False

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


def worker_spec(
    checkpoint: Path,
    extra: Iterable[str],
    context: ContextOptions,
    kernels: KernelOptions,
    kv_cache_gib: int = 1,
) -> WorkerSpec:
    """What a worker computes and with what, whoever starts it.

    Args:
        checkpoint: or another model directory.
        extra: arguments for vLLM.
        context: how much it holds.
        kernels: which it runs.
        kv_cache_gib: on a CPU, memory for the KV cache.

    Raises:
        WorkerError: an option has a wrong value.
    """
    return WorkerSpec(
        checkpoint=checkpoint,
        max_model_len=context.max_model_len,
        kv_cache_dtype=context.kv_cache_dtype,
        kernels=kernels.mode(),
        fused_ops=kernels.fused(),
        decode_attention=kernels.attention(),
        kv_cache_gib=kv_cache_gib,
        extra=tuple(extra),
    )
