"""The ``taut`` command: one line per mistake, a traceback only for bugs of ours."""

import errno
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from taut_deploy.commands import (
    bench,
    cache,
    compress,
    distil,
    doctor,
    explain,
    memory,
    model,
    plan,
    profile,
    promote,
    report,
    roofline,
    running,
    serve,
    shrink,
    slim,
    task,
    tune,
    validate,
    worker,
)
from taut_deploy.commands.output import printable
from taut_deploy.errors import TautError
from taut_deploy.idle_threads import let_threads_sleep
from taut_deploy.out_of_memory import describe, where_memory_is_over
from taut_deploy.versions import installed, versions_line

app = typer.Typer(
    name="taut",
    help="Compress Hugging Face causal LMs, prove what it cost, and serve them.",
    pretty_exceptions_enable=False,
)
for group in (model, task, bench, cache, promote):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])
for command in (
    *(compress.compress, distil.distil, slim.slim, shrink.shrink, plan.plan),
    *(worker.worker, serve.serve, tune.tune, running.ps, running.logs, running.stop),
    *(validate.validate, report.report, doctor.doctor),
    *(roofline.roofline, profile.profile, memory.memory, explain.explain),
):
    app.command()(command)


def _print_versions(asked: bool) -> None:
    if asked:
        typer.echo(versions_line())
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_versions, help="Print the versions."
        ),
    ] = False,
) -> None:
    """Take the options of ``taut`` itself."""


EXIT_FAILED = 2
EXIT_COULD_NOT_VALIDATE = 3
EXIT_INTERRUPTED = 130

# What the file system says of a place that the user named, wherever it is met first.
_OF_THE_PLACE = frozenset(
    {
        *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOENT),
        *(errno.EACCES, errno.EPERM, errno.EROFS),
    }
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

# typer carries its own copy of click from 0.26 on and uses the installed one before; its usage
# errors are reached through a name that both export.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code.

    Args:
        arguments: of the command line; those of the process where left out.
    """
    given = sys.argv[1:] if arguments is None else arguments
    # Bars and advice of the libraries below would drown our own lines.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    let_threads_sleep()
    try:
        _require_installed()
        # Outside standalone mode typer returns the code of a raised Exit (130 after Ctrl-C).
        code = app(args=given or ["--help"], standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except _UsageError as error:
        return _failed(_usage_message(error), given)
    except TautError as error:
        return _failed(str(error), given)
    except (MemoryError, RuntimeError, OSError) as error:
        if (message := _of_the_machine(error)) is None:
            raise
        return _failed(message, given)
    if code == EXIT_INTERRUPTED:
        sys.stderr.write("taut: interrupted; run the same command again to go on\n")
    return int(code)


def _require_installed() -> None:
    """Refuse a checkout that is only on the module path.

    vLLM would find no plugin there, and results could not name the version that made them.

    Raises:
        TautError: as said.
    """
    if not installed(["taut"]):
        raise TautError("taut is on the module path, but not installed: pip install it here")


def _of_the_machine(error: Exception) -> str | None:
    """What an error says of memory, disk or a place that the user named; None of anything else."""
    if (place := where_memory_is_over(error)) is not None:
        return describe(error, place)
    if not isinstance(error, OSError):
        return None
    named = str(error.filename)[:200] if error.filename else None
    if error.errno in _DISK_FULL:
        place = named or "this machine"
        return f"{place}: the disk is full; free some space and run the command again"
    if error.errno in _OF_THE_PLACE and named is not None:
        return f"{named}: {error.strerror}; choose another place"
    return None


def _failed(message: str, given: list[str]) -> int:
    sys.stderr.write(f"taut: {printable(' '.join(message.split()))}\n")
    # 1 and 2 are verdicts of `taut validate`.
    return EXIT_COULD_NOT_VALIDATE if given[:1] == ["validate"] else EXIT_FAILED


def _usage_message(error: Any) -> str:
    command = error.ctx.command_path if error.ctx is not None else "taut"
    return f"{error.format_message().rstrip('.')}; see '{command} --help'"
