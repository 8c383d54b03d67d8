"""A GGUF in several files is the model that its whole file is, or one line says what is amiss."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file
from tiny_gguf import write_gguf

from taut_deploy.errors import ModelError
from taut_deploy.models.store import ModelStore

GROUPS = [("token_embd", "output"), ("attn",), ("ffn",)]


def part_of(number: int, *, tensors=(), count: int = 3, total: int = 12, says=None):
    """A change that leaves one part of the tiny model: the tensors whose names begin so."""

    def change(writer, found):
        writer.add_uint16("split.no", number if says is None else says)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total)
        kept = GROUPS[number]
        for name in list(found):
            plain = name.removeprefix("blk.0.")
            if not plain.startswith(kept) and name not in tensors:
                del found[name]

    return change


def write_parts(folder, **first):
    """Three files of one model; ``first`` changes the first of them."""
    folder.mkdir(exist_ok=True)
    return [
        write_gguf(
            folder / f"Tiny-{number + 1:05}-of-00003.gguf",
            change=part_of(number, **(first if number == 0 else {})),
        )
        for number in range(3)
    ]


@pytest.mark.parametrize("given", [0, 2])
def test_any_part_stands_for_the_whole(given, tmp_path):
    whole = ModelStore(tmp_path / "one").fetch(str(write_gguf(tmp_path / "tiny.gguf")))
    parts = write_parts(tmp_path / "parts")
    record = ModelStore(tmp_path / "split").fetch(str(parts[given]))
    assert record.name == "tiny"
    assert record.digest == whole.digest, "configuration, tokenizer and weights to the byte"
    files = [sorted(load_file(f"{one.path}/model.safetensors")) for one in (whole, record)]
    assert files[0] == files[1]
    assert not list((tmp_path / "split").rglob("*.gguf"))


def test_a_changed_part_makes_another_source(tmp_path):
    store, parts = ModelStore(tmp_path / "s"), write_parts(tmp_path / "parts")
    first = store.fetch(str(parts[0])).source
    write_gguf(parts[2], change=lambda w, t: (part_of(2)(w, t), t["blk.0.ffn_up.weight"].fill(1)))
    with pytest.raises(ModelError, match="--force"):
        store.fetch(str(parts[0]))
    assert store.fetch(str(parts[0]), force=True).source != first


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda parts: parts[1].unlink(), r"Tiny-00002-of-00003\.gguf: is missing; fetch all 3"),
        (
            lambda parts: write_gguf(parts[1], change=part_of(1, says=2)),
            r"Tiny-00002-of-00003\.gguf: says it is part 3 of 3",
        ),
        (
            lambda parts: write_gguf(parts[1], change=part_of(1, tensors=("output.weight",))),
            r"00002-of-00003\.gguf: holds the tensor output\.weight, which .*00001-of-00003\.gguf",
        ),
        (
            lambda parts: write_gguf(parts[0], change=part_of(0, total=13)),
            r"split\.tensors\.count is 13, its parts hold 12",
        ),
        (
            lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-64]),
            r"Tiny-00002-of-00003\.gguf: not a GGUF .*cut short",
        ),
    ],
)
def test_what_is_amiss_with_a_part_is_named(harm, message, tmp_path):
    parts = write_parts(tmp_path / "parts")
    harm(parts)
    with pytest.raises(ModelError, match=message) as refused:
        ModelStore(tmp_path / "s").fetch(str(parts[0]))
    assert re.search(r"\n", str(refused.value)) is None
    assert not (tmp_path / "s").exists() or list((tmp_path / "s").iterdir()) == []
