"""From a checkpoint to a vLLM process.

The process that starts is vLLM itself (``exec``), so signals and exit codes are its own.
"""

from taut_deploy.worker.checks import installed_platform
from taut_deploy.worker.command import command_for
from taut_deploy.worker.command_line import worker_command
from taut_deploy.worker.launch import exec_worker
from taut_deploy.worker.spec import LOOPBACK, KernelMode, Platform, WorkerSpec, asked_for

__all__ = [
    "LOOPBACK",
    "KernelMode",
    "Platform",
    "WorkerSpec",
    "asked_for",
    "command_for",
    "exec_worker",
    "installed_platform",
    "worker_command",
]
