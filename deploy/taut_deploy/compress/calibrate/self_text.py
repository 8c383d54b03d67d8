"""Text that the model writes itself, to calibrate on; what was written is kept for the next recipe.

Source of the idea: LLM-QAT, arXiv:2305.17888, §3.1. Every batch is sampled from a seed of its own
and kept when it is done, so that a run that was cut off goes on with the next one.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from taut_deploy.compress.dense import load_dense
from taut_deploy.compress.job import library_versions
from taut_deploy.errors import ModelError
from taut_deploy.files import sha256_json, write_bytes_atomically
from taut_deploy.models.store import ModelRecord
from taut_deploy.recipe import Calibration

PROMPT_TOKENS = 8
_BATCH = 32


@dataclass(frozen=True)
class Writer:
    """A model that goes on from prompts.

    Args:
        model: its directory and digest.
        cache: directory whose ``self-text`` keeps what was written.
        device: ``cpu`` or ``cuda``.
        trust_remote_code: let the model's own Python code run.
    """

    model: ModelRecord
    cache: Path
    device: str
    trust_remote_code: bool

    def write(self, prompts: torch.Tensor, length: int, seed: int) -> torch.Tensor:
        """Sequences that begin with the prompts, batch by batch.

        Args:
            prompts: [sequences, P] int64.
            length: of the sequences, prompts counted.
            seed: of the sampling.

        Returns:
            [sequences, length] int64.
        """
        network: Any = None
        written = []
        for index, batch in enumerate(torch.split(prompts, _BATCH)):
            kept = self._place(batch, length, seed + index)
            if not kept.is_file():
                network = network or load_dense(
                    Path(self.model.path), self.device, trust_remote_code=self.trust_remote_code
                )
                torch.manual_seed(seed + index)
                buffer = io.BytesIO()
                np.save(buffer, sample(network, batch.to(self.device), length).numpy())
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_bytes_atomically(kept, buffer.getvalue())
            written.append(torch.from_numpy(np.load(kept, allow_pickle=False)))
        return torch.cat(written).contiguous()

    def _place(self, prompts: torch.Tensor, length: int, seed: int) -> Path:
        """The file of one batch, named by everything that its tokens follow from."""
        key = {
            "model": self.model.digest,
            "prompts": prompts.tolist(),
            "length": length,
            "seed": seed,
            "device": self.device,
            "libraries": library_versions(),
        }
        return self.cache / "self-text" / f"{sha256_json(key)}.npy"


@torch.inference_mode()
def sample(network: Any, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """What a model writes after prompts, from its own distribution as it is.

    Args:
        network: a causal LM of transformers.
        prompts: [B, P] int64, on its device.
        length: of the result, prompts counted.

    Returns:
        [B, length] int64 on the CPU.
    """
    ids: torch.Tensor = network.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_length=length,
        max_length=length,
        do_sample=True,
        top_k=0,
        pad_token_id=0,  # never used: every sequence is of full length
    )
    return ids.cpu()


def write_from_start(settings: Calibration, writer: Writer, tokenizer: Any) -> torch.Tensor:
    """Sequences that begin with the start token, [sequences, sequence_length] int64.

    Args:
        settings: how many, how long, and the seed.
        writer: of the sequences.
        tokenizer: the model's.

    Raises:
        ModelError: the tokenizer has no such token.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise ModelError(
            f"{writer.model.path}: the tokenizer has no start token to sample from; "
            "use calibration.source: corpus"
        )
    prompts = torch.full((settings.sequences, 1), int(start))
    return writer.write(prompts, settings.sequence_length, settings.seed)


def write_on(settings: Calibration, writer: Writer, texts: torch.Tensor) -> torch.Tensor:
    """Sequences that go on from a few tokens of other texts, [sequences, sequence_length] int64.

    Args:
        settings: how many, how long, and the seed.
        writer: of the sequences.
        texts: [n, sequence_length] int64, what the prompts are taken from.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    rows = torch.randint(0, len(texts), (settings.sequences, 1), generator=generator)
    last = texts.shape[1] - PROMPT_TOKENS
    starts = torch.randint(0, last + 1, (settings.sequences, 1), generator=generator)
    prompts = texts[rows, starts + torch.arange(PROMPT_TOKENS)]
    return writer.write(prompts, settings.sequence_length, settings.seed)
