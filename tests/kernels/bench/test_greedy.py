"""The comparison of greedy answers: counting, the test behind the verdict, and the files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from taut_bench import engine_checkpoint, engine_models, greedy, greedy_report
from taut_bench import report as bench_report
from taut_bench.greedy_report import Comparison, chance_of_as_many, compare


def test_a_pair_is_compared_up_to_its_first_difference() -> None:
    stock = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    ours = [[1, 2, 3, 4], [5, 0, 7, 8], [0, 9, 9, 9]]
    found = compare("ours", ours, "stock", stock)
    assert (found.answers, found.equal, found.partings) == (3, 1, 2)
    assert found.tokens == 4 + 2 + 1


def test_sets_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare("a", [[1, 2]], "b", [[1, 2], [3]])


@pytest.mark.parametrize(("ours", "floor"), [(3, 4), (0, 5), (9, 1)])
def test_the_chance_is_fishers(ours: int, floor: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    a = Comparison("ours", "off", 10, 10 - ours, 400)
    b = Comparison("off", "off", 10, 10 - floor, 380)
    table = [[ours, 400 - ours], [floor, 380 - floor]]
    expected = stats.fisher_exact(table, alternative="greater").pvalue
    assert math.isclose(chance_of_as_many(a, b), expected, rel_tol=1e-9)


def _sets(
    answers: greedy_report.Answers, few: greedy_report.Answers
) -> dict[str, greedy_report.Answers]:
    return {"all": answers, "few": few, "again": answers}


def test_report_tells_a_broken_kernel_from_the_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = [[i] * 32 for i in range(100, 164)]
    noisy = [row if i % 16 else [*row[:20], 99, *row[21:]] for i, row in enumerate(stock)]
    wrong = [[99, *row[1:]] for row in stock]
    answers = {"off": _sets(stock, noisy), "require": _sets(noisy, stock)}
    assert greedy_report.report(answers, tmp_path, "GPU card")
    out = capsys.readouterr().out
    assert "require, all: within the A/A noise floor: 4 of 64 answers part in 2004 tokens" in out
    assert not greedy_report.report(answers | {"prefer": _sets(wrong, wrong)}, tmp_path, "GPU card")
    assert "prefer, all: NOT within the A/A noise floor: 64 of 64" in capsys.readouterr().out
    lines = (tmp_path / "greedy.csv").read_text().splitlines()
    assert lines[0] == "first,second,answers,equal,tokens"
    assert lines[1] == '"off, all","off, few",64,60,2004'
    assert len(lines) == 1 + 1 + 1 + 3 + 3


def test_the_floor_is_the_larger_of_stocks_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8-bit sums are exact: stock agrees with itself to the bit, and with no other attention."""
    stock = [[i] * 32 for i in range(64)]
    other, ours = ([[*row[:20], last, *row[21:]] for row in stock] for last in (98, 99))
    answers = {"off": _sets(stock, stock), "require+attention": _sets(ours, ours)}
    assert not greedy_report.report(answers, tmp_path, "GPU card")
    assert "stock's own 0 in 2048 (off, all : off, few;" in capsys.readouterr().out
    assert greedy_report.report(answers | {"off+triton": _sets(other, other)}, tmp_path, "GPU card")
    said = capsys.readouterr().out
    assert "stock's own 64 in 1344 (off+triton, all : off, all; p = 0.5" in said


def test_a_floor_that_exchanges_more_than_a_mode_does_not_excuse_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all of stock's parts exchanged answers part at once; those of a product may not."""
    stock = [[i] * 32 for i in range(64)]
    early, late = ([[*row[:at], 99, *row[at + 1 :]] for row in stock] for at in (3, 30))
    floors = {"off+products": _sets(late, late), "off+others": _sets(early, early)}
    answers = {"off": _sets(stock, stock)} | floors
    for mode, right in (("require", False), ("require+fused+attention", True)):
        assert (
            greedy_report.report(answers | {mode: _sets(early, early)}, tmp_path, "card") is right
        )
        used = "off+others" if right else "off+products"
        assert f"({used}, all : off, all; p = " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "floors"),
    [
        ("require", ("off+products",)),
        ("prefer+fused", ("off+products", "off+ops")),
        ("prefer+attention", ("off+products", "off+triton")),
        ("require+fused+attention", ("off+products", "off+triton", "off+others")),
    ],
)
def test_floors_exchange_no_more_than_the_mode(mode: str, floors: tuple[str, ...]) -> None:
    assert greedy_report.floors_of(mode) == floors


