"""What a validation is asked to do: plain data, no tensor library."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from taut_deploy.validate.latency.plan import LatencyPlan
from taut_deploy.validate.settings import Access, Directories, Items, Sampling, Servers

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total): ``compare``, ``noise`` and ``serve`` count sequences,
``sampling`` prompts,
``task NAME`` and ``slice NAME`` items, ``latency`` pairs of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationJob:
    """One comparison of a candidate with its baseline.

    Args:
        baseline: Hugging Face directory, or base URL of an OpenAI-compatible server
            (``http://host:port``, with or without ``/v1``).
        candidate: likewise; the two kinds may be mixed.
        text: UTF-8 file the models are scored on; never the calibration text.
        policy: built-in policy name or YAML file.
        output: directory for ``report.json``, ``.md``, ``.html``, ``.prom`` and ``junit.xml``.
        sampling: how much of the text is compared.
        items: tasks and slices beside those of the policy.
        directories: how models that are directories are loaded and run.
        servers: what is asked of models behind URLs.
        access: what is sent with every request to them.
        latency: whether to measure it, which takes two servers; None measures where it can be.
        latency_plan: how much of it.
        accept_lower_bound: let a KL that is only known as a lower bound (servers) pass a ``max``
            rule.
        resume: go on with the answers of a run that broke off: None where all that they depend on
            is the same, True refuses anything else, False begins anew.
        progress: called after each sequence and each pair of latency blocks.

    Raises:
        CouldNotValidateError: a number is out of range; the flag is named.
    """

    baseline: str
    candidate: str
    text: Path
    policy: str | Path
    output: Path
    sampling: Sampling = field(default_factory=Sampling)
    items: Items = field(default_factory=Items)
    directories: Directories = field(default_factory=Directories)
    servers: Servers = field(default_factory=Servers)
    access: Access = field(default_factory=Access, repr=False)
    latency: bool | None = None
    latency_plan: LatencyPlan = field(default_factory=LatencyPlan)
    accept_lower_bound: bool = False
    resume: bool | None = None
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.sampling.check()
        self.items.check()
        self.servers.check()
        self.directories.check()

    def settings(self) -> dict[str, str]:
        """Everything that was set, by field, as text: what a digest is made of."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        for name in ("sampling", "items", "directories", "servers", "access"):
            group = found.pop(name)
            found |= {one.name: getattr(group, one.name) for one in dataclasses.fields(group)}
        return {name: str(value) for name, value in found.items()}
