"""``taut memory``."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, ResultsFolder
from taut_deploy.commands.output import make_folder, say
from taut_deploy.commands.subject import Choice, finish, instrument, one_subject


@with_groups
def memory(
    choice: Choice,
    against: Annotated[
        str | None,
        typer.Option(help="A second subject, e.g. the same computation fused: before and after."),
    ] = None,
    against_inputs: Annotated[
        str | None, typer.Option(help="Inputs of the second subject; default: as the first's.")
    ] = None,
    snapshot: Annotated[
        bool | None,
        typer.Option(help="The CUDA allocator's own record, for PyTorch's memory viewer."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Lines to list.")] = 15,
    output: ResultsFolder = Path("taut-memory"),
    as_json: JsonFlag = False,
) -> None:
    """What holds the memory at a step's peak: by line, module and operation."""
    files: list[Path] = []
    with instrument(as_json):
        from taut_bench.instruments import memory, memory_snapshot

        first = one_subject(choice)
        make_folder(output)
        wanted = first.device.type == "cuda" if snapshot is None else snapshot
        document: dict[str, Any] = {}
        if wanted:
            files.append(output / "snapshot.pickle")
            document["snapshot"] = asdict(memory_snapshot.record(first, files[0]))
        elif snapshot is None:
            say("no GPU: no allocator snapshot; the figures below are the CPU allocator's")
        found = memory.measure(first)
        document |= found.as_json()
        parts = [memory.text(found, rows)]
        if against is not None:
            other = replace(
                choice,
                subject=against,
                inputs=against_inputs or choice.inputs,
                device=first.device.type,
            )
            after = memory.measure(one_subject(other))
            document["against"] = after.as_json()
            parts += [memory.text(after, rows), memory.comparison(found, after)]
    finish(output, "memory", "\n\n".join(parts), document, as_json, files)
