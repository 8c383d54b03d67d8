"""``taut tune``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import print_json, say
from taut_deploy.errors import WorkerError

_TILES = 2


def tune(
    checkpoint: Annotated[
        Path, typer.Argument(help="taut checkpoint, or a Hugging Face directory.")
    ],
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="GPUs that share the model: its layers are cut for so many.")
    ] = 1,
    cache: Annotated[
        Path | None,
        typer.Option(
            envvar="TAUT_COMPILE_CACHE",
            help="Directory that workers get as --cache; without, the verdicts are in TAUT_HOME.",
        ),
    ] = None,
    budget_s: Annotated[
        float, typer.Option(min=1, help="Seconds; no product begins later.")
    ] = 90.0,
    as_json: JsonFlag = False,
) -> None:
    """Measure on this card, for a model's 4-bit layers, taut's kernels against vLLM's.

    Workers of the model follow what was measured. Measures only what is not there yet.
    """
    from taut_deploy.tune import find_verdicts

    found = find_verdicts(checkpoint, tensor_parallel_size, cache)
    if found is None:
        raise WorkerError(f"{checkpoint}: no 4-bit layer that taut's kernel could run")
    found.read()
    layers = sum(product.layers for product in found.products)
    say(f"{len(found.products)} products of {layers} layers on {found.gpu}; {budget_s:g} s at most")
    told = found.measure(found.products, budget_s, _TILES)
    if as_json:
        print_json({"file": str(found.path), "gpu": found.gpu, "products": told})
        return
    for product in told:
        typer.echo(_line(product))
    typer.echo(f"kept in {found.path}")


def _line(product: dict[str, Any]) -> str:
    shape = f"{product['N']}x{product['K']} {product['format']}"
    head = f"{shape:22} {product['layers']:4} layers  "
    if product["ours"] is None:
        return f"{head}not measured: stays with vLLM; run it again, or give a longer --budget-s"
    times = zip(product["M"], product["us"], product["vllm_us"], strict=True)
    told = ", ".join(f"{theirs / ours:.2f} at {M}" for M, ours, theirs in times)
    return f"{head}{'taut' if product['ours'] else 'vLLM'}: vLLM's time ÷ taut's {told} tokens"
