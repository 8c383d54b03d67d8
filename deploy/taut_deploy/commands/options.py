"""Options and arguments that several commands take, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

ModelArgument = Annotated[str, typer.Argument(help="Model name, hub id, directory or .gguf file.")]

VllmArguments = Annotated[
    list[str] | None, typer.Argument(help="After '--': arguments passed on to vLLM.")
]

DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]

TextOption = Annotated[
    list[str] | None,
    typer.Option(help="corpus, a text file, .jsonl or .npy of token ids; repeat for more."),
]

JudgedTextOption = Annotated[
    Path | None, typer.Option(help="UTF-8 text to judge on; not the calibration text.")
]

PolicyOption = Annotated[str, typer.Option(help="Built-in policy or YAML file.")]

ResultsFolder = Annotated[Path, typer.Option(file_okay=False, help="Folder of the results.")]

ResumeFlag = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Continue an interrupted run.")
]

RequantizeFlag = Annotated[
    bool, typer.Option("--requantize", help="Take a model that is quantised already.")
]

TrustRemoteCodeFlag = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the model's own Python code; prints its hashes."),
]
