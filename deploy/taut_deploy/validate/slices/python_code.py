"""Whether a completion of Python code is code. Nothing is run."""

import ast
import warnings


def completion_parses(prompt: str, completion: str, *, cut_off: bool) -> bool:
    """Whether prompt and completion together are Python with a body.

    The completion counts up to the first line that leaves the indented block it began in: what a
    model goes on to write is not what it was asked for.

    Args:
        prompt: ends where a block is to be written.
        completion: what the model wrote.
        cut_off: it ended at the limit of its length, so its last line may be half a line.
    """
    lines = completion.split("\n")
    if cut_off:
        lines = lines[:-1]
    body: list[str] = []
    for line in lines:
        if body and line.strip() and not line[0].isspace():
            break
        body.append(line)
    if not any(line.strip() for line in body):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            ast.parse(prompt + "\n".join(body) + "\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
