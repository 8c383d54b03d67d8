"""The command line of ``taut worker`` for a spec: how other commands start a worker."""

import sys

from taut_deploy.worker.spec import WorkerSpec


def worker_command(spec: WorkerSpec) -> tuple[str, ...]:
    """Return what to execute for a worker, as anybody else would start it.

    Args:
        spec: the worker. What it leaves open is left open.

    Returns:
        This interpreter, ``-m taut_deploy worker`` and its arguments.
    """
    argv = [sys.executable, "-m", "taut_deploy", "worker", str(spec.checkpoint)]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    argv += ["--shutdown-timeout", str(spec.shutdown_timeout_s)]
    argv += ["--kv-cache-dtype", spec.kv_cache_dtype, "--kv-cache-gib", str(spec.kv_cache_gib)]
    argv += ["--tune-budget-s", f"{spec.tune_budget_s:g}", "--verify", spec.verification]
    named = {
        "name": spec.name,
        "max-model-len": spec.max_model_len,
        "kernels": spec.kernels,
        "cache": spec.cache,
    }
    for option, value in named.items():
        if value is not None:
            argv += [f"--{option}", str(value)]
    switches = {"fused-ops": spec.fused_ops, "decode-attention": spec.decode_attention}
    for option, asked in switches.items():
        if asked is not None:
            argv.append(f"--{'' if asked else 'no-'}{option}")
    return (*argv, "--", *spec.extra) if spec.extra else tuple(argv)
