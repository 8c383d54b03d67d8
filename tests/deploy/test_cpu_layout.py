"""Processes and threads of a worker on a CPU, by what Linux says of its cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from taut_deploy.worker import WorkerSpec, command_for, cpu_layout
from taut_deploy.worker.cpu_layout import Cores, before_imports, cores_here, environment_of

TWO = Cores(2, 1)


def machine(root: Path, siblings: dict[int, str], nodes: dict[int, str]) -> Path:
    """Describe a machine as Linux does under /sys/devices/system."""
    for cpu, listing in siblings.items():
        folder = root / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{listing}\n")
    for node, listing in nodes.items():
        (root / f"node/node{node}").mkdir(parents=True)
        (root / f"node/node{node}/cpulist").write_text(f"{listing}\n")
    return root


@pytest.mark.parametrize(
    ("allowed", "quota", "found"),
    [
        (range(8), None, Cores(4, 2)),
        (range(8), "max 100000", Cores(4, 2)),
        (range(8), "250000 100000", Cores(3, 2)),
        (range(8), "50000 100000", Cores(1, 2)),
        ((0, 4), None, Cores(1, 1)),
        ((0, 1), None, Cores(2, 1)),
        ((1, 2), None, Cores(2, 2)),
    ],
)
def test_cores_are_counted_once_within_affinity_and_quota(tmp_path, allowed, quota, found):
    """Four cores of two threads each: CPU n and n + 4; the first two cores on node 0."""
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    topology = machine(tmp_path, siblings, {0: "0-1,4-5", 1: "2-3,6-7"})
    limit = tmp_path / "cpu.max"
    if quota is not None:
        limit.write_text(f"{quota}\n")
    assert cores_here(allowed, topology, limit) == found


def test_a_machine_that_describes_nothing_has_a_core_a_cpu(tmp_path):
    assert cores_here({3, 5}, tmp_path, tmp_path / "cpu.max") == Cores(2, 1)


@pytest.mark.parametrize(("count", "threads"), [(1, "1"), (2, "1"), (4, "3"), (16, "15")])
def test_one_process_computes_and_a_core_is_left_to_the_others(count, threads):
    assert environment_of((), {}, Cores(count, 1)) == {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": threads,
    }


@pytest.mark.parametrize(
    ("count", "workers", "threads"), [(16, 1, "15"), (16, 2, "7"), (16, 5, "3"), (2, 3, "1")]
)
def test_workers_divide_the_cores(count, workers, threads):
    found = environment_of((), {}, Cores(count, 1), workers)
    assert found["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_that_were_asked_for_stay(workers):
    found = environment_of((), {"OMP_NUM_THREADS": "2"}, TWO, workers)
    assert found == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.mark.parametrize(
    ("extra", "environment", "cores"),
    [
        (("--tensor-parallel-size", "2"), {}, TWO),
        (("-tp=2",), {}, TWO),
        (("--distributed_executor_backend", "mp"), {}, TWO),
        ((), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, TWO),
        ((), {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, TWO),
        ((), {}, Cores(32, 2)),
    ],
)
def test_ranks_nodes_and_a_chosen_layout_keep_vllm_s_own(extra, environment, cores):
    assert environment_of(extra, environment, cores) == {}


@pytest.mark.parametrize(("platform", "added"), [("cpu", {"OMP_NUM_THREADS": "1"}), ("cuda", {})])
def test_only_a_worker_on_a_cpu_is_told(monkeypatch, platform, added):
    for name in ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TAUT_KERNELS", "off")
    monkeypatch.setattr(cpu_layout, "cores_here", lambda: TWO)
    spec = WorkerSpec(
        Path("c"),
        name="n",
        max_model_len=64,
        kernels="off",
        fused_ops=False,
        decode_attention=False,
    )
    told = command_for(spec, None, platform).environment
    assert {name: told[name] for name in told if name.startswith("OMP_NUM")} == added


@pytest.mark.parametrize(
    ("extra", "added"),
    [
        ((), {}),
        (("--enforce-eager",), {"TORCHDYNAMO_DISABLE": "1"}),
        (("--max-num-seqs", "4", "--enforce_eager"), {"TORCHDYNAMO_DISABLE": "1"}),
        (("--enforce-eager", "--no-enforce-eager"), {}),
        (("--no-enforce-eager", "--enforce-eager"), {"TORCHDYNAMO_DISABLE": "1"}),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_worker_on_a_cpu_that_compiles_nothing_has_no_compiler(
    platform, extra, added, monkeypatch
):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("TAUT_KERNELS", "off")
    given = {"name": "n", "max_model_len": 64, "fused_ops": False, "decode_attention": False}
    spec = WorkerSpec(Path("c"), kernels="off", extra=extra, **given)
    told = command_for(spec, None, platform).environment
    # On a card the function's kernel saves memory, and Triton compiles it in no time.
    expected = added if platform == "cpu" else {}
    assert {name: told[name] for name in told if "DYNAMO" in name} == expected
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    assert "TORCHDYNAMO_DISABLE" not in command_for(spec, None, platform).environment


def test_a_forked_engine_finds_torch_s_openmp_first_as_a_spawned_one_does():
    added = before_imports({"LD_PRELOAD": "/lib/other.so"})
    other, _, openmp = added["LD_PRELOAD"].partition(":")
    assert other == "/lib/other.so"
    assert Path(openmp).name.startswith("libgomp") and Path(openmp).is_file()
    assert Path(torch.__file__).parent in Path(openmp).parents or "torch.libs" in openmp
    assert before_imports({})["LD_PRELOAD"] == openmp
    assert added["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


@pytest.mark.parametrize("library", ["libiomp5.so", "libgomp.so.1", "libomp.so"])
def test_another_openmp_that_was_asked_for_stays(library):
    assert "LD_PRELOAD" not in before_imports({"LD_PRELOAD": f"/opt/{library}"})


def test_this_machine_has_no_more_cores_than_cpus():
    assert 1 <= cores_here().count <= len(os.sched_getaffinity(0))