def test_the_cache_holds_all_prompts_and_answers() -> None:
    llama = engine_models.LLAMA_3_8B
    tokens = 128 * (64 + 64)
    needed = 2 * 2 * 8 * 128 * 32 * tokens
    assert 1.2 * needed < greedy.cache_bytes(llama, tokens) < 1.3 * needed
    small = {"num_attention_heads": 9, "hidden_size": 576, "num_hidden_layers": 30}
    assert greedy.cache_bytes(small, 100) == int(1.25 * 4 * 576 * 30 * 100)
    assert greedy.cache_bytes(small | {"num_key_value_heads": 3}, 100) == int(
        1.25 * 4 * 192 * 30 * 100
    )


def test_stock_with_other_kernels_is_stock_but_for_them() -> None:
    """Each floor takes the place of what it names; nothing is shared between calls."""
    plain, others = (greedy._options(mode, (1, 8)) for mode in ("off", "off+others"))
    assert others["attention_backend"] == "TRITON_ATTN"
    assert others["ir_op_priority"]["rms_norm"] == ["vllm_c"]
    assert "+silu_and_mul" in others["compilation_config"]["custom_ops"]
    assert plain == {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}}
    assert greedy._options("off+triton", (1,))["compilation_config"]["custom_ops"] == []
    assert "attention_backend" not in greedy._options("off+products", (1,))
    ops = greedy._options("off+ops", (1,))
    assert "attention_backend" not in ops
    assert ops["ir_op_priority"] == others["ir_op_priority"]
    others["compilation_config"]["custom_ops"].clear()
    others["ir_op_priority"].clear()
    again = greedy._options("off+others", (1, 8))
    assert again["compilation_config"]["custom_ops"]
    assert again["ir_op_priority"]


def test_answers_that_change_from_one_run_to_the_next_are_wrong(tmp_path: Path) -> None:
    stock = [[i] * 32 for i in range(64)]
    noisy = [row if i % 16 else [*row[:20], 99, *row[21:]] for i, row in enumerate(stock)]
    ours = _sets(stock, stock) | {"again": noisy}
    assert not greedy_report.report(
        {"off": _sets(stock, noisy), "require": ours}, tmp_path, "GPU card"
    )


def test_answers_of_one_token_show_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = _sets([[7] * 32] * 64, [[7] * 32] * 64)
    assert not greedy_report.report({"off": same, "require": same}, tmp_path, "GPU card")
    assert "shows nothing: stock's answers hold 1 different tokens" in capsys.readouterr().out


def test_prompts_are_cut_at_even_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def tokenizer(_: str) -> object:
        return lambda text: {"input_ids": list(range(len(text)))}

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)
    prompts = greedy.cut_prompts("x" * 1000, tmp_path, 10)
    assert [prompt[0] for prompt in prompts] == list(range(0, 1000, 100))
    assert {len(prompt) for prompt in prompts} == {64}
    with pytest.raises(ValueError, match="the text has 630 tokens, 640 needed"):
        greedy.cut_prompts("x" * 630, tmp_path, 10)


def test_random_prompts_are_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    prompts = greedy.random_prompts(tmp_path, 9)
    assert prompts == greedy.random_prompts(tmp_path, 9)
    assert {len(prompt) for prompt in prompts} == {64}
    assert {token for prompt in prompts for token in prompt} == set(range(50))
    assert len({tuple(prompt) for prompt in prompts}) == 9


