"""Names that become directories: what they may look like is said here and nowhere else.

A name comes from a file, a hub id or a manifest, that is from somebody else. It is checked before
it is joined to a path, so that none can mean another directory than one child of the store.
"""

import re

from taut_deploy.errors import ModelError
from taut_deploy.models.catalog import CATALOG

MAX_LENGTH = 128
"""Of a name: leaves room in the 255 bytes of a file name for what is put around it."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# The directories beside the models in TAUT_HOME: a model of such a name would only confuse.
_RESERVED = frozenset({"models", "checkpoints", "run", "cache", "plan"})
_HUB_ID_LENGTH = 96
_HUB_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
_MAX_REFERENCE = 4096


def checked_name(name: str, origin: str) -> str:
    """``name``, fit to be a directory of the store or a file named after a model.

    Args:
        name: to be checked.
        origin: where it comes from, for the error.

    Raises:
        ModelError: a character, a length or a word that a name must not have.
    """
    reason = _why_no_name(name)
    if reason is not None:
        raise ModelError(f"{origin}: {_shown(name)} cannot name a model ({reason}); rename it")
    return name


def is_name(text: str) -> bool:
    """Whether ``text`` may name a model of the store."""
    return _why_no_name(text) is None


def _why_no_name(name: str) -> str | None:
    if not _NAME.fullmatch(name):
        return "use letters, digits, '.', '_' and '-', and no '.' or '-' in front"
    if len(name) > MAX_LENGTH:
        return f"use at most {MAX_LENGTH} characters"
    return "that is a directory of taut's own" if name.lower() in _RESERVED else None


def name_of_gguf(stem: str, origin: str) -> str:
    """The store name of a GGUF file with this ``stem``.

    Raises:
        ModelError: see :func:`checked_name`.
    """
    return checked_name(stem.lower(), origin)


def is_hub_id(reference: str) -> bool:
    """Whether ``reference`` reads as ``owner/name`` or ``owner/name@REVISION``, not as a path."""
    model_id = reference.partition("@")[0]
    return model_id.count("/") == 1 and not reference.startswith((".", "/", "~"))


def hub_id_and_revision(reference: str) -> tuple[str, str | None]:
    """Split ``owner/name@REVISION``.

    Raises:
        ModelError: a revision that no hub has.
    """
    model_id, at, revision = reference.partition("@")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision or "--" in revision):
        raise ModelError(
            f"{_shown(reference)}: {_shown(revision)} is no branch, tag or commit of a hub"
        )
    return model_id, revision if at else None


def stored_name(reference: str) -> str:
    """The name under which the store holds ``reference`` if it holds it; perhaps none at all."""
    return reference.replace("/", "--").replace("@", "--") if is_hub_id(reference) else reference


def name_of_hub_id(model_id: str, revision: str | None = None) -> str:
    """The store name of ``owner/name``, at a revision if one is given.

    Raises:
        ModelError: no hub has such an id.
    """
    owner, _, name = model_id.partition("/")
    parts = all(
        _HUB_PART.fullmatch(part) and "--" not in part and ".." not in part
        for part in (owner, name)
    )
    if not parts or len(model_id) > _HUB_ID_LENGTH:
        raise ModelError(
            f"{_shown(model_id)}: not an id of the Hugging Face hub ('owner/name', letters, "
            f"digits, '.', '_', '-', at most {_HUB_ID_LENGTH} characters) and no directory here"
        )
    return checked_name(stored_name(f"{model_id}@{revision}" if revision else model_id), model_id)


def checked_reference(reference: str) -> str:
    """A model as the user named it, before anything looks for it on the disk.

    Raises:
        ModelError: it is empty, too long or holds control characters.
    """
    if not reference or len(reference) > _MAX_REFERENCE:
        raise ModelError(
            f"{_shown(reference)}: give a model's name, id, directory or file of 1 to "
            f"{_MAX_REFERENCE} characters"
        )
    if not reference.isprintable():
        raise ModelError(f"{_shown(reference)}: a model's name holds no control characters")
    return reference


def belongs_to_catalogue(name: str) -> bool:
    """Whether ``name``, in whatever case, is a catalogue name."""
    return name.lower() in {known.lower() for known in CATALOG}


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 1] + "…")
