"""``taut explain``."""

from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, ResultsFolder
from taut_deploy.commands.output import make_folder
from taut_deploy.commands.subject import Choice, finish, instrument, one_subject


@with_groups
def explain(
    choice: Choice,
    target: Annotated[
        str | None,
        typer.Option(help="sm_80 or sm_90: compile an op's Triton kernels too, without a GPU."),
    ] = None,
    forms: Annotated[int, typer.Option(min=1, help="Kernel forms to compile at most.")] = 8,
    output: ResultsFolder = Path("taut-explain"),
    as_json: JsonFlag = False,
) -> None:
    """What torch.compile makes of it: graphs, breaks and why, guards, generated kernels."""
    with instrument(as_json):
        from taut_bench.instruments import explain, triton_kernels

        # First: a target that is wrong is found before minutes of compiling.
        compiled = triton_kernels.compile_kernels(choice.subject, target, forms) if target else None
        looked_at = one_subject(choice)
        make_folder(output)
        found = explain.explain(looked_at)
        files = explain.write_files(found, output)
        text = explain.text(found)
    document = found.as_json()
    if compiled is not None:
        text += "\n\n" + triton_kernels.text(*compiled)
        document["triton"] = triton_kernels.as_json(*compiled)
    # The code stands in the files.
    for part in (*document["aten"], *document["generated"]):
        del part["code"]
    finish(output, "explain", text, document, as_json, files)