@pytest.mark.parametrize("scheme", ["w4a16", None])
def test_the_8b_shape_is_written_asked_and_gone(
    scheme: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mode gets the checkpoint and no text, all at once; files are named after the scheme."""
    commands: list[list[str]] = []
    caches: list[str] = []

    def write(directory: Path, scheme: str, sizes: dict[str, object]) -> None:
        assert (scheme, sizes["hidden_size"], sizes["num_hidden_layers"]) == ("w4a16", 4096, 8)
        directory.mkdir()

    class Engine:
        def wait(self) -> int:
            assert len(commands) == 3, "one engine waited for another"
            return 0

        def poll(self) -> int:
            return 0

    def start(command: list[str], env: dict[str, str], **_: object) -> Engine:
        commands.append(command)
        caches.append(env["VLLM_CACHE_ROOT"])
        assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "batches would depend on the clock"
        assert ("MacheteLinearKernel" in env.get("VLLM_DISABLED_KERNELS", "")) == (
            "off+products" in command
        )
        assert Path(command[command.index("--checkpoint") + 1]).is_dir()
        mode = command[command.index("--worker") + 1]
        (tmp_path / f"answers-{mode}.json").write_text(
            '{"all": [[1, 2]], "few": [[1, 2]], "again": [[1, 2]]}'
        )
        return Engine()

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(greedy, "unready", lambda modes: False)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(engine_checkpoint, "write", write)
    monkeypatch.setattr(greedy.subprocess, "Popen", start)
    monkeypatch.setattr(bench_report, "environment", lambda: {"GPU": "card"})
    text = [] if scheme else ["--text", str(tmp_path / "t")]
    source = ["--scheme", scheme, "--layers", "8"] if scheme else ["--checkpoint", str(tmp_path)]
    assert greedy.main([*source, *text, "--output", str(tmp_path)]) == 0
    assert [command[command.index("--worker") + 1] for command in commands] == [
        "off",
        "off+products",
        "require",
    ]
    assert len(set(caches)) == 3, "two engines compile into the same files"
    place = Path(commands[0][commands[0].index("--checkpoint") + 1])
    assert [command.count("--text") for command in commands] == [len(text) // 2] * 3
    assert place.is_dir() == (scheme is None)
    assert (tmp_path / ("greedy-w4a16.csv" if scheme else "greedy.csv")).is_file()


def test_engines_that_fail_are_named_and_leave_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them, after the last has ended; answers of the others are not left behind."""

    class Engine:
        def __init__(self, command: list[str], **_: object) -> None:
            self.mode = command[command.index("--worker") + 1]
            (tmp_path / f"answers-{self.mode}.json").write_text("{}")

        def wait(self) -> int:
            return 0 if self.mode == "off" else 1

        poll = wait

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(greedy, "unready", lambda modes: False)
    monkeypatch.setattr(greedy.subprocess, "Popen", Engine)
    assert greedy.main(["--checkpoint", str(tmp_path), "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "error: off+products: no answers: see greedy-off+products.log\n" in said
    assert "error: require: no answers: see greedy-require.log\n" in said
    assert "error: off:" not in said
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".log"] * 3


def test_an_interrupted_comparison_ends_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class Engine:
        def __init__(self, command: list[str], **_: object) -> None:
            self.mode = command[command.index("--worker") + 1]
            if self.mode == "require":
                raise KeyboardInterrupt

        def poll(self) -> None:
            return None

        def terminate(self) -> None:
            ended.append(self.mode)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(greedy, "unready", lambda modes: False)
    monkeypatch.setattr(greedy.subprocess, "Popen", Engine)
    with pytest.raises(KeyboardInterrupt):
        greedy.main(["--checkpoint", str(tmp_path), "--output", str(tmp_path)])
    assert ended == ["off", "off+products"]


@pytest.mark.parametrize("options", [["--checkpoint", "x"], ["--scheme", "fp8"]])
def test_layers_are_of_random_weights(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = "8" if "--checkpoint" in options else "0"
    with pytest.raises(SystemExit):
        greedy.main([*options, "--layers", layers, "--output", str(tmp_path)])
    assert "--layers: at least 1, and of --scheme only" in capsys.readouterr().err


def test_random_weights_have_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        greedy.main(["--scheme", "fp8", "--text", "x", "--output", str(tmp_path)])
    assert "--text: random weights have no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "words"])
def test_a_worker_loads_a_tokenizer_only_for_text(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []

    def answer(
        checkpoint: Path, mode: str, prompts: greedy_report.Answers, length: int, *, tokenizer: bool
    ) -> dict[str, greedy_report.Answers]:
        asked.append((len(prompts), tokenizer))
        return _sets(prompts, prompts)

    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    (tmp_path / "text").write_text("words")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(greedy, "answer", answer)
    monkeypatch.setattr(greedy, "cut_prompts", lambda text, *_: [[len(text)]] * 3)
    argv = ["--checkpoint", str(tmp_path), "--output", str(tmp_path), "--worker", "off"]
    argv += ["--text", str(tmp_path / "text")] if text else []
    assert greedy.main([*argv, "--prompts", "3"]) == 0
    assert asked == [(3, text is not None)]
    assert (tmp_path / "answers-off.json").is_file()


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    argv = ["--checkpoint", "x", "--text", "y", "--output", str(tmp_path)]
    assert greedy.main(argv) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
