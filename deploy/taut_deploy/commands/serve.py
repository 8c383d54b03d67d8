"""``taut serve``."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, TrustRemoteCodeFlag, VllmArguments
from taut_deploy.commands.output import print_json, say
from taut_deploy.errors import RecipeError
from taut_deploy.home import TautHome
from taut_deploy.progress import progress_reporter
from taut_deploy.recorded_hashes import Verification
from taut_deploy.serve import load_serve_settings


@dataclass(frozen=True)
class ProcessesOptions:
    """Where the gateway listens, how many workers it has, and what is checked before they start.

    Args:
        host: Address of the gateway; default 127.0.0.1.
        port: Port of the gateway; default 8000.
        workers: Workers per model; default 1.
        verify: How a checkpoint is verified; default recorded.
    """

    host: str | None = None
    port: int | None = None
    workers: int | None = None
    verify: Verification | None = None


@with_groups
def serve(
    *,
    vllm_args: VllmArguments = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the same keys.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to compress and serve, or a checkpoint.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe; default w8a8.")] = None,
    baseline: Annotated[
        bool | None, typer.Option("--baseline", help="Serve the uncompressed model too.")
    ] = None,
    processes: ProcessesOptions,
    trust_remote_code: TrustRemoteCodeFlag = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return when it is ready; see taut ps, logs and stop."),
    ] = False,
    detached: Annotated[bool, typer.Option("--detached", hidden=True)] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch, compress if needed, start workers and gateway, print a curl line; Ctrl-C ends all."""
    from taut_deploy.serve.checks import check_settings
    from taut_deploy.serve.detach import serve_detached
    from taut_deploy.serve.prepare import gateway_configuration, prepare_models, require_free_port
    from taut_deploy.serve.supervise import serve as run

    if vllm_args and not vllm_args[0].startswith("-"):
        raise RecipeError(
            f"{vllm_args[0]!r}: not an option; a model is given with --model, vLLM's arguments "
            "after '--'"
        )
    settings = load_serve_settings(
        config,
        {
            "model": model,
            "recipe": recipe,
            "baseline": baseline,
            **asdict(processes),
            "vllm_args": vllm_args or None,
            "trust_remote_code": trust_remote_code or None,
        },
    )
    home = TautHome.from_environment()
    require_free_port(settings.host, settings.port)
    check_settings(settings)
    with progress_reporter(quiet=as_json) as report:
        models = prepare_models(settings, home, say, report)
    if as_json:
        print_json(gateway_configuration(settings, models))
    logs = home.run / str(settings.port)
    if detach:
        serve_detached(settings, logs, say)
        return
    run(settings, models, logs, home.compiled, say, detached=detached)
