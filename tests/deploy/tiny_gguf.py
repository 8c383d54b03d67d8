"""A tiny random Llama as a GGUF file, and as a wheel that carries it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

TOKENS = ["<s>", "<unk>", "Ġ", *(chr(97 + index) for index in range(26)), "ab"]
PACKAGE, VERSION, MEMBER = "taut-tiny-gguf", "0.0.1", "taut_tiny_gguf/tiny.gguf"


def write_gguf(
    path: Path,
    *,
    hidden: int = 32,
    intermediate: int = 64,
    heads: int = 2,
    change: Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None] | None = None,
) -> Path:
    """One block, one key/value head, a byte-level tokenizer of 30 entries, fp32 weights.

    ``change`` may edit the tensors, by name, and add metadata before anything is written.
    """
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(1)
    shapes = {
        "token_embd": (len(TOKENS), hidden),
        "output_norm": (hidden,),
        "output": (len(TOKENS), hidden),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // heads, hidden),
        "blk.0.attn_v": (hidden // heads, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (intermediate, hidden),
        "blk.0.ffn_up": (intermediate, hidden),
        "blk.0.ffn_down": (hidden, intermediate),
    }
    tensors = {
        f"{name}.weight": random.standard_normal(shape).astype(np.float32) * 0.1
        for name, shape in shapes.items()
    }
    if change is not None:
        change(writer, tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, content: bytes) -> Path:
    """A wheel of ``PACKAGE`` with ``content`` as its only data file."""
    stem = f"{PACKAGE.replace('-', '_')}-{VERSION}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel
