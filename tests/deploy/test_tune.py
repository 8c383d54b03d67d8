"""Which products of a model are measured, where the verdicts are kept, and who follows them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from taut_deploy import cli
from taut_deploy.errors import WorkerError
from taut_deploy.tune import (
    ShardProduct,
    find_verdicts,
    measure_for_worker,
    named_verdicts,
    ranks_of,
    shard_products,
    verdicts,
)
from taut_deploy.worker import WorkerSpec, command_for, engine_options
from taut_kernels.launch import measured_here
from taut_kernels.launch.measured_here import Document, Machine

CARD = "A card of 2030"
"""That no shipped table is of."""
MACHINE = Machine(CARD, "580.1", {"torch": "2.11.0"})
SIZES = {
    "model_type": "llama",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
# Llama-3.2-3B: 24 heads and 2 x 8 key and value heads of 128; gate and up of 8192.
WHOLE = [(3072, 3072), (3072, 8192), (5120, 3072), (16384, 3072)]
ROW = {"M": [1, 256], "us": [1.0, 1.0], "vllm_us": [2.0, 2.0]}

# Stands in for the interpreter that runs the tuner: all products are twice as fast on ours, but
# those of fewer features than it is told.
TUNER = """#!{python}
import json, os, sys
from pathlib import Path
from taut_kernels.launch.measured_here import Document, Machine, write
assert sys.argv[1:3] == ["-m", "taut_kernels.tuner"]
assert "TAUT_VERDICTS" not in os.environ
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
Path({log!r}).open("a").write(json.dumps(given) + "\\n")
row = {{"M": [1, 256], "us": [1.0, 1.0], "vllm_us": [2.0, 2.0]}}
wanted = json.load(sys.stdin)
rows = [{{"N": n, "K": k, **row}} for n, k, named, layers in wanted if n > {least}]
machine = Machine({gpu!r}, "580.1", {{"torch": "2.11.0"}})
write(Path(given["--output"]), Document(machine, "a test", {{"w4a16_measured": rows}}))
there = {{(row["N"], row["K"]) for row in rows}}
told = [
    {{"N": n, "K": k, "format": named, "layers": layers}}
    | ({{"ours": True}} | row if (n, k) in there else {{"ours": None}})
    for n, k, named, layers in wanted
]
print(json.dumps(told))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", SIZES)


def write_model(directory: Path, sizes: dict[str, Any], **quantization: Any) -> Path:
    directory.mkdir(parents=True)
    config = sizes | {"quantization_config": GPTQ | quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A card that no table is of, and a home of its own."""
    monkeypatch.setattr(measured_here, "this_machine", lambda: MACHINE)
    monkeypatch.setenv("TAUT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(measured_here.VARIABLE, "")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put the stand-in in place of the measuring process; returns the file of its arguments."""
    return stand_in(monkeypatch, tmp_path, least=0)


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: int) -> Path:
    log, program = tmp_path / "asked", tmp_path / "python"
    text = TUNER.format(python=sys.executable, log=str(log), gpu=CARD, least=least)
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setattr(verdicts.sys, "executable", str(program))
    return log


def sizes_of(products: list[ShardProduct]) -> list[tuple[int, int]]:
    return [(product.n, product.k) for product in products]


# --- products ------------------------------------------------------------------------------------


def test_products_are_those_of_joined_layers_each_once(model: Path) -> None:
    products = shard_products(model, 1)
    assert sizes_of(products) == WHOLE
    assert {(product.weights, product.layers) for product in products} == {("g128", 2)}


def test_ranks_cut_outputs_of_qkv_and_gate_up_and_inputs_of_the_others(model: Path) -> None:
    assert sizes_of(shard_products(model, 2)) == [
        (2560, 3072),
        (3072, 1536),
        (3072, 4096),
        (8192, 3072),
    ]


def test_key_heads_repeat_where_there_are_fewer_than_ranks(tmp_path: Path) -> None:
    """Two key heads on four ranks: 6 query heads and one key and one value head each."""
    model = write_model(tmp_path / "m", SIZES | {"num_key_value_heads": 2})
    assert (8 * 128, 3072) in sizes_of(shard_products(model, 4))


def test_ranks_that_do_not_divide_are_refused_by_the_layer(model: Path) -> None:
    with pytest.raises(WorkerError, match=r"-size 7: does not divide the 5120 output"):
        shard_products(model, 7)


def test_the_format_is_the_layers_own(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "zero_point": True, "group_size": 32}
    model = write_model(tmp_path / "m", SIZES, **awq)
    assert {product.weights for product in shard_products(model, 1)} == {"g32-zp"}


def test_what_our_kernel_does_not_take_is_left_out(tmp_path: Path) -> None:
    assert not shard_products(write_model(tmp_path / "a", SIZES, bits=8), 1)
    assert not shard_products(write_model(tmp_path / "b", SIZES, desc_act=True), 1)
    # 8192 inputs on 128 ranks are 64: half a group.
    narrow = write_model(tmp_path / "c", SIZES | {"num_attention_heads": 128})
    assert (3072, 64) not in sizes_of(shard_products(narrow, 128))


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ([], 1),
        (["--max-num-seqs", "8"], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["--tensor_parallel_size=4"], 4),
        (["-tp", "8"], 8),
        (["-tp=2", "--tensor-parallel-size", "4"], 4),
    ],
)
def test_the_tensor_parallel_size_is_read_as_vllm_reads_it(arguments: Any, ranks: int) -> None:
    assert ranks_of(arguments) == ranks


@pytest.mark.parametrize("words", [["-tp", "two"], ["--tensor-parallel-size", "0"], ["-tp"]])
def test_a_size_that_is_no_number_of_gpus_is_refused(words: list[str]) -> None:
    with pytest.raises(WorkerError, match="give the number of GPUs, 1 or more"):
        ranks_of(words)


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("card")
def test_a_files_name_is_of_card_versions_products_and_place(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(ranks: int = 1, root: Path | None = None) -> Path:
        found = find_verdicts(model, ranks, root)
        assert found is not None
        return found.path

    own = path()
    assert own.parent == tmp_path / "home" / "verdicts"
    assert own.name.startswith("a-card-of-2030-")
    assert path(ranks=2).name != own.name
    assert path(root=tmp_path / "volume") == tmp_path / "volume" / "verdicts" / own.name
    monkeypatch.setattr(measured_here, "this_machine", lambda: replace(MACHINE, driver="590"))
    assert path().name != own.name


@pytest.mark.usefixtures("card")
def test_a_worker_measures_once_what_nobody_measured(
    model: Path, tuner: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    spec = WorkerSpec(model, cache=tmp_path / "volume", extra=("-tp", "2"))
    assert named_verdicts(spec, "prefer", "cuda") is None
    measure_for_worker(spec, "prefer", "cuda", 20.0, 0, said.append)
    (asked,) = [json.loads(line) for line in tuner.read_text().splitlines()]
    assert (asked["--budget-s"], asked["--tiles"]) == ("20.0", "0")
    path = named_verdicts(spec, "prefer", "cuda")
    assert path == Path(asked["--output"])
    assert said[0].startswith(f"measuring 4 products of this model on {CARD} for at most 20 s")
    assert len(said) == 1
    measure_for_worker(spec, "prefer", "cuda", 20.0, 0, said.append)
    assert len(tuner.read_text().splitlines()) == 1


@pytest.mark.usefixtures("card")
def test_what_the_budget_left_is_said_and_measured_next_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = stand_in(monkeypatch, tmp_path, least=4000)
    said: list[str] = []
    measure_for_worker(WorkerSpec(model), "prefer", "cuda", 20.0, 0, said.append)
    assert said[-1] == "2 of 4 products not measured in 20 s: run 'taut tune'"
    measure_for_worker(WorkerSpec(model), "prefer", "cuda", 20.0, 0, said.append)
    assert said[-2].startswith("measuring 2 products of this model")
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("mode", "platform", "budget", "extra"),
    [
        ("off", "cuda", 20.0, ()),
        ("require", "cuda", 20.0, ()),
        ("prefer", "cpu", 20.0, ()),
        ("prefer", "cuda", 0.0, ()),
        ("prefer", "cuda", 20.0, ("--quantization", "awq")),
    ],
)
def test_a_worker_that_would_not_follow_measures_nothing(
    model: Path, tuner: Path, mode: str, platform: str, budget: float, extra: tuple[str, ...]
) -> None:
    measure_for_worker(WorkerSpec(model, extra=extra), mode, platform, budget, 0, pytest.fail)
    assert not tuner.exists()


@pytest.mark.usefixtures("card")
def test_a_measurement_that_fails_is_said_and_no_reason_not_to_serve(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measuring process itself finds no card here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said: list[str] = []
    measure_for_worker(WorkerSpec(model), "prefer", "cuda", 20.0, 0, said.append)
    assert said[-1].startswith("the products were not measured: ")
    assert said[-1].endswith("what is not measured stays with vLLM")
    assert "error: no CUDA device to measure on" in capfd.readouterr().err
    assert named_verdicts(WorkerSpec(model), "prefer", "cuda") is None


@pytest.mark.usefixtures("card")
def test_a_model_whose_layers_are_not_told_is_served_all_the_same(model: Path, tuner: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    said: list[str] = []
    measure_for_worker(WorkerSpec(model), "prefer", "cuda", 20.0, 0, said.append)
    assert len(said) == 1
    assert "names no quant_method; what is not measured stays with vLLM" in said[0]
    assert not tuner.exists()
    assert named_verdicts(WorkerSpec(model), "prefer", "cuda") is None


def write_verdicts(path: Path, machine: Machine = MACHINE) -> Path:
    rows = [{"N": N, "K": K} | ROW for N, K in WHOLE]
    measured_here.write(path, Document(machine, "a test", {"w4a16_measured": rows}))
    return path


@pytest.mark.usefixtures("card")
def test_vllm_and_its_compile_cache_get_the_file(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_options, "suited_options", lambda spec: (False, False))
    monkeypatch.setenv("TAUT_KERNELS", "prefer")
    spec = WorkerSpec(model, max_model_len=64)

    def key_of() -> tuple[str, str | None]:
        command = command_for(spec, None, "cuda")
        config = json.loads(command.argv[command.argv.index("--additional-config") + 1])
        return config["taut"], command.environment.get(measured_here.VARIABLE)

    without, named = key_of()
    assert named is None
    found = find_verdicts(model, 1, None)
    assert found is not None
    write_verdicts(found.path)
    key, named = key_of()
    assert named == str(found.path)
    assert key != without
    # Nothing is left for the next worker of this process.
    assert not os.environ[measured_here.VARIABLE]


@pytest.mark.usefixtures("card")
def test_a_damaged_or_foreign_file_is_refused_in_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_verdicts(model, 1, None)
    assert found is not None
    found.path.parent.mkdir(parents=True)
    found.path.write_text("{")
    for call in (
        lambda: named_verdicts(WorkerSpec(model), "prefer", "cuda"),
        lambda: measure_for_worker(WorkerSpec(model), "prefer", "cuda", 20.0, 0, pytest.fail),
    ):
        with pytest.raises(WorkerError, match=rf"^{found.path}: not JSON .*'taut tune'$"):
            call()
    given = write_verdicts(tmp_path / "given.json", replace(MACHINE, gpu="NVIDIA A100"))
    monkeypatch.setenv(measured_here.VARIABLE, str(given))
    with pytest.raises(WorkerError, match=r"given\.json: measured with card NVIDIA A100, here"):
        named_verdicts(WorkerSpec(model), "prefer", "cuda")
    # Not measured on this machine, nor looked for: a worker on a CPU does not ask.
    assert named_verdicts(WorkerSpec(model), "prefer", "cpu") == given
    given.write_text("[]")
    with pytest.raises(WorkerError, match=r"given\.json: no verdicts of format 3"):
        named_verdicts(WorkerSpec(model), "prefer", "cpu")


@pytest.mark.usefixtures("card")
def test_the_key_that_is_printed_is_the_workers_with_its_verdicts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_options, "suited_options", lambda spec: (False, False))
    monkeypatch.setattr("taut_deploy.cache.warm.installed_platform", lambda: "cuda")
    monkeypatch.setattr("taut_deploy.cache.key._gpu", lambda: CARD)
    monkeypatch.setenv("TAUT_KERNELS", "prefer")
    volume = tmp_path / "volume"

    def printed(*words: str) -> str:
        taut("cache", "key", str(model), "--max-model-len", "64", *words)
        return capsys.readouterr().out

    without = printed("--cache", str(volume))
    found = find_verdicts(model, 1, volume)
    assert found is not None
    write_verdicts(found.path)
    assert printed("--cache", str(volume)) != without
    assert printed() == without


@pytest.mark.usefixtures("card")
def test_doctor_follows_what_was_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("taut_deploy.host.gpu_name", lambda: CARD)
    seen: list[str | None] = []
    monkeypatch.setattr(
        "taut_deploy.diagnose.facts.diagnose",
        lambda checkpoint: seen.append(os.environ[measured_here.VARIABLE]) or {},
    )
    taut("doctor", str(model))
    found = find_verdicts(model, 1, None)
    assert found is not None
    write_verdicts(found.path)
    taut("doctor", str(model))
    assert seen == ["", str(found.path)]


# --- the command ---------------------------------------------------------------------------------


def taut(*words: str) -> None:
    cli.app(list(words), standalone_mode=False)


@pytest.mark.usefixtures("card", "tuner")
def test_the_command_measures_and_says_who_is_faster(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taut("tune", str(model), "--budget-s", "30")
    said = capsys.readouterr()
    assert said.err == f"taut: 4 products of 8 layers on {CARD}; 30 s at most\n"
    lines = said.out.splitlines()
    assert "3072x3072 g128" in lines[0]
    assert lines[0].endswith("taut: vLLM's time ÷ taut's 2.00 at 1, 2.00 at 256 tokens")
    assert lines[4].startswith("kept in ")
    taut("tune", str(model), "--json")
    told = json.loads(capsys.readouterr().out)
    assert [product["ours"] for product in told["products"]] == [True] * 4


@pytest.mark.usefixtures("card", "tuner")
def test_a_model_without_four_bit_layers_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no 4-bit layer that taut's kernel could run"):
        taut("tune", str(write_model(tmp_path / "m", SIZES, bits=8)))


def test_a_machine_without_a_card_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(WorkerError, match="cannot measure here: no CUDA device to measure on"):
        taut("tune", str(model))
