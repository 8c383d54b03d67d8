"""The gateway's configuration: one YAML file, parsed once, frozen, unknown keys refused.

``load_settings`` turns a file into :class:`Settings` or raises :class:`SettingsError` whose text
has one line a mistake, each naming the file and the place in it. Nothing else in this package
reads files or the environment.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

Scalar = str | int | float | bool | None
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
HTTP_DEFAULT_PORT = 80


class SettingsError(Exception):
    """The configuration file cannot be used; ``str()`` is one line a mistake."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Listen(_Section):
    """Where the gateway listens. Port 0 takes any free port."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000


class WorkerSettings(_Section):
    """One vLLM server: a name for logs and metrics, and its plain-HTTP root."""

    name: Name
    url: str

    @field_validator("url")
    @classmethod
    def _is_http_root(cls, url: str) -> str:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} has no usable port") from error
        if parts.scheme != "http" or not parts.hostname or port == 0:
            raise ValueError(f"{url!r} is not of the form http://host:port")
        if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"{url!r} must be the worker's root: http://host:port")
        return url

    @property
    def host(self) -> str:
        """Name or address to connect to."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """TCP port to connect to."""
        return urlsplit(self.url).port or HTTP_DEFAULT_PORT


class Golden(_Section):
    """A prompt whose greedy first token is known: a worker's test before it gets traffic."""

    prompt: Annotated[str, Field(min_length=1)]
    expected_text: Annotated[str, Field(min_length=1)]


class ModelSettings(_Section):
    """One public model and the workers that serve it under the same name."""

    name: Name
    max_model_len: Count
    golden: Golden | None = None
    provenance: dict[str, Scalar] = {}
    workers: Annotated[tuple[WorkerSettings, ...], Field(min_length=1, strict=False)]


class AdmissionLimit(_Section):
    """How many requests may be under way, how many may wait, and for how long."""

    max_inflight: Count = 64
    max_queued: Annotated[int, Field(ge=0)] = 256
    queue_timeout_s: Seconds = 30.0


class Timeouts(_Section):
    """Limits on waiting; ``idle_s`` is the longest silence within a body, in either direction."""

    connect_s: Seconds = 2.0
    first_byte_s: Seconds = 300.0
    idle_s: Seconds = 120.0
    total_s: Seconds = 1800.0


class Limits(_Section):
    """Sizes above which a request is refused without asking a worker.

    ``chars_per_token`` bounds text prompts: a string longer than ``max_model_len *
    chars_per_token`` characters is refused here; anything shorter is counted exactly by the
    worker.
    """

    max_body_bytes: Count = 4 * 1024 * 1024
    chars_per_token: Count = 16


class ApiKey(_Section):
    """A caller and the SHA-256 of the key it sends, 64 hexadecimal digits."""

    name: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]


class Settings(_Section):
    """The whole file. See ``service/README.md`` for the table of every key."""

    listen: Listen = Listen()
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1, strict=False)]
    admission: AdmissionLimit = AdmissionLimit()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    api_keys: Annotated[tuple[ApiKey, ...], Field(strict=False)] = ()
    drain_timeout_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 30.0
    access_log: bool = True

    @model_validator(mode="after")
    def _names_are_unique(self) -> Settings:
        _refuse_duplicates("model", [model.name for model in self.models])
        _refuse_duplicates("worker", [w.name for model in self.models for w in model.workers])
        _refuse_duplicates("API key", [key.name for key in self.api_keys])
        return self


def _refuse_duplicates(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two entries share the {what} name {twice[0]!r}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and leaves dates as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_settings(path: Path) -> Settings:
    """Read and check the configuration.

    Args:
        path: the YAML file.

    Returns:
        The frozen settings.

    Raises:
        SettingsError: the file cannot be read, is not YAML, or breaks a rule; one line a mistake.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text") from error
    try:
        document = yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}{_yaml_reason(error)}") from error
    if not isinstance(document, dict):
        raise SettingsError(f"{path}: expected a mapping with at least the key 'models'")
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise SettingsError("\n".join(_reasons(path, error))) from error


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
    return f"{where}: {problem}"


def _reasons(path: Path, error: ValidationError) -> list[str]:
    return [
        f"{path}: {_place(item['loc'])}{item['msg'].removeprefix('Value error, ')}"
        for item in error.errors(include_url=False)
    ]


def _place(location: tuple[int | str, ...]) -> str:
    """Return ``models[0].workers[1].url: `` for a pydantic location."""
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part}]"
        else:
            place += f".{part}" if place else str(part)
    return f"{place}: " if place else ""
