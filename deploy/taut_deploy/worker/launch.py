"""Becoming vLLM: verified files, its command, our kernels present."""

import os
import sys
from typing import NoReturn

from taut_deploy.cache import cache_key_of, open_cache
from taut_deploy.worker.checks import (
    check_int8,
    check_kernels,
    check_own_format,
    installed_platform,
    verify_model,
)
from taut_deploy.worker.command import command_for, kernel_mode
from taut_deploy.worker.spec import WorkerSpec


def exec_worker(spec: WorkerSpec) -> NoReturn:
    """Verify, build the command, and become vLLM.

    Args:
        spec: the worker.

    Raises:
        CheckpointError: the files do not match the manifest.
        WorkerError: vLLM, a KV-cache dtype or our kernels are missing.
    """
    platform = installed_platform()
    manifest = verify_model(spec.checkpoint)
    mode = kernel_mode(spec, manifest, platform)
    check_kernels(mode, os.environ)
    check_int8(spec.checkpoint, platform, mode)
    check_own_format(spec.checkpoint, mode, spec.extra)
    command = command_for(spec, manifest, platform)
    environment = {**os.environ, **command.environment}
    if spec.cache is not None:
        key = cache_key_of(spec.checkpoint, platform, command.argv, environment)
        place = open_cache(spec.cache, str(key), environment)
        sys.stderr.write(f"taut: {place.message}\n")
        environment |= place.environment
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], list(command.argv), environment)  # noqa: S606
