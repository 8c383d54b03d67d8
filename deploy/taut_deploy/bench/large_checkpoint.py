"""A checkpoint of several gigabytes, compressed in less memory than it takes.

Command: ``python -m taut_deploy.bench.large_checkpoint --folder DIR``. It writes a bf16 Llama of
random blocks into ``DIR``, has ``taut compress`` make a checkpoint of it in a process that may hold
only so much, prints what that took, and removes both.

The bound is ``RLIMIT_DATA``, which needs no rights: private memory that may be written, from the
moment it is reserved, files mapped so included. glibc is told to map what is large apart from its
heap, whose holes would count although their pages were given back.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from taut_deploy.files import write_json_atomically

_APART = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
_WORDS = 64
_SPECIAL = ("<s>", "<unk>")
_PLAIN = range(_WORDS - len(_SPECIAL))


@dataclass(frozen=True)
class Sizes:
    """Of a Llama's blocks; as they are, one of 103 MB.

    Attributes:
        width: of the residual stream.
        inner: of the MLP.
        head: of an attention head.
    """

    width: int = 2048
    inner: int = 5632
    head: int = 128

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's linear layers in bf16."""
        return 2 * (4 * self.width**2 + 3 * self.width * self.inner)


LARGE = Sizes()


def write_checkpoint(path: Path, blocks: int, sizes: Sizes = LARGE) -> int:
    """Write a bf16 Llama, a shard for each block; all blocks have the same random weights.

    Its tokenizer knows 62 words, ``w0`` to ``w61``.

    Args:
        path: directory to make.
        blocks: how many.
        sizes: of each.

    Returns:
        Bytes of its weights.
    """
    path.mkdir()
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=blocks,
        num_attention_heads=sizes.width // sizes.head,
        num_key_value_heads=sizes.width // sizes.head,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.save_pretrained(path)
    _write_tokenizer(path)
    torch.manual_seed(0)
    block = _block(sizes)
    index: dict[str, str] = {}
    total = 0
    for number in range(blocks + 1):
        tensors = {f"model.layers.{number}.{name}": one for name, one in block.items()}
        tensors = tensors if number < blocks else _outer(sizes.width)
        shard = path / f"model-{number + 1:05d}-of-{blocks + 1:05d}.safetensors"
        save_file(tensors, shard, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard.name)
        total += sum(one.nbytes for one in tensors.values())
    told = {"metadata": {"total_size": total}, "weight_map": index}
    write_json_atomically(path / "model.safetensors.index.json", told)
    return total


def _block(sizes: Sizes) -> dict[str, torch.Tensor]:
    width, inner = sizes.width, sizes.inner
    square, wide, narrow = (width, width), (inner, width), (width, inner)
    shapes = {f"self_attn.{name}_proj": square for name in "qkvo"}
    shapes |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": narrow}
    block = {f"{name}.weight": _random(*shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return block | {f"{name}.weight": torch.ones(width).bfloat16() for name in norms}


def _outer(width: int) -> dict[str, torch.Tensor]:
    embedding, head = _random(_WORDS, width), _random(_WORDS, width)
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(width).bfloat16(),
    }


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).mul_(columns**-0.5).bfloat16()


def _write_tokenizer(path: Path) -> None:
    words = {word: i for i, word in enumerate((*_SPECIAL, *(f"w{i}" for i in _PLAIN)))}
    first, unknown = _SPECIAL
    core = Tokenizer(models.WordLevel(words, unk_token=unknown))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=first, unk_token=unknown)
    wrapped.save_pretrained(path)


def write_recipe(path: Path, stage: dict[str, Any], sequences: int, length: int) -> Path:
    """Write a recipe of one ``quantize`` stage, calibrated on random words beside it.

    Args:
        path: file to write.
        stage: of its settings.
        sequences: of the calibration.
        length: of each, tokens.
    """
    words = torch.randint(_PLAIN.start, _PLAIN.stop, (2 * sequences * length,)).tolist()
    text = path.with_suffix(".txt")
    text.write_text("\n".join(f"w{word}" for word in words))
    calibration: dict[str, Any] = {"source": "file", "path": str(text)}
    calibration |= {"sequences": sequences, "sequence_length": length}
    stages = [{"method": "quantize", **stage}]
    path.write_text(
        yaml.safe_dump({"name": path.stem, "calibration": calibration, "stages": stages})
    )
    return path


@dataclass(frozen=True)
class Outcome:
    """How a bounded process ended.

    Attributes:
        status: its exit status.
        said: its standard error.
        cpu_s: seconds of CPU, of it and the processes it waited for.
        wall_s: seconds it took.
        resident_bytes: the most it had in memory, pages of files included.
    """

    status: int
    said: str
    cpu_s: float
    wall_s: float
    resident_bytes: int


def run_within(command: Iterable[str], limit_bytes: int) -> Outcome:
    """Run a command that may have only so much private memory.

    Args:
        command: program and arguments.
        limit_bytes: of each of its processes.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        environment = {**os.environ, **_APART}
        process = subprocess.Popen(
            [*command], stdout=subprocess.DEVNULL, stderr=said, env=environment
        )
        # A Python has barely begun by then, and its children inherit the bound.
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return Outcome(
            process.returncode,
            said.read(),
            usage.ru_utime + usage.ru_stime,
            time.monotonic() - started,
            usage.ru_maxrss * 1024,  # Linux counts KiB
        )


def compress_within(model: Path, recipe: Path, output: Path, limit_bytes: int) -> Outcome:
    """Have ``taut compress`` make a checkpoint in a bounded process.

    Args:
        model: directory of the model.
        recipe: file.
        output: checkpoint to make.
        limit_bytes: of memory.
    """
    command = (sys.executable, "-m", "taut_deploy", "compress", str(model))
    arguments = ("--recipe", str(recipe), "--output", str(output))
    return run_within((*command, *arguments), limit_bytes)


def main(arguments: Iterable[str] | None = None) -> int:
    """Write, compress, print, remove; return the exit status of ``taut compress``."""
    asked = _parser().parse_args(None if arguments is None else list(arguments))
    stage = {"scheme": asked.scheme, "algorithm": asked.algorithm}
    if asked.group_size is not None:
        stage["group_size"] = asked.group_size
    with tempfile.TemporaryDirectory(prefix="taut-large-", dir=asked.folder) as name:
        folder = Path(name)
        size = write_checkpoint(folder / "model", asked.blocks)
        recipe = write_recipe(folder / "r.yaml", stage, asked.sequences, asked.sequence_length)
        limit = int(asked.memory_mb * 1e6)
        found = compress_within(folder / "model", recipe, folder / "out", limit)
        shutil.rmtree(folder / "model")
    sys.stdout.write(
        f"{asked.scheme}, {asked.algorithm}: {size / 1e9:.2f} GB in {limit / 1e6:.0f} MB of "
        f"private memory: exit status {found.status}, {found.resident_bytes / 1e6:.0f} MB in "
        f"memory at most with pages of files, {found.cpu_s:.0f} CPU-s, {found.wall_s:.0f} s\n"
        f"{found.said}"
    )
    return found.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="with room for model and result")
    parser.add_argument("--blocks", type=int, default=30, help="of 103 MB each")
    parser.add_argument("--memory-mb", type=float, default=1500)
    parser.add_argument("--scheme", default="FP8")
    parser.add_argument("--algorithm", default="rtn")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    return parser


if __name__ == "__main__":
    sys.exit(main())
