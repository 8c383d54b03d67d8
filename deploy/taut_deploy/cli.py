"""The ``taut`` command: one line per mistake, a traceback only for bugs of ours."""

import os
import sys
import warnings

import click
import typer

from taut_deploy.commands import compress, doctor, model, serve, validate, worker
from taut_deploy.errors import TautError

app = typer.Typer(
    name="taut",
    help="Compress Hugging Face causal LMs, prove what it cost, and serve them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(model.app, name="model")
app.command()(compress.compress)
app.command()(worker.worker)
app.command()(serve.serve)
app.command()(validate.validate)
app.command()(doctor.doctor)

EXIT_FAILED = 2
EXIT_COULD_NOT_VALIDATE = 3
EXIT_INTERRUPTED = 130


def main() -> int:
    """Entry point of the console script; returns the exit code."""
    # Bars and advice of the libraries below would drown our own lines.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        app(standalone_mode=False)
    except typer.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        sys.stderr.write("taut: interrupted; run the same command again to go on\n")
        return EXIT_INTERRUPTED
    except TautError as error:
        sys.stderr.write(f"taut: {' '.join(str(error).split())}\n")
        return EXIT_COULD_NOT_VALIDATE if sys.argv[1:2] == ["validate"] else EXIT_FAILED
    return 0
