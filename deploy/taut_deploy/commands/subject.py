"""What the instruments look at, from the command line: an op, a callable or a model."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taut_deploy.commands.output import print_results, say
from taut_deploy.errors import MeasureError, ModelError
from taut_deploy.files import write_json_atomically, write_text_atomically
from taut_deploy.out_of_memory import let_pass

if TYPE_CHECKING:
    import torch

    from taut_bench.instruments.subject import Subject

_MAX_POINTS = 64


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the command line says about the subject: options of every instrument.

    Args:
        subject: An op of ours (rms_norm), module:function or file.py:function, or a model (name in
            the store, or directory).
        inputs: module:function or file.py:function that makes the inputs of a callable; default:
            example_inputs beside it.
        shape: Size of an op, NAME=VALUE; repeat it for more.
        dtype: float32, bfloat16 or float16; ops and models.
        device: auto (CUDA where there is a device), cpu or cuda.
        backward: Run the gradients as well: losses, callables and models.
        batch: Sequences; models only.  [default: 1]
        tokens: Tokens each; models only.  [default: 128]
    """

    subject: Annotated[str, typer.Argument()]
    inputs: str | None = None
    shape: list[str] | None = None
    dtype: str | None = None
    device: str = "auto"
    backward: Annotated[bool, typer.Option("--backward")] = False
    batch: Annotated[int | None, typer.Option(min=1)] = None
    tokens: Annotated[int | None, typer.Option(min=1)] = None


@contextmanager
def instrument(as_json: bool) -> Iterator[None]:
    """Report an instrument's errors in one line, and keep stdout clean for ``--json``.

    What the callable under the instrument prints goes to stderr with ``--json``.
    """
    # Before the profiler's first use: it would announce each of its starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from taut_bench.instruments.errors import InstrumentError
    from taut_bench.instruments.subject import described_if_of_a_step

    # A user's module beside the current directory is found as with 'python -m'.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            yield
    except InstrumentError as error:
        raise MeasureError(str(error)) from error
    except (Exception, SystemExit) as error:  # code that is not ours may raise anything
        if (reason := described_if_of_a_step(error)) is None:
            raise
        raise MeasureError(reason) from error


def one_subject(choice: Choice) -> "Subject":
    """Build the one subject a command looks at.

    Raises:
        MeasureError: it cannot be had, or ``--shape`` names several.
    """
    found = list(subjects(choice))
    if len(found) > 1:
        raise MeasureError(f"--shape {' '.join(choice.shape or ())}: one value each, please")
    return found[0]


def subjects(choice: Choice) -> Iterator["Subject"]:
    """Build the subjects of a command, one for each combination of sizes, and try each once.

    Raises:
        MeasureError: the reference is nothing known, or an option does not fit it.
        InstrumentError: what the instruments refuse.
    """
    from taut_bench.instruments.subject import resolve_device

    device = resolve_device(choice.device)
    if choice.device == "auto" and device.type == "cpu":
        say("no CUDA device here: looking at the CPU")
    for subject in _built(choice, device):
        subject.try_out()
        yield subject


def _built(choice: Choice, device: "torch.device") -> Iterator["Subject"]:
    from taut_bench.instruments.op_cases import OP_CASES, from_op
    from taut_bench.instruments.subject import from_reference

    if choice.subject in OP_CASES:
        _refuse(choice, "an op", "inputs", "batch", "tokens")
        dtype = _dtype(choice.dtype)
        if device.type == "cpu" and not choice.subject.endswith("_cpu"):
            say(f"on a CPU {choice.subject} runs its reference in plain torch, not a kernel")
        for sizes in _sizes(choice.shape or []):
            yield from_op(choice.subject, sizes, device, dtype, backward=choice.backward)
    elif _is_callable(choice.subject):
        _refuse(choice, "a callable", "shape", "dtype", "batch", "tokens")
        yield from_reference(choice.subject, choice.inputs, device, backward=choice.backward)
    elif choice.subject.endswith(".py"):
        raise MeasureError(f"{choice.subject}: say which function: {choice.subject}:NAME")
    else:
        _refuse(choice, "a model", "shape", "inputs")
        yield _model(choice, device, sorted(OP_CASES))


