"""Every kind of number that GGUF files hold is read as the numbers it stands for."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tiny_gguf import write_gguf

from taut_deploy.models.store import ModelStore

WIDTH = 256
"""Of rows: K-quants are blocks of so many weights."""
FFN = ("ffn_gate", "ffn_up", "ffn_down")
NAMES = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
# gguf rounds to these itself; by half a step of blocks of 32 whose largest weight is 0.5.
ROUNDED = {
    Kind.F32: 0.0,
    Kind.F16: 0.0,
    Kind.BF16: 0.0,
    Kind.Q8_0: 0.5 / 127 / 2,
    Kind.Q5_0: 0.5 / 16,
    Kind.Q5_1: 1 / 31 / 2,
    Kind.Q4_0: 0.5 / 8,
    Kind.Q4_1: 1 / 15 / 2,
}
# Of these random codes are made; where in a block its fp16 factors are.
FACTORS = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
D = 2.0**-9


def q4_k(block: np.ndarray) -> list[float]:
    """256 weights: d, dmin, eight 6-bit pairs of scale and minimum in 12 bytes, 128 nibbles."""
    packed, codes = block[4:16].tolist(), block[16:].tolist()
    found = []
    for i in range(8):
        if i < 4:
            scale, least = packed[i] & 63, packed[i + 4] & 63
        else:
            scale = packed[i + 4] & 15 | packed[i - 4] >> 6 << 4
            least = packed[i + 4] >> 4 | packed[i] >> 6 << 4
        for j in range(32):
            byte = codes[i // 2 * 32 + j]
            found.append(D * scale * (byte >> 4 if i % 2 else byte & 15) - D * least)
    return found


def q6_k(block: np.ndarray) -> list[float]:
    """256 weights: low nibbles, high pairs of bits, a signed scale for 16, d."""
    low, high = block[:128].tolist(), block[128:192].tolist()
    scales = block[192:208].view(np.int8).tolist()
    found = []
    for i in range(256):
        half, quarter, j = i // 128, i % 128 // 32, i % 32
        nibble = low[half * 64 + quarter % 2 * 32 + j] >> 4 * (quarter // 2) & 15
        pair = high[half * 32 + j] >> 2 * quarter & 3
        found.append(D * scales[i // 16] * ((nibble | pair << 4) - 32))
    return found


def fetched(tmp_path: Path, kind: Kind, raw: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The weights of a model whose FFN is of a kind, as the store keeps them."""

    def change(writer, tensors):
        for name, values in raw.items():
            del tensors[f"blk.0.{name}.weight"]
            writer.add_tensor(f"blk.0.{name}.weight", values, raw_dtype=kind)

    file = write_gguf(
        tmp_path / "tiny.gguf", hidden=WIDTH, intermediate=WIDTH, heads=4, change=change
    )
    record = ModelStore(tmp_path / "store").fetch(str(file))
    tensors = load_file(Path(record.path) / "model.safetensors")
    return {name: tensors[f"model.layers.0.mlp.{NAMES[name]}.weight"] for name in FFN}


@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.name)
def test_what_was_rounded_is_within_half_a_step(kind, tmp_path):
    random = np.random.default_rng(1)
    weights = {name: random.uniform(-0.5, 0.5, (WIDTH, WIDTH)).astype(np.float32) for name in FFN}
    raw = {name: gguf.quants.quantize(value, kind) for name, value in weights.items()}
    for name, found in fetched(tmp_path, kind, raw).items():
        # bf16 keeps 8 bits; factors of blocks are fp16, 11 bits.
        off = (found.float() - torch.from_numpy(weights[name])).abs().max()
        assert off <= ROUNDED[kind] * (1 + 2**-7) + 0.5 * 2**-8 * 1.1


@pytest.mark.parametrize("kind", FACTORS, ids=lambda kind: kind.name)
def test_codes_are_read_as_the_numbers_they_stand_for(kind, tmp_path):
    random = np.random.default_rng(2)
    size, width = gguf.GGML_QUANT_SIZES[kind]
    raw = {}
    for name in FFN:
        blocks = random.integers(0, 256, (WIDTH * WIDTH // size, width), dtype=np.uint8)
        for place in FACTORS[kind]:
            blocks[:, place : place + 2] = np.frombuffer(np.float16(D).tobytes(), np.uint8)
        raw[name] = blocks.reshape(WIDTH, -1)
    by_hand = {Kind.Q4_K: q4_k, Kind.Q6_K: q6_k}.get(kind)
    for name, found in fetched(tmp_path, kind, raw).items():
        expected = torch.from_numpy(gguf.quants.dequantize(raw[name], kind))
        assert expected.std() > 0
        assert torch.equal(found, expected.bfloat16())
        if by_hand is not None:
            row = raw[name][3].reshape(-1, width)
            numbers = torch.tensor([number for block in row for number in by_hand(block)])
            assert torch.equal(found[3], numbers.bfloat16())
