"""The tokenizer of a Hugging Face directory: its text to ids and back, and its conversations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from taut_deploy.errors import ModelError
from taut_deploy.models.pretrained import load_tokenizer
from taut_deploy.validate.errors import CouldNotValidateError, one_line
from taut_deploy.validate.generation import Message

# Of a fast tokenizer: what decides ids and texts. Its vocabulary is compared by itself; padding and
# truncation are of whoever calls it.
_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")


class CheckpointTokenizer:
    """The tokenizer of a directory.

    Raises:
        CouldNotValidateError: the directory has none that loads.
    """

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        self._path = path
        try:
            self._tokenizer: Any = load_tokenizer(path, trust_remote_code=trust_remote_code)
        except ModelError as error:
            raise CouldNotValidateError(str(error)) from error

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of ``text``."""
        # verbose=False: a warning about texts longer than the context is beside the point, they are
        # cut.
        encoded = self._tokenizer(text, add_special_tokens=special, verbose=False)
        return list(encoded["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens shown."""
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def written(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    @property
    def chat_template(self) -> str | None:
        """The template of conversations, if there is one."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def conversation(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that the model is to continue.

        Raises:
            CouldNotValidateError: no chat template, or it refuses the messages.
        """
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                return_dict=False,
            )
        except (ValueError, TypeError, TemplateError) as error:
            raise CouldNotValidateError(
                f"{self._path}: its chat template refuses a prompt: {one_line(error, 160)}"
            ) from error
        return list(ids)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token string → id, added tokens included."""
        return dict(self._tokenizer.get_vocab())

    @property
    def rules(self) -> dict[str, Any]:
        """How texts are cut and put together, by name; empty for a tokenizer of Python code."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return {}
        described = json.loads(backend.to_str())
        found = {name: described.get(name) for name in _RULES}
        model = dict(described.get("model") or {})
        model.pop("vocab", None)
        return found | {f"model.{name}": value for name, value in model.items()}
