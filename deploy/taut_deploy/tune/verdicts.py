"""Files of verdicts: measured in a process of its own, kept by card, versions and products.

A worker reads one file in all its processes, and none is written while requests are served.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taut_deploy import host
from taut_deploy.errors import OutputError, TautError, WorkerError
from taut_deploy.home import TautHome
from taut_deploy.progress import Say
from taut_deploy.tune.products import ShardProduct, ranks_of, shard_products
from taut_deploy.vllm_flags import MODEL_FLAGS, names_one_of

if TYPE_CHECKING:
    from taut_deploy.worker.spec import WorkerSpec
    from taut_kernels.for_deploy import measured_here as measured_here_module

FOLDER = "verdicts"
_STAYS = "what is not measured stays with vLLM"


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Where a model's verdicts are, or are to be.

    Attributes:
        path: of the file.
        products: of the model, on one rank.
        gpu: name of the card.
    """

    path: Path
    products: tuple[ShardProduct, ...]
    gpu: str

    def read(self) -> "measured_here_module.Document | None":
        """Return what the file holds; None where there is none.

        Raises:
            WorkerError: it is damaged, or of another machine.
        """
        return _checked(self.path) if self.path.exists() else None

    def lacking(self) -> list[ShardProduct]:
        """Return the products that neither the file nor a shipped table has.

        Raises:
            WorkerError: the file is damaged.
        """
        from taut_kernels.for_deploy import WeightFormat, is_measured

        document = self.read()
        rows = [] if document is None else document.tables.get("w4a16_measured", [])
        there = {(row["N"], row["K"], row.get("format", "g128")) for row in rows}
        return [
            product
            for product in self.products
            if (product.n, product.k, product.weights) not in there
            and not is_measured(self.gpu, product.n, product.k, WeightFormat(product.weights))
        ]

    def measure(
        self, products: Sequence[ShardProduct], budget_s: float, tiles: int
    ) -> list[dict[str, Any]]:
        """Measure products that the file lacks, and put them there.

        Args:
            products: of the model.
            budget_s: seconds; no product begins later.
            tiles: of the cost model, to try beside what runs now.

        Returns:
            What the file says of each product: N, K, format, layers, ``ours`` (None where nobody
            measured it) and, measured, M, us and vllm_us.

        Raises:
            WorkerError: it could not be measured; says why.
        """
        argv = [sys.executable, "-m", "taut_kernels.tuner", "--output", str(self.path)]
        argv += ["--budget-s", str(budget_s), "--tiles", str(tiles)]
        wanted = json.dumps(
            [[one.n, one.k, one.weights, one.layers] for one in products], allow_nan=False
        )
        environment = {name: text for name, text in os.environ.items() if name != _variable()}
        environment["PYTHONSAFEPATH"] = "1"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{self.path.parent}: {error.strerror or error}") from error
        done = subprocess.run(
            argv, input=wanted, stdout=subprocess.PIPE, text=True, env=environment, check=False
        )
        if done.returncode != 0:
            raise WorkerError(
                f"the products were not measured: the measuring process ended with "
                f"{done.returncode}, its lines above say why"
            )
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found


def find_verdicts(directory: Path, ranks: int, root: Path | None) -> Verdicts | None:
    """Find where a model's verdicts are on this machine.

    Args:
        directory: the model's.
        ranks: tensor-parallel size.
        root: the cache directory of workers; None: ``$TAUT_HOME``.

    Returns:
        None where the model has no product that our kernel could run.

    Raises:
        ModelError: the directory cannot be read.
        WorkerError: no CUDA device, the driver does not tell its version, or the ranks do not
            divide a layer.
    """
    from taut_kernels.for_deploy import measured_here

    products = shard_products(directory, ranks)
    if not products:
        return None
    try:
        machine = measured_here.this_machine()
    except ValueError as error:
        raise WorkerError(f"cannot measure here: {error}") from error
    key = machine.key([[one.n, one.k, one.weights] for one in products])
    place = (TautHome.from_environment().root if root is None else root).absolute()
    return Verdicts(place / FOLDER / f"{key}.json", tuple(products), machine.gpu)


