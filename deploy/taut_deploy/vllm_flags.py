"""How vLLM reads its flags: several spellings of one, and which of them ask for what."""

from collections.abc import Callable, Iterable, Iterator, Sequence

GRAPH_FLAGS = ("--compilation-config", "-cc", "--ir-op-priority", "--kernel-config")
"""What fused ops are told by; vLLM takes the last of two."""
COMPILATION_FLAGS = ("--enforce-eager", "--optimization-level", "-O")
ATTENTION_FLAGS = ("--attention-backend", "--attention-config", "-ac")
SPECULATIVE_FLAGS = ("--speculative-config", "-sc", "--spec-method", "--spec-model")
PARALLEL_FLAGS = (
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--data-parallel-size", "-dp", "--decode-context-parallel-size", "-dcp"),
    *("--prefill-context-parallel-size", "-pcp"),
)
MODEL_FLAGS = ("--quantization", "-q", "--hf-overrides", "--model-impl", "--enable-lora")
"""What makes another model of the one in ``config.json``."""


def flag_of(argument: str) -> str:
    """The flag of an argument, without its value and what follows a dot, written with ``-``."""
    return argument.partition("=")[0].split(".")[0].replace("_", "-")


def is_written_as(flag: str, guarded: str) -> bool:
    """Whether vLLM may read ``flag`` as ``guarded``: a beginning of a long one, or a short one."""
    if flag.startswith("--"):
        return len(flag) > 2 and guarded.startswith(flag)
    return not guarded.startswith("--") and flag.startswith(guarded)


def names_one_of(arguments: Sequence[str], flags: Iterable[str]) -> bool:
    """Whether vLLM may read one of the arguments as one of the flags."""
    return any(is_written_as(flag_of(word), flag) for word in arguments for flag in flags)


def is_eager(arguments: Sequence[str]) -> bool:
    """Whether vLLM is told to compile nothing; it takes the last of two."""
    asked = {"--enforce-eager": True, "--no-enforce-eager": False}
    told = [
        yes
        for word in arguments
        for flag, yes in asked.items()
        if is_written_as(flag_of(word), flag)
    ]
    return bool(told) and told[-1]


def given_values(
    arguments: Sequence[str], is_meant: Callable[[str], bool]
) -> Iterator[tuple[str, str]]:
    """Every value of a flag, in order; vLLM takes the last. ``""`` where one is missing.

    Args:
        arguments: for vLLM.
        is_meant: whether a flag, as :func:`flag_of` gives it, is the one asked for.

    Returns:
        How the flag was written, and its value.
    """
    words = iter(arguments)
    for word in words:
        written, separator, value = word.partition("=")
        if is_meant(flag_of(word)):
            yield written, value if separator else next(words, "")
