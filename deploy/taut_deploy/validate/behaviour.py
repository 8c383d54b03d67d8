"""Whether two directories answer alike but for their weights: template, ends, positions, defaults.

None of these shows in the distributions over a given text, and each changes what users get.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taut_deploy.documents import read_json_object
from taut_deploy.errors import ModelError
from taut_deploy.models.pretrained import load_config, load_tokenizer
from taut_deploy.validate.errors import CouldNotValidateError

_SHOWN = 60
# Written by transformers into any file of its own.
_NO_BEHAVIOUR = frozenset(
    {"transformers_version", "_from_model_config", "use_cache", "cache_implementation"}
)


def require_same_behaviour(
    baseline: Path, candidate: Path, *, trust_remote_code: bool = False
) -> None:
    """Compare what is no weight and still decides answers.

    Args:
        baseline: its directory.
        candidate: its directory.
        trust_remote_code: let the models' own Python code run.

    Raises:
        CouldNotValidateError: naming the first difference and its file.
    """
    try:
        ours, theirs = (dict(_behaviour(path, trust_remote_code)) for path in (baseline, candidate))
    except ModelError as error:
        raise CouldNotValidateError(str(error)) from error
    for file, what in {**ours, **theirs}:
        first, second = ours.get((file, what)), theirs.get((file, what))
        if first != second:
            raise CouldNotValidateError(
                f"--candidate {candidate / file}: {what} is {_short(second)}, the baseline's "
                f"{_short(first)}: it would answer otherwise whatever its weights; take {file} "
                f"of {baseline}"
            )


def _behaviour(path: Path, trust_remote_code: bool) -> Iterator[tuple[tuple[str, str], Any]]:
    """(file, setting) and value of everything compared."""
    config = load_config(path, trust_remote_code=trust_remote_code).get_text_config()
    for name in ("max_position_embeddings", "rope_parameters", "sliding_window"):
        yield ("config.json", name), getattr(config, name, None)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    yield ("tokenizer_config.json", "the chat template"), tokenizer.chat_template
    yield ("tokenizer_config.json", "eos_token"), tokenizer.eos_token
    generation = path / "generation_config.json"
    defaults = read_json_object(generation, ModelError) if generation.is_file() else {}
    ends = defaults.pop("eos_token_id", None) or config.eos_token_id
    yield ("generation_config.json", "eos_token_id"), ends if isinstance(ends, list) else [ends]
    for name, value in defaults.items():
        if name not in _NO_BEHAVIOUR and value is not None:
            yield ("generation_config.json", name), value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