def named_verdicts(spec: "WorkerSpec", mode: str, platform: str) -> Path | None:
    """Return the file that a worker is to read; None where there is none for it.

    Measures nothing.

    Args:
        spec: the worker.
        mode: value of ``TAUT_KERNELS``.
        platform: installed platform.

    Raises:
        WorkerError: the file is damaged, or of another machine.
    """
    from taut_kernels.for_deploy import measured_here

    if (named := measured_here.named()) is not None:
        _checked(named, of_this_machine=platform == "cuda")
        return named
    found = _of_worker(spec, mode, platform, lambda _: None)
    return found.path if found is not None and found.read() is not None else None


def follow_verdicts(directory: Path, ranks: int, root: Path | None) -> None:
    """Let this process choose kernels as a worker of the model here would.

    Args:
        directory: the model's.
        ranks: tensor-parallel size.
        root: the cache directory of workers; None: ``$TAUT_HOME``.

    Raises:
        ModelError: the directory cannot be read.
        WorkerError: the file is damaged.
    """
    if host.gpu_name() is None or os.environ.get(_variable()):
        return
    found = find_verdicts(directory, ranks, root)
    if found is not None and found.read() is not None:
        os.environ[_variable()] = str(found.path)


def measure_for_worker(
    spec: "WorkerSpec", mode: str, platform: str, budget_s: float, tiles: int, say: Say
) -> None:
    """Measure before a worker starts what nobody measured of its model, within a budget.

    What cannot be measured stays with vLLM, and a line says so: no reason not to serve.

    Args:
        spec: the worker.
        mode: value of ``TAUT_KERNELS``.
        platform: installed platform.
        budget_s: seconds; 0 measures nothing.
        tiles: of the cost model, to try beside what runs now.
        say: takes a line for people.

    Raises:
        WorkerError: the file there is damaged, or of another machine.
    """
    from taut_kernels.for_deploy import measured_here

    if budget_s <= 0 or measured_here.named() is not None:
        return
    found = _of_worker(spec, mode, platform, say)
    if found is None or not (lacking := found.lacking()):
        return
    say(
        f"measuring {len(lacking)} products of this model on {found.gpu} for at most {budget_s:g} "
        f"s, once; kept in {found.path}; 'taut tune' does so beforehand"
    )
    try:
        told = found.measure(lacking, budget_s, tiles)
    except (WorkerError, OutputError) as error:
        say(f"{error}; {_STAYS}")
        return
    left = sum(one["ours"] is None for one in told)
    if left:
        say(f"{left} of {len(lacking)} products not measured in {budget_s:g} s: run 'taut tune'")


def _of_worker(spec: "WorkerSpec", mode: str, platform: str, say: Say) -> Verdicts | None:
    """Return where a worker's verdicts are; None where none are asked for or can be told."""
    if platform != "cuda" or mode != "prefer" or names_one_of(spec.extra, MODEL_FLAGS):
        return None
    ranks = ranks_of(spec.extra)
    try:
        return find_verdicts(spec.checkpoint, ranks, spec.cache)
    except TautError as error:
        say(f"{error}; {_STAYS}")
        return None


def _checked(path: Path, *, of_this_machine: bool = True) -> "measured_here_module.Document":
    from taut_kernels.for_deploy import measured_here

    try:
        document = measured_here.read(path)
        machine = measured_here.this_machine() if of_this_machine else document.machine
        why = measured_here.why_foreign(document, machine)
    except ValueError as error:
        raise WorkerError(str(error)) from error
    if why is not None:
        raise WorkerError(f"{path}: {why}; delete it and measure again with 'taut tune'")
    return document


def _variable() -> str:
    from taut_kernels.for_deploy import measured_here

    return measured_here.VARIABLE
