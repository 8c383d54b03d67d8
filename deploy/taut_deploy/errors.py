"""Errors a user can act on.

``TautError``
 ├─ ``ModelError``       a model cannot be found, fetched or read
 ├─ ``RecipeError``      a recipe or policy file is wrong; names the key
 ├─ ``CheckpointError``  a checkpoint is missing, truncated, altered or not ours
 ├─ ``OutputError``      the output directory or the disk cannot take the result
 ├─ ``MeasureError``     an instrument cannot look at what it was given
 ├─ ``PromoteError``     a gateway's admin API cannot be reached, or refuses
 ├─ ``WorkerError``      a worker or the gateway cannot be started as asked
 └─ ``AttestationError`` a verdict cannot be signed or is not to be trusted

Each message is one line that names the file, field or flag and the way out. The command line prints
it without a traceback; anything else that escapes is a bug of ours and keeps its traceback.
"""


class TautError(Exception):
    """Base of everything the command line reports in one line."""


class ModelError(TautError):
    """A model cannot be found, fetched or read."""


class RecipeError(TautError):
    """A recipe is wrong; the message names the offending key."""


class CheckpointError(TautError):
    """A checkpoint is missing, truncated, altered or not one of ours."""


class OutputError(TautError):
    """The output directory or the disk cannot take the result."""


class MeasureError(TautError):
    """An instrument cannot look at what it was given, or not on this machine."""


class PromoteError(TautError):
    """A gateway's admin API cannot be reached, or refuses what it was asked."""


class WorkerError(TautError):
    """A worker or the gateway cannot be started as asked."""


class AttestationError(TautError):
    """A statement cannot be signed, or is not to be trusted; the message says why."""
