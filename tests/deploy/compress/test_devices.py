"""``--devices``: batches of one calibration go to several devices, and their sums come together."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
from tiny_models import (
    job_for,
    recipe_data,
    w8a8_data,
    write_llama,
    write_recipe,
)
from torch import nn
from validate_setup import write_text

from taut_deploy.checkpoint import read_manifest
from taut_deploy.cli import main
from taut_deploy.commands import device as device_option
from taut_deploy.compress import driver
from taut_deploy.compress.block import run_batches
from taut_deploy.compress.calibrate.observe import observe_block
from taut_deploy.compress.replicas import over_replicas, replicas_of
from taut_deploy.compress.source.calls import PerRow
from taut_deploy.errors import OutputError, RecipeError

CPU = torch.device("cpu")
# Three batches of 64 sequences of 32 tokens.
CALIBRATION = {"sequences": 160, "sequence_length": 32}


class TwoLayers(nn.Module):
    """One linear layer after another, and what is added to their output for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False)

    def forward(self, hidden: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(hidden)) + shift


@pytest.fixture
def block():
    """Weights are whole numbers, so that every sum below is exact in fp32."""
    made = TwoLayers()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()
    return made.requires_grad_(False)


def whole_numbers(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-3, 4, (rows, 4, 6), generator=generator).float()


SHIFT = {"shift": PerRow(torch.full((1, 4, 6), 0.5), 0)}


@pytest.mark.parametrize("devices", [2, 3])
def test_statistics_of_several_devices_are_those_of_all_batches(devices, block):
    hidden = whole_numbers(10)
    found = observe_block(block, hidden, SHIFT, 2, devices=[CPU] * devices)
    one = observe_block(block, hidden, SHIFT, 2)
    rows = hidden.reshape(-1, 6).to(torch.int64)
    inputs = [rows, rows @ block.first.weight.to(torch.int64).T]
    for group, single, x in zip(found, one, inputs, strict=True):
        # 40 rows: the mean is the one division that may round, once, as numpy's does.
        wanted = ((x.T @ x).numpy() / 40).astype("float32")
        assert torch.equal(group.hessian, torch.from_numpy(wanted))
        assert torch.equal(group.absmax, x.abs().amax(0).float())
        assert group.tokens == 40
        # Rows of the sample lie in the order of the text, whichever device saw them.
        assert torch.equal(group.sample, x.float())
        assert torch.equal(single.hessian, group.hessian)
        assert torch.equal(single.sample, group.sample)


def test_what_several_devices_sum_up_is_as_near_and_the_same_every_time(block):
    hidden = torch.randn(9, 64, 6, generator=torch.Generator().manual_seed(2))
    shift = {"shift": torch.zeros(6)}
    shared, again = (observe_block(block, hidden, shift, 2, devices=[CPU] * 2) for _ in range(2))
    single = observe_block(block, hidden, shift, 2)
    exact = hidden.reshape(-1, 6).double()
    exact = exact.T @ exact / len(exact)
    assert torch.equal(shared[0].hessian, again[0].hessian)
    lost = (shared[0].hessian - exact).norm() / exact.norm()
    # Another grouping of 576 products in fp32: each of its 10 additions rounds by 2^-24 at most.
    assert lost < 10 * 2**-24
    assert (shared[0].hessian - single[0].hessian).norm() / exact.norm() < 20 * 2**-24


def test_outputs_come_in_the_order_of_the_text(block):
    hidden = whole_numbers(7)
    shared = torch.cat([*run_batches(block, hidden, SHIFT, 2, [CPU] * 3)])
    x = hidden.to(torch.int64)
    for layer in (block.first, block.second):
        x = x @ layer.weight.to(torch.int64).T
    assert torch.equal(shared, x + 0.5)


def test_devices_work_at_the_same_time(block):
    together = threading.Barrier(2, timeout=60)  # broken where one waits for the other's end

    def meet(replica, batch):
        together.wait()
        return replica.number, len(batch)

    replicas = replicas_of(block, SHIFT, [CPU] * 2)
    met = [*over_replicas(meet, whole_numbers(8), 2, replicas)]
    assert met == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_a_copy_is_a_block_of_its_own(block):
    first, second = replicas_of(block, SHIFT, [CPU] * 2)
    assert first.module is block
    second.module.first.weight.zero_()
    assert bool(block.first.weight.any())


