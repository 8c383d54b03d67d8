"""One real ``taut serve`` for the whole session: SmolLM2, compressed here, vLLM, gateway.

The model is fetched into the ordinary store (its bytes are verified); everything else, the
compressed checkpoint included, is made anew in a temporary home.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taut_deploy.home import TautHome
from taut_deploy.models import ModelRecord, ModelStore

# importlib mode adds no test folder to the path.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "deploy"))  # tiny models

from serving import MODEL, Served, wait_for

from taut_deploy.ports import free_port

_START_TIMEOUT_S = 900
TOOLS_TEMPLATE = Path(__file__).parent / "templates" / "tools.jinja"


@pytest.fixture(scope="session")
def base_model() -> ModelRecord:
    return ModelStore(TautHome.from_environment().models).fetch(MODEL)


@pytest.fixture(scope="session")
def home(base_model: ModelRecord, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("taut-home")
    (root / "models").symlink_to(Path(base_model.path).parent)
    corpus = TautHome.from_environment().root / "calibration-corpus.txt"
    if corpus.is_file():  # verified by its hash before use
        (root / corpus.name).symlink_to(corpus)
    return root


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "TAUT_HOME": str(home), "PYTHONSAFEPATH": "1"}


@pytest.fixture(scope="session")
def served(home: Path, environment: dict[str, str]) -> Iterator[Served]:
    log = home / "serve.log"
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "taut_deploy", "serve", "--port", str(port)),
                # SmolLM2's own knows of no tools; without tools in a request both write the same.
                # Compiling takes a minute a start: test_worker_image.py has a worker that does it.
                *("--", "--chat-template", str(TOOLS_TEMPLATE), "--enforce-eager"),
            ],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    instance = Served(process, home, port, log)
    try:
        wait_for(
            lambda: "ready. Try:" in instance.output(), _START_TIMEOUT_S, instance.output, process
        )
        yield instance
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=120)
