"""What a worker is to be: the settings of one vLLM process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taut_deploy.errors import WorkerError
from taut_deploy.recorded_hashes import Verification

Platform = Literal["cpu", "cuda"]
KernelMode = Literal["require", "prefer", "off"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start.

    Args:
        checkpoint: taut checkpoint, store model or plain HF directory.
        name: model name on the API; None takes the manifest's.
        host: IP address to listen on. Loopback unless told: a worker has no keys and no limits, so
            where it listens on more, the network must keep everybody but gateways away.
        port: TCP port.
        max_model_len: context in tokens; None takes the manifest's.
        kv_cache_dtype: KV-cache element type.
        kernels: ``require``, ``prefer`` or ``off``; None chooses by scheme.
        fused_ops: run taut's norms and activations, with quantisation in them, inside vLLM's
            compiled graph; None: where :func:`default_kernels.suits_fused_ops` finds that they suit
            the model and ``extra``, and engines were measured on the card.
        decode_attention: run taut's attention where a batch has one new token a sequence; None:
            where :func:`default_kernels.suits_decode_attention` finds that it suits them, and the
            card was measured.
        kv_cache_gib: CPU only, memory for the KV cache in GiB.
        shutdown_timeout_s: how long SIGTERM lets running requests finish, seconds.
        cache: directory of compiled artefacts (see :mod:`taut_deploy.cache`); None leaves them
            where vLLM puts them.
        tune_budget_s: CUDA only, seconds in which 4-bit products that nobody measured on this card
            are measured before vLLM starts; 0 leaves them to vLLM.
        require_verdict: verdict that the checkpoint's manifest must hold; None asks for none.
        trust: public key that must have signed it; None believes the manifest.
        verification: ``full`` reads every file of the checkpoint before vLLM starts, ``recorded``
            those that changed since they were hashed.
        extra: further vLLM arguments, passed on as they are.
    """

    checkpoint: Path
    name: str | None = None
    host: str = LOOPBACK
    port: int = 8101
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    kernels: KernelMode | None = None
    fused_ops: bool | None = None
    decode_attention: bool | None = None
    kv_cache_gib: int = 1
    shutdown_timeout_s: int = 30
    cache: Path | None = None
    tune_budget_s: float = 20.0
    require_verdict: str | None = None
    trust: Path | None = None
    verification: Verification = "recorded"
    extra: tuple[str, ...] = ()


def asked_for(option: str, *, given: bool, refused: bool) -> bool | None:
    """Return what a field of a :class:`WorkerSpec` that may be left open is to be.

    Two flags, not one with two names: their column would cut other options' names in ``--help``.

    Args:
        option: its name without dashes, for example ``fused-ops``.
        given: whether ``--<option>`` was given.
        refused: whether ``--no-<option>`` was given.

    Raises:
        WorkerError: both were.
    """
    if given and refused:
        raise WorkerError(f"--{option} and --no-{option}: give one of them")
    return True if given else False if refused else None
