"""Becoming vLLM: verified files, its command, our kernels present."""

import os
import sys
from typing import NoReturn

from taut_deploy.cache import cache_key_of, open_cache
from taut_deploy.diagnose.default_kernels import config_of
from taut_deploy.diagnose.other_rounding import other_roundings
from taut_deploy.tune import measure_for_worker
from taut_deploy.verdict_record import check_wanted, require_verdict
from taut_deploy.worker.arguments import with_asked_cache
from taut_deploy.worker.checks import (
    check_eight_bit_weights,
    check_int8,
    check_kernels,
    check_own_format,
    check_served,
    check_tables,
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
        WorkerError: vLLM, a KV-cache dtype, our kernels or a required verdict are missing, or the
            verdicts of this card are damaged.
    """
    check_wanted(spec.require_verdict, spec.trust)
    platform = installed_platform()
    manifest = verify_model(spec.checkpoint, spec.verification, _say)
    if said := require_verdict(spec.checkpoint, manifest, spec.require_verdict, spec.trust):
        _say(said)
    spec, told = with_asked_cache(spec, manifest, platform)
    if told is not None:
        _say(told)
    mode = kernel_mode(spec, manifest, platform)
    check_kernels(mode, os.environ)
    check_int8(spec.checkpoint, platform, mode)
    check_served(spec.checkpoint, platform)
    check_eight_bit_weights(spec.checkpoint, platform, mode)
    check_own_format(spec.checkpoint, mode, spec.extra)
    check_tables(spec.checkpoint, platform, mode)
    for line in other_roundings(config_of(spec.checkpoint), platform):
        _say(line)
    measure_for_worker(spec, mode, platform, spec.tune_budget_s, 0, _say)
    command = command_for(spec, manifest, platform)
    environment = {**os.environ, **command.environment}
    if spec.cache is not None:
        from taut_kernels.for_deploy import compiled_graph

        key = cache_key_of(spec.checkpoint, platform, command.argv, environment)
        place = open_cache(spec.cache, str(key), environment)
        _say(place.message)
        environment |= place.environment
        if place.directory is not None:
            environment[compiled_graph.VARIABLE] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], list(command.argv), environment)  # noqa: S606


def _say(line: str) -> None:
    sys.stderr.write(f"taut: {line}\n")
    sys.stderr.flush()
