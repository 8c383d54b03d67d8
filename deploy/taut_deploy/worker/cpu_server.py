"""vLLM's server for a worker on a CPU: ``python -m taut_deploy.worker.cpu_server ARGUMENTS``.

It is vLLM's own with a start of fewer CPU seconds: what imports make is not searched for garbage
again and again meanwhile, and the engine is a fork of this process (:mod:`.forked_engine`), not
another that imports everything.
"""

import gc
import importlib
import os

from taut_deploy.worker import forked_engine
from taut_deploy.worker.cpu_layout import ONE_PROCESS

_SERVER = "vllm.entrypoints.launchers.api_server.entry"
_OF_THE_ENGINE = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
)
_PLUGIN = "taut_kernels.vllm_plugin.registration"  # it registers nothing by itself


def main() -> None:
    """Import vLLM, leave a fork for its engine, and serve."""
    plugin = () if os.environ.get("TAUT_KERNELS") == "off" else (_PLUGIN,)
    gc.disable()
    server = importlib.import_module(_SERVER)
    for name in (*_OF_THE_ENGINE, *plugin):
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    # A model of several ranks has processes of its own, which vLLM gives their OpenMP settings.
    if os.environ.get(ONE_PROCESS) == "0":
        _fork_the_engine()
    server.main()


def _fork_the_engine() -> None:
    from vllm.v1.engine import utils

    forked_engine.fork_here()
    utils.get_mp_context = forked_engine.EngineContext


if __name__ == "__main__":
    main()
