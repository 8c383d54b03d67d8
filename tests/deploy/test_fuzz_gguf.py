"""Seeded mutations of GGUF and safetensors headers: a model, or one line within seconds.

``TAUT_FUZZ_CASES`` (default 300) says how many, two thirds of them GGUF.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections import Counter
from pathlib import Path

import pytest
from tiny_gguf import write_gguf
from tiny_models import write_llama

from taut_deploy.compress.source.weights import WeightReader
from taut_deploy.errors import ModelError
from taut_deploy.models.gguf import convert_gguf
from taut_deploy.models.gguf_header import read_header

CASES = int(os.environ.get("TAUT_FUZZ_CASES", "300"))
LONGEST_S = 10.0
# Counts, lengths, types and offsets that readers stumble over.
NUMBERS = (0, 1, 2, 3, 7, 8, 9, 12, 13, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1)
LONG_NUMBERS = (*NUMBERS, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(content: bytes, header: int, chance: random.Random) -> bytes:
    """Change one to three places in the first ``header`` bytes."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(4, max(5, min(header, len(data) - 8)))
        match chance.randrange(6):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at] = chance.randrange(256)
            case 2:
                data[at : at + 4] = struct.pack("<I", chance.choice(NUMBERS))
            case 3:
                data[at : at + 8] = struct.pack("<Q", chance.choice(LONG_NUMBERS))
            case 4:
                del data[at : at + chance.randint(1, 40)]
            case _:
                data[at:at] = data[at : at + chance.randint(1, 40)]
    return bytes(data[: chance.randrange(len(data))] if chance.random() < 0.05 else data)


def header_bytes(file: Path) -> int:
    header = read_header(file)
    return file.stat().st_size - sum(tensor.size for tensor in header.tensors.values())


def attempt(what, *arguments) -> str:
    """What came of it: ``read``, or the beginning of a line; anything else is a failed test."""
    started = time.monotonic()
    try:
        what(*arguments)
        found = "read"
    except ModelError as error:
        assert "\n" not in str(error)
        assert str(arguments[0]) in str(error)
        found = "refused"
    assert time.monotonic() - started < LONGEST_S
    return found


def test_mutated_gguf_headers_become_a_model_or_one_line(tmp_path, record_property):
    plain = write_gguf(tmp_path / "plain.gguf")
    content, header = plain.read_bytes(), header_bytes(plain)
    counts: Counter[str] = Counter()
    for case in range(CASES * 2 // 3):
        chance = random.Random(case)
        file = tmp_path / "t.gguf"
        file.write_bytes(mutate(content, header, chance))
        output = tmp_path / f"out-{case}"
        output.mkdir()
        counts[attempt(convert_gguf, file, output)] += 1
    record_property("outcomes", dict(counts))
    assert counts["refused"] > CASES / 3
    assert counts["read"] > 0


def test_mutated_safetensors_headers_are_read_or_one_line(tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    file = model / "model.safetensors"
    content = file.read_bytes()
    header = 8 + struct.unpack_from("<Q", content)[0]
    counts: Counter[str] = Counter()
    for case in range(CASES // 3):
        data = mutate(b"\0" * 4 + content, 4 + header, random.Random(case))[4:]
        file.write_bytes(data)
        counts[attempt(WeightReader, model)] += 1
    assert counts["refused"] > CASES / 6


def claim(position: str, value: int) -> bytes:
    """A file of a few bytes whose header claims much more."""
    entry = struct.pack("<Q", 1) + b"k"
    kinds = {
        "tensors": struct.pack("<QQ", value, 0),
        "entries": struct.pack("<QQ", 0, value),
        "a key": struct.pack("<QQ", 0, 1) + struct.pack("<Q", value),
        "a string": struct.pack("<QQ", 0, 1) + entry + struct.pack("<IQ", 8, value),
        "an array": struct.pack("<QQ", 0, 1) + entry + struct.pack("<IIQ", 9, 4, value),
        "an array of strings": struct.pack("<QQ", 0, 1) + entry + struct.pack("<IIQ", 9, 8, value),
        "nested arrays": struct.pack("<QQ", 0, 1) + entry + struct.pack("<I", 9) * 10_000,
        "dimensions": struct.pack("<QQ", 1, 0) + entry + struct.pack("<I", value % 2**32),
        "a dimension": struct.pack("<QQ", 1, 0) + entry + struct.pack("<IQIQ", 1, value, 0, 0),
        "an offset": struct.pack("<QQ", 1, 0) + entry + struct.pack("<IQIQ", 1, 32, 0, value),
    }
    return b"GGUF" + struct.pack("<I", 3) + kinds[position] + bytes(64)


POSITIONS = (
    "tensors",
    "entries",
    "a key",
    "a string",
    "an array",
    "an array of strings",
    "nested arrays",
    "dimensions",
    "a dimension",
    "an offset",
)


@pytest.mark.parametrize("value", [2**20, 2**31, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", POSITIONS)
def test_what_a_header_claims_is_not_allocated(position, value, tmp_path):
    import tracemalloc

    file = tmp_path / "t.gguf"
    file.write_bytes(claim(position, value))
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"t\.gguf: not a GGUF that can be read: "):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<IQQ", 1, 0, 0), "version 1; only"),
        (struct.pack(">IQQ", 3, 0, 0), "big endian; only"),
        (struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1), "not UTF-8"),
    ],
)
def test_what_is_not_read_is_said(content, message, tmp_path):
    file = tmp_path / "t.gguf"
    file.write_bytes(b"GGUF" + content + bytes(64))
    with pytest.raises(ModelError, match=message):
        read_header(file)


@pytest.mark.parametrize("alignment", [0, 3, 12, 2**21])
def test_an_alignment_that_cannot_be_is_refused(alignment, tmp_path):
    file = tmp_path / "t.gguf"
    entry = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, alignment)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(64))
    with pytest.raises(ModelError, match=rf"general\.alignment is {alignment}, not a power of two"):
        read_header(file)
