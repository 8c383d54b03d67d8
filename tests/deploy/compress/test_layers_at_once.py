"""Layers solved at the same time: the bytes of one after the other, on threads and on devices."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from tiny_blocks import make_block
from tiny_models import job_for, recipe_data
from torch import nn

from taut_deploy.checkpoint import read_manifest
from taut_deploy.compress import block as blocks
from taut_deploy.compress import driver, layers_at_once
from taut_deploy.compress.block import run_prompts
from taut_deploy.compress.calibrate.gram import add_gram, mirror
from taut_deploy.compress.calibrate.observe import InputGroup, observe_block
from taut_deploy.compress.layers_at_once import solve_layers
from taut_deploy.compress.quantize import gptq
from taut_deploy.compress.source.calls import call_block
from taut_deploy.compress.state import LayerState

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def layers_of(*sizes: tuple[int, int]) -> list[LayerState]:
    """A layer [N, K] of each size, every one with an input of its own."""
    return [
        LayerState(
            f"layer-{number}",
            nn.Linear(k, n, bias=False).requires_grad_(False),
            InputGroup([], None, torch.eye(k), torch.ones(k), torch.empty(0, k)),
            frozenset({0}),
            None,
        )
        for number, (n, k) in enumerate(sizes)
    ]


W4 = {"method": "quantize", "scheme": "W4A16", "group_size": 32}
STAGES = {
    "gptq": [{**W4, "symmetric": False}],
    "hqq": [{**W4, "algorithm": "hqq"}],
    "awq": [{"method": "awq"}, {**W4, "algorithm": "rtn"}],
    "smooth": [{"method": "smooth"}, {"method": "quantize", "scheme": "W8A8"}],
    "learned rounding": [{**W4, "algorithm": "round", "steps": 2}],
    "sparsegpt": [{"method": "prune", "algorithm": "sparsegpt", "pattern": "2:4"}, W4],
    "wanda": [{"method": "prune", "algorithm": "wanda", "sparsity": 0.5}],
    "codebook": [{"method": "palettize", "entries": 8, "group_size": 32, "refits": 1}],
    "low rank": [{"method": "factorize", "rank_budget": 0.8}],
    "residual": [{"method": "factorize", "residual": {"rank": 4, "group_size": 32}}],
    "quanto": [{"method": "quanto", "weights": "int8"}],
}


@pytest.mark.parametrize("name", STAGES)
def test_every_solver_writes_the_bytes_of_one_layer_after_the_other(name, room, tmp_path):
    data = recipe_data(room / "text.txt") | {"stages": STAGES[name]}
    made = {}
    for how, threads, devices in (("alone", 1, ()), ("threads", 2, ()), ("devices", 1, (CPU, CPU))):
        torch.set_num_threads(threads)
        try:
            solve_on(devices, job_for(room / "model", data, tmp_path / how))
        finally:
            torch.set_num_threads(1)
        manifest = read_manifest(tmp_path / how)
        files = {key: one for key, one in manifest.files.items() if key.endswith(".safetensors")}
        made[how] = files, manifest.layers, manifest.golden
    assert made["threads"] == made["alone"]
    assert made["devices"] == made["alone"]


def solve_on(devices, job) -> None:
    """Compress, the calibration on one device and the solves on several."""
    compress_block = blocks.compress_block
    with pytest.MonkeyPatch.context() as patch:
        if devices:
            observe = blocks.observe_block
            patch.setattr(blocks, "observe_block", lambda *given: observe(*given[:5]))
            patch.setattr(
                driver,
                "compress_block",
                lambda *given, **named: compress_block(*given, **named | {"devices": devices}),
            )
        driver.compress(job)


def test_the_factor_of_an_input_is_computed_once_for_all_that_read_it(monkeypatch, room, tmp_path):
    seen = []
    inverse_cholesky = gptq.inverse_cholesky

    def counted(hessian, *given):
        seen.append(len(hessian))
        return inverse_cholesky(hessian, *given)

    monkeypatch.setattr(gptq, "inverse_cholesky", counted)
    driver.compress(job_for(room / "model", recipe_data(room / "text.txt"), tmp_path / "out"))
    # q, k and v; o; gate and up; down, of two blocks
    assert sorted(seen) == [64] * 6 + [128] * 2


def test_layers_of_different_inputs_are_worked_on_at_the_same_time(two_threads):
    together = threading.Barrier(2, timeout=60)  # broken where one waits for the other's end

    def meet(layers):
        together.wait()
        return [(layer.name, torch.get_num_threads()) for layer in layers]

    met = solve_layers(meet, layers_of((4, 4), (8, 4)))
    assert met == [("layer-0", 1), ("layer-1", 1)]
    assert torch.get_num_threads() == 2


def test_layers_that_would_take_much_memory_together_go_one_after_the_other(two_threads):
    running = threading.Lock()

    def alone(layers):
        assert running.acquire(blocking=False)
        running.release()
        return [torch.get_num_threads() for _ in layers]

    # A Hessian of 8192 takes 268 MB, and a solve three of its size.
    large = layers_of((2, 8), (2, 8))
    for layer in large:
        layer.module = nn.Linear(8192, 2, bias=False, device="meta")
    assert solve_layers(alone, large) == [2, 2]


def test_devices_get_the_work_by_its_size_and_give_back_what_they_found():
    meta = torch.device("meta")
    sizes = (4, 4), (8, 4), (64, 4), (16, 4)

    def place(layers):
        return [(one.module.weight.device.type, one.group.hessian.device.type) for one in layers]

    found = solve_layers(place, layers_of(*sizes), [CPU, meta])
    # The largest alone takes longer than the three others together.
    assert found == [("meta", "meta"), ("meta", "meta"), ("cpu", "cpu"), ("meta", "meta")]


def test_what_a_device_found_comes_back_to_the_block():
    weight = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    found = gptq.Feedback(weight, weight > 3, torch.arange(3), weight.T)
    back = layers_at_once._moved((found, [weight], {"kept": 1}), torch.device("meta"))
    parts = [back[0].importance, back[0].dead, back[0].order, back[0].factor, back[1][0]]
    assert {part.device.type for part in parts} == {"meta"}
    assert [part.dtype for part in parts[:3]] == [torch.float64, torch.bool, torch.int64]


def test_linear_algebra_is_loaded_before_threads_call_it(monkeypatch):
    """Two first calls at once end torch's loading of it on GPUs with an error."""
    loaded, devices = [], [CPU, torch.device("meta")]
    monkeypatch.setattr(layers_at_once, "load_linalg", loaded.extend)
    assert (
        solve_layers(lambda _: [list(loaded)], layers_of((4, 4), (8, 4)), devices) == [devices] * 2
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_threads_of_a_fresh_process_factor_on_a_card():
    program = """
import threading, torch
from taut_deploy.compress.threads import load_linalg
device, failed = torch.device("cuda"), []
matrices = [torch.eye(512, device=device) for _ in range(16)]
load_linalg([device])
ready = threading.Barrier(len(matrices))
def call(matrix):
    ready.wait()
    try:
        torch.linalg.cholesky_ex(matrix)
    except RuntimeError as error:
        failed.append(error)
threads = [threading.Thread(target=call, args=(matrix,)) for matrix in matrices]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
raise SystemExit(str(failed) if failed else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_error_is_that_of_the_first_layer(two_threads):
    def fail(layers):
        raise ZeroDivisionError(layers[0].name)

    with pytest.raises(ZeroDivisionError, match="layer-0"):
        solve_layers(fail, layers_of((4, 4), (400, 4)))
    assert torch.get_num_threads() == 2


def test_gradients_are_off_where_the_caller_has_them_off(two_threads):
    def modes(layers):
        return [(torch.is_grad_enabled(), torch.is_inference_mode_enabled()) for _ in layers]

    with torch.no_grad():
        assert solve_layers(modes, layers_of((4, 4), (8, 4))) == [(False, False)] * 2
    with torch.inference_mode():
        assert solve_layers(modes, layers_of((4, 4), (8, 4))) == [(False, True)] * 2


def test_prompts_go_side_by_side_and_come_in_their_order(two_threads):
    block, hidden, arguments = make_block("llama")
    prompts = [hidden[number : number + 1] for number in range(2)]
    threads = []
    block.register_forward_pre_hook(lambda *_: threads.append(torch.get_num_threads()))
    got = run_prompts(block, prompts, [arguments] * 2)
    torch.set_num_threads(1)
    with torch.inference_mode():
        wanted = [call_block(block, one, arguments) for one in prompts]
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert threads[:2] == [1, 1]


@pytest.mark.parametrize("k", [5, 256, 600, 2100])
def test_the_upper_half_of_a_gram_is_computed_and_mirrored(k):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-3, 4, (6, k), generator=generator).float()
    total = torch.zeros(k, k)
    for part in rows.split(4):
        add_gram(total, part)
    if k > 256:  # below the first band nothing was computed
        assert not bool(total[-1, :256].any())
    mirror(total)
    # Whole numbers: exact in fp32 and in int64.
    wanted = rows.to(torch.int64).T @ rows.to(torch.int64)
    assert torch.equal(total.to(torch.int64), wanted)


def test_a_wide_input_has_the_statistics_of_one_thread(two_threads):
    torch.manual_seed(0)
    layer, hidden = nn.Sequential(nn.Linear(600, 4, bias=False)), torch.randn(9, 16, 600)
    several = observe_block(layer, hidden, {}, 2)
    torch.set_num_threads(1)
    alone = observe_block(layer, hidden, {}, 2)
    assert torch.equal(several[0].hessian, alone[0].hessian)
    assert torch.equal(several[0].hessian, several[0].hessian.T)
    assert several[0].tokens == alone[0].tokens == 9 * 16
