"""``taut promote``: moves a model's traffic to a candidate through a gateway's admin API."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from taut_deploy.api_key import read_key_file
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import print_json, printable
from taut_deploy.errors import PromoteError

app = typer.Typer(help="Move a model's traffic to a candidate, as the gateway's guard allows.")

Model = Annotated[str, typer.Argument(help="Public name of the model, or an alias.")]
Why = Annotated[str, typer.Option(help="For the audit log.")]

DEFAULT_URL = "http://127.0.0.1:8001"
_TIMEOUT_S = 30
_AS_WANTED = 0.95
"""Of the wished sample; less is told."""


@dataclass(frozen=True)
class AdminApi:
    """The gateway that is asked.

    Args:
        admin_url: Root of the gateway's admin API.
        api_key_file: File with a key of the scope admin.
    """

    admin_url: Annotated[str, typer.Option(envvar="TAUT_ADMIN_URL")] = DEFAULT_URL
    api_key_file: Annotated[Path | None, typer.Option(envvar="TAUT_ADMIN_KEY_FILE")] = None

    def get(self, path: str) -> Any:
        """Read what stands below ``/admin/rollout``.

        Raises:
            PromoteError: it cannot be reached, or refuses; in its own words.
        """
        return self._ask("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask for a change.

        Raises:
            PromoteError: likewise.
        """
        return self._ask("POST", path, json.dumps(body, allow_nan=False).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        url = self.admin_url
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise PromoteError(f"--admin-url {url}: is not of the form {DEFAULT_URL}")
        headers = {"Content-Type": "application/json"}
        if self.api_key_file is not None:
            headers["Authorization"] = f"Bearer {read_key_file(self.api_key_file, PromoteError)}"
        try:
            request = urllib.request.Request(  # noqa: S310
                f"{url.rstrip('/')}/admin/rollout{path}", body, headers, method=method
            )
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise PromoteError(f"--admin-url {url}: {_refusal(error)}") from error
        except (OSError, HTTPException, ValueError) as error:
            told = getattr(error, "reason", error)
            raise PromoteError(f"--admin-url {url}: no admin API answers there: {told}") from error


@app.command()
@with_groups
def status(admin: AdminApi, as_json: JsonFlag = False) -> None:
    """Print where every rollout stands, and what the guard knows of each variant."""
    found = admin.get("")
    if as_json:
        print_json(found)
        return
    if not found["journal_up"]:
        typer.echo("the journal of rollouts is lost: nothing is decided")
    sample = found.get("sample")  # an older gateway does not tell it
    if sample is not None and sample["kept"] < _AS_WANTED * sample["wanted"]:
        typer.echo(
            f"the guard compares {sample['kept']:.2%} of the answers, not {sample['wanted']:.2%}: "
            f"it may take {sample['max_cpu_share']:.0%} of the gateway's other CPU time "
            "(guard.max_cpu_share)"
        )
    for rollout in found["rollouts"]:
        for line in _lines(rollout):
            typer.echo(printable(line))


@app.command()
@with_groups
def start(
    *,
    model: Model,
    candidate: Annotated[str, typer.Argument(help="Variant that is to take over.")],
    force: Annotated[
        bool,
        typer.Option("--force", help="Also in the cooldown, or where it has all traffic."),
    ] = False,
    admin: AdminApi,
    as_json: JsonFlag = False,
) -> None:
    """Begin a rollout, or let a held one go on."""
    body = {"model": model, "candidate": candidate, "force": force}
    _tell(admin.post("/start", body), as_json)


@app.command()
@with_groups
def hold(*, model: Model, why: Why = "", admin: AdminApi, as_json: JsonFlag = False) -> None:
    """Stay at this step until the rollout is started again; harm still rolls it back."""
    _tell(admin.post("/hold", {"model": model, "why": why}), as_json)


@app.command()
@with_groups
def rollback(*, model: Model, why: Why = "", admin: AdminApi, as_json: JsonFlag = False) -> None:
    """Give all traffic back to the baseline, now."""
    _tell(admin.post("/rollback", {"model": model, "why": why}), as_json)


@app.command()
@with_groups
def history(
    *,
    model: Annotated[str | None, typer.Argument(help="Only of this model.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many of the last lines.")] = 20,
    admin: AdminApi,
    as_json: JsonFlag = False,
) -> None:
    """Print the audit log; the gateway checks its chain of hashes each time."""
    query = {"limit": str(limit)} | ({} if model is None else {"model": model})
    found = admin.get(f"/history?{urllib.parse.urlencode(query)}")
    if as_json:
        print_json(found)
        return
    for entry in found["entries"]:
        state = entry["state"]
        text = (
            f"{entry['time']}  {state['model']}  {entry['event']}  {state['candidate']} "
            f"{state['percent']:g} %  by {entry['actor']}: {state['why']}"
        )
        typer.echo(printable(text))
    typer.echo(f"{found['lines']} lines, newest hash {found['head'] or 'none'}")


def _tell(found: Any, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        text = f"{found['model']}: {found['candidate']} {found['phase']} at {found['percent']:g} %"
        typer.echo(printable(text))


def _lines(rollout: Any) -> list[str]:
    name, candidate = rollout["model"], rollout["candidate"]
    if candidate is None:
        lines = [f"{name}: no rollout; baseline {rollout['baseline']}"]
    else:
        lines = [
            f"{name}: {candidate} {rollout['phase']} at {rollout['percent']:g} %: {rollout['why']}"
        ]
        if rollout["phase"] == "running" and rollout["next"]:
            lines.append(f"  waits: {rollout['next']}")
    for found in rollout["evidence"]:
        lines.append(
            f"  {found['variant']}: {found['verdict']}: {found['why']}; "
            f"{found['answers']} answers, {found['tokens']} tokens"
        )
        lines += [f"    {name}: {_measured(told)}" for name, told in found["measures"].items()]
    return lines


def _measured(told: Any) -> str:
    nats = told.get("nats")  # an older gateway does not tell it
    unit, per = (" nats", nats) if nats is not None else ("", 1.0)
    mean, low, high = (per * told[name] for name in ("mean", "low", "high"))
    bound = "" if told["bound"] is None else f", at most {per * told['bound']:.4g}{unit}"
    return f"{mean:.4f} in [{low:.4f}, {high:.4f}]{unit}{bound}"


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"answered with status {error.code}"
    if error.code == 404 and message.lower().startswith("not found"):
        return "this gateway has no section 'rollout' in its configuration"
    return message
