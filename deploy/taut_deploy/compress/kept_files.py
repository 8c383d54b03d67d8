"""Which files of a model travel into its checkpoint unchanged, besides the weights."""

import fnmatch
from pathlib import Path

from taut_deploy.documents import read_json
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import model_files
from taut_deploy.models.remote_code import code_files

# What a licence asks for, the model card, and tokenizers in other formats.
_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*", "README*", "*.tiktoken")
_TEMPLATES = "additional_chat_templates/*.jinja"
_WRITTEN_ANEW = frozenset({"config.json", "model.safetensors.index.json"})


def kept_files(directory: Path, *, with_code: bool = False) -> list[Path]:
    """Files to copy, in a stable order.

    Args:
        directory: of the model.
        with_code: take the model's own Python files along, which it needs to be loaded.

    Raises:
        ModelError: the configuration of generation is no JSON, which no server would start with.
    """
    generation = directory / "generation_config.json"
    if generation.is_file():
        read_json(generation, ModelError)
    found = {path for path in model_files(directory) if path.suffix != ".safetensors"}
    plain = (path for path in directory.iterdir() if path.is_file() and not path.is_symlink())
    found |= {
        path
        for path in plain
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _PATTERNS)
    }
    found |= {path for path in directory.glob(_TEMPLATES) if path.is_file()}
    found |= set(code_files(directory)) if with_code else set()
    return sorted(path for path in found if path.name not in _WRITTEN_ANEW)
