"""What ``taut serve`` can be told, on the command line or in a YAML file; unknown keys refused."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from taut_deploy.errors import RecipeError


class ServeSettings(BaseModel):
    """Settings of one ``taut serve``.

    ``gateway`` is merged into the gateway's configuration file as it is (admission, timeouts,
    api_keys …).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "smollm2-135m-instruct"
    recipe: str = "w8a8"
    baseline: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_gib: Annotated[int, Field(ge=1)] = 1
    vllm_args: tuple[str, ...] = ()
    gateway: dict[str, Any] = Field(default_factory=dict)


def load_serve_settings(path: Path | None, overrides: dict[str, Any]) -> ServeSettings:
    """Settings from a file, with command-line values on top.

    Args:
        path: YAML file, or None.
        overrides: values given on the command line; None entries are left out.

    Raises:
        RecipeError: the file cannot be read, or a key or value is wrong (named).
    """
    data: Any = {}
    if path is not None:
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot be read") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(data, dict):
            raise RecipeError(f"{path}: expected a mapping")
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return ServeSettings.model_validate({**data, **given})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise RecipeError(f"{path or 'taut serve'}: {key}: {what}") from error