def test_an_error_on_one_device_ends_the_run(block):
    def fail(replica, batch):
        raise ZeroDivisionError(f"on {replica.number}")

    with pytest.raises(ZeroDivisionError, match="on 0"):
        list(over_replicas(fail, whole_numbers(8), 2, replicas_of(block, SHIFT, [CPU] * 2)))


def shards_of(directory) -> dict[str, str]:
    files = read_manifest(directory).files
    return {name: digest for name, digest in files.items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model")
    write_text(path / "text.txt", 6000, seed=5)
    return path


def compress(room, data, output, devices=()):
    data["calibration"] |= CALIBRATION
    driver.compress(replace(job_for(room / "model", data, output), devices=devices))
    return output


def recipes(room) -> dict[str, dict]:
    text = room / "text.txt"
    return {
        # Largest inputs and sampled rows, which are no sums.
        "w8a8": w8a8_data(text),
        "kv-cache": recipe_data(text, algorithm="rtn") | {"kv_cache": {"dtype": "fp8"}},
        "gptq": recipe_data(text),
    }


@pytest.mark.parametrize("name", ["w8a8", "kv-cache"])
def test_two_devices_write_the_bytes_of_one(name, room, tmp_path):
    one = compress(room, recipes(room)[name], tmp_path / "one")
    two = compress(room, recipes(room)[name], tmp_path / "two", ("cpu", "cpu"))
    assert shards_of(two) == shards_of(one)
    assert read_manifest(two).golden == read_manifest(one).golden


def test_what_is_solved_from_sums_loses_as_little_and_is_the_same_every_time(room, tmp_path):
    one = compress(room, recipes(room)["gptq"], tmp_path / "one")
    two, again = (
        compress(room, recipes(room)["gptq"], tmp_path / name, ("cpu", "cpu"))
        for name in ("two", "again")
    )
    assert shards_of(two) == shards_of(again)
    for ours, single in zip(read_manifest(two).layers, read_manifest(one).layers, strict=True):
        # Hessians differ in their last bits, which may move a code that lay between two.
        assert ours["relative_error"] == pytest.approx(single["relative_error"], rel=0.02)


def test_more_devices_than_batches_are_refused_before_anything_is_written(room, tmp_path):
    with pytest.raises(RecipeError, match="--devices: 4 devices for 3 batches of 64 calibration"):
        compress(room, recipes(room)["w8a8"], tmp_path / "out", ("cpu",) * 4)
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize(
    ("text", "cards", "reason"),
    [
        ("cuda:0,cuda:0", 2, "names a card twice"),
        ("cuda:0,cuda:2", 2, "torch sees 2 cards here, no cuda:2"),
        ("cuda:0,tpu", 2, "'tpu' is no device; name cards as cuda:0,cuda:1"),
        ("cuda,cuda:1", 2, "'cuda' is no device"),
        ("cuda:0,", 1, "'' is no device"),
        ("cpu,cuda:0", 1, "leave cpu out"),
        ("cuda:0", 1, "name two or more, or use --device"),
    ],
)
def test_devices_that_are_not_there_are_refused(text, cards, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    with pytest.raises(OutputError, match=f"^--devices {text}: .*{reason}"):
        device_option.parse_devices(text)


def test_cards_are_taken_in_their_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_option.parse_devices("cuda:1, cuda:0") == ("cuda:1", "cuda:0")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--workers", "2"], "--workers: processes share the CPU; leave --devices out"),
        (["--recipe", "slim"], "--devices: recipe 'slim' neither does anything block"),
    ],
)
def test_the_command_refuses_what_cannot_be_shared(room, tmp_path, arguments, reason, capsys):
    argv = ["compress", str(room / "model"), "--output", str(tmp_path / "out")]
    assert main([*argv, "--devices", "cpu,cpu", *arguments]) != 0
    assert reason in capsys.readouterr().err


def test_the_plan_names_the_devices(room, tmp_path, capsys):
    data = recipes(room)["w8a8"]
    data["calibration"] |= CALIBRATION
    recipe = write_recipe(tmp_path / "r.yaml", data)
    argv = ["compress", str(room / "model"), "--recipe", str(recipe), "--plan", "--devices"]
    assert not main([*argv, "cpu,cpu"])
    assert "calibration shared by cpu, cpu" in capsys.readouterr().out
    assert not main([*argv, "cpu,cpu", "--json"])
    assert json.loads(capsys.readouterr().out)["devices"] == ["cpu", "cpu"]
