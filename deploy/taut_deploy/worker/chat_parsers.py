"""Which of vLLM's parsers reads a model's tool calls and its reasoning.

A model calls tools as its chat template teaches it, so the template decides; where it knows of no
tools, none are offered, and vLLM refuses a request that offers some. The names are vLLM's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_deploy.diagnose.default_kernels import config_of
from taut_deploy.documents import read_json_object
from taut_deploy.errors import ModelError
from taut_deploy.vllm_flags import given_values, names_one_of

TOOL_FLAGS = ("--enable-auto-tool-choice", "--no-enable-auto-tool-choice", "--tool-call-parser")
REASONING_FLAGS = ("--reasoning-parser", "--reasoning-parser-plugin")
_TEMPLATE_FLAG = "--chat-template"
# A template is text of a few KiB; a longer file is none.
_LONGEST_TEMPLATE = 1 << 20


@dataclass(frozen=True)
class _Rule:
    """A parser, and what shows that a model writes what it reads.

    Attributes:
        parser: vLLM's name.
        marks: all of these stand in the template.
        families: ``model_type`` is one of these; empty: any.
    """

    parser: str
    marks: tuple[str, ...] = ()
    families: frozenset[str] = frozenset()

    def fits(self, family: str, template: str) -> bool:
        of_family = not self.families or family in self.families
        return of_family and all(mark in template for mark in self.marks)


# The first that fits is taken; what another dialect writes as well comes after it.
_TOOL_RULES = (
    _Rule("openai", families=frozenset({"gpt_oss"})),
    _Rule("mistral", ("[TOOL_CALLS]",)),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Rule("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Rule("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    _Rule("glm45", ("<tool_call>", "<arg_key>")),
    _Rule("qwen3_coder", ("<tool_call>", "<function=")),
    _Rule("llama4_pythonic", ("tools",), frozenset({"llama4", "llama4_text"})),
    _Rule("granite", ("tools", "<|tool_call|>"), frozenset({"granite", "granitemoe"})),
    _Rule("phi4_mini_json", ("<|tool|>",), frozenset({"phi3"})),
    _Rule("llama3_json", ("tools", "<|start_header_id|>"), frozenset({"llama", "mllama"})),
    _Rule("hermes", ("<tool_call>",)),
)
_REASONING_RULES = (
    _Rule("openai_gptoss", families=frozenset({"gpt_oss"})),
    _Rule("mistral", ("[THINK]",)),
    _Rule("deepseek_r1", ("<｜Assistant｜><think>",)),
    _Rule("deepseek_r1", ("<｜Assistant｜>", "</think>"), frozenset({"llama", "qwen2"})),
    _Rule("glm45", ("<think>", "<arg_key>")),
    _Rule("qwen3", ("<think>",), frozenset({"qwen3", "qwen3_moe", "qwen3_next"})),
)


def parser_options(directory: Path, extra: Sequence[str]) -> list[str]:
    """Return the flags that let a model call tools and tell its reasoning from its answer.

    Args:
        directory: of the model.
        extra: the user's own arguments for vLLM; what they decide is left to them.

    Raises:
        ModelError: the template cannot be read.
    """
    template = _template_of(directory, extra)
    family = str(config_of(directory).get("model_type", ""))
    options: list[str] = []
    tools = tool_parser(family, template)
    if tools is not None and not names_one_of(extra, TOOL_FLAGS):
        options += ["--enable-auto-tool-choice", "--tool-call-parser", tools]
    reasoning = reasoning_parser(family, template)
    if reasoning is not None and not names_one_of(extra, REASONING_FLAGS):
        options += ["--reasoning-parser", reasoning]
    return options


def tool_parser(family: str, template: str) -> str | None:
    """Return vLLM's parser of a model's tool calls, None where its template knows of no tools.

    Args:
        family: ``model_type``.
        template: its chat template.
    """
    return _first_fitting(_TOOL_RULES, family, template) if "tools" in template else None


def reasoning_parser(family: str, template: str) -> str | None:
    """Return vLLM's parser of a model's reasoning, None where it shows none.

    Args:
        family: ``model_type``.
        template: its chat template.
    """
    return _first_fitting(_REASONING_RULES, family, template)


def _first_fitting(rules: Sequence[_Rule], family: str, template: str) -> str | None:
    return next((rule.parser for rule in rules if rule.fits(family, template)), None)


def _template_of(directory: Path, extra: Sequence[str]) -> str:
    given = [text for _, text in given_values(extra, lambda flag: flag == _TEMPLATE_FLAG)]
    for file in (Path(given[-1]) if given else None, directory / "chat_template.jinja"):
        if file is not None and file.is_file():
            return _read_template(file)
    tokenizer = directory / "tokenizer_config.json"
    found = read_json_object(tokenizer, ModelError) if tokenizer.is_file() else {}
    return _text_of(found.get("chat_template"))


def _read_template(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(_LONGEST_TEMPLATE)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: no chat template ({error}); give a Jinja file") from error


def _text_of(entry: Any) -> str:
    """A template of ``tokenizer_config.json``: text, or several with names."""
    if isinstance(entry, list):
        return "\n".join(str(one.get("template", "")) for one in entry if isinstance(one, dict))
    return entry if isinstance(entry, str) else ""