def _is_callable(reference: str) -> bool:
    where, colon, name = reference.rpartition(":")
    return bool(colon and where) and not Path(reference).is_dir() and "/" not in name


def _refuse(choice: Choice, kind: str, *options: str) -> None:
    for option in options:
        if getattr(choice, option):
            raise MeasureError(f"--{option}: {choice.subject} is {kind}, which has no such option")


def _sizes(entries: list[str]) -> Iterator[dict[str, int]]:
    """Every combination of the sizes in ``M=1,16`` entries."""
    parsed: dict[str, list[int]] = {}
    for entry in entries:
        name, equals, values = entry.partition("=")
        try:
            parsed[name] = [int(value) for value in values.split(",")]
        except ValueError:
            raise MeasureError(f"--shape {entry}: expected NAME=VALUE, for example M=16") from None
        if not equals or not name:
            raise MeasureError(f"--shape {entry}: expected NAME=VALUE, for example M=16")
    combinations = list(product(*parsed.values()))
    if len(combinations) > _MAX_POINTS:
        raise MeasureError(f"--shape: {len(combinations)} combinations, at most {_MAX_POINTS}")
    for combination in combinations:
        yield dict(zip(parsed, combination, strict=True))


def _dtype(name: str | None) -> "torch.dtype | None":
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in known:
        raise MeasureError(f"--dtype {name}: use {', '.join(known)}")
    return known[name] if name else None


def _model(choice: Choice, device: "torch.device", ops: list[str]) -> "Subject":
    import torch

    from taut_bench.instruments.subject import Subject
    from taut_deploy.home import TautHome
    from taut_deploy.models import ModelStore

    try:
        record = ModelStore(TautHome.from_environment().models).find(choice.subject)
    except ModelError as error:
        # A path can be nothing but a model: the list of ops would hide what is wrong with it.
        if "/" in choice.subject or Path(choice.subject).is_dir():
            raise MeasureError(str(error)) from error
        raise MeasureError(
            f"{choice.subject}: no op ({', '.join(ops)}), no module:function, and as a model: "
            f"{error}"
        ) from error
    model = _load(Path(record.path), _dtype(choice.dtype), device)
    batch, tokens = choice.batch or 1, choice.tokens or 128
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise MeasureError(f"--tokens {tokens}: {record.name} has a context of {longest}")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text.vocab_size, (batch, tokens), generator=generator).to(device)
    name = f"{record.name}[{batch}x{tokens}]"
    kwargs = {"input_ids": ids, "use_cache": False}
    return Subject(name, model, (), device, kwargs, choice.backward)


def _load(path: Path, dtype: "torch.dtype | None", device: "torch.device") -> Any:
    from safetensors import SafetensorError

    import taut_deploy.hf  # noqa: F401  registers quant_method taut
    from taut_deploy.models.pretrained import loading_class, refusal

    try:
        model = loading_class(path).from_pretrained(
            path,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        let_pass(error)
        raise MeasureError(f"{path}: cannot be loaded: {refusal(path, error, 300)}") from error
    return model.to(device).eval()


def finish(
    output: Path, name: str, text: str, document: dict[str, Any], as_json: bool, files: list[Path]
) -> None:
    """Write ``name.md`` and ``name.json`` and print one of them.

    Args:
        output: directory, there since before the measurement (`output.make_folder`).
        name: of the command.
        text: for people.
        document: for programs; gets the list of files.
        as_json: print the document instead of the text.
        files: written already.

    Raises:
        OutputError: a file cannot be written.
    """
    written = [*files, output / f"{name}.md", output / f"{name}.json"]
    document["files"] = [str(file) for file in written]
    write_text_atomically(output / f"{name}.md", text + "\n")
    write_json_atomically(output / f"{name}.json", document)
    print_results(document, text, written, as_json=as_json)
