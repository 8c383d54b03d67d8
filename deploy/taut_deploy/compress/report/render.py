"""Reports as Markdown and as one HTML page that needs nothing else: no script, no other file."""

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from taut_deploy.checkpoint import Manifest
from taut_deploy.compress.report.content import Report


def markdown(report: Report) -> str:
    """The report without wall-clock times: equal runs give equal text."""
    return _environment().get_template("report.md.j2").render(report=report)


def html(report: Report) -> str:
    """The report as a page, times included."""
    return _environment().get_template("report.html.j2").render(report=report)


def slimmed_markdown(manifest: Manifest) -> str:
    """What was cut out of each block; of experts, by what measure."""
    return (
        _environment()
        .get_template("slimmed.md.j2")
        .render(
            manifest=manifest,
            least=lambda layer: min(layer["importance"][expert] for expert in layer["kept"]),
        )
    )


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("taut_deploy.compress.report", "."),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
