"""A model that a command was given: fetched, and the code that may run with it named."""

from pathlib import Path

from taut_deploy.commands.output import say
from taut_deploy.home import TautHome
from taut_deploy.models import ModelStore
from taut_deploy.models.remote_code import describe_code
from taut_deploy.models.store import ModelRecord


def fetch_model(home: TautHome, reference: str, *, trust_remote_code: bool) -> ModelRecord:
    """Put a model on disk if it is not there, and announce its code.

    Args:
        home: with the model store.
        reference: name, hub id, directory or .gguf file.
        trust_remote_code: whether its code may run.

    Raises:
        ModelError: there is no such model, or code that it names is not in its directory.
    """
    record = ModelStore(home.models).fetch(reference)
    announce_code(Path(record.path), trust_remote_code)
    return record


def announce_code(directory: Path, trust_remote_code: bool) -> None:
    """Name each file of code that may run now, with its sha256; nothing where none may.

    Raises:
        ModelError: the code is not in the directory.
    """
    for line in describe_code(directory) if trust_remote_code else ():
        say(line)
