"""What of its settings ``taut serve`` can refuse before minutes of fetching and compressing."""

import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from taut_deploy.errors import RecipeError
from taut_deploy.serve.settings import ServeSettings
from taut_deploy.worker import WorkerSpec, installed_platform
from taut_deploy.worker.arguments import check_kv_cache_dtype, guarded_flags, read_extra

_ANY_MODEL = {
    "name": "any",
    "max_model_len": 16,
    "workers": [{"name": "any", "url": "http://127.0.0.1:1"}],
}
"""Stands for the models, which nobody has looked at yet."""


def check_settings(settings: ServeSettings) -> None:
    """Refuse what the workers or the gateway would refuse when they start.

    Raises:
        WorkerError: an argument for vLLM that is not passed on, or a KV cache it does not have.
        RecipeError: ``gateway`` holds what the gateway does not take.
    """
    spec = WorkerSpec(
        Path(settings.model), kv_cache_dtype=settings.kv_cache_dtype, extra=settings.vllm_args
    )
    guarded = guarded_flags(
        fused_ops=bool(settings.fused_ops), decode_attention=bool(settings.decode_attention)
    )
    dtype, _ = read_extra(spec, guarded)
    check_kv_cache_dtype(dtype, installed_platform())
    if settings.gateway:
        _check_gateway(settings)


def _check_gateway(settings: ServeSettings) -> None:
    """Ask the gateway itself: its keys are its own, and it is met as a process only."""
    listen = {"host": settings.host, "port": settings.port}
    configuration = {"listen": listen, "models": [_ANY_MODEL], **settings.gateway}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gateway.yaml"
        path.write_text(yaml.safe_dump(configuration), encoding="utf-8")
        argv = [sys.executable, "-P", "-m", "taut_service", "--config", str(path), "--check"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            reason = said[0].removeprefix("taut-gateway: ").removeprefix(f"{path}: ")
            raise RecipeError(f"taut serve: gateway: {reason}")
