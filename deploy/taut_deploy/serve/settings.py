"""What ``taut serve`` can be told, on the command line or in a YAML file; unknown keys refused."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from taut_deploy.documents import read_yaml_text
from taut_deploy.errors import RecipeError
from taut_deploy.recorded_hashes import Verification
from taut_deploy.strict_yaml import parse_mapping, validate_mapping
from taut_deploy.worker import KernelMode


class ServeSettings(BaseModel):
    """Settings of one ``taut serve``.

    ``kernels``, ``fused_ops`` and ``decode_attention`` are those of ``taut worker``, which chooses
    where they are left out; the uncompressed baseline is not told ``require``, which nothing of it
    could meet. ``verify: full`` reads every file of the checkpoint before the workers start.
    ``trust_remote_code`` lets the model's own Python code run, here and in the workers.
    ``gateway`` is merged into the gateway's configuration file as it is (admission,
    timeouts, api_keys …).
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
    kernels: KernelMode | None = None
    fused_ops: bool | None = None
    decode_attention: bool | None = None
    verify: Verification = "recorded"
    vllm_args: tuple[str, ...] = ()
    trust_remote_code: bool = False
    gateway: dict[str, Any] = Field(default_factory=dict)

    @field_validator("kernels", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        # YAML reads a bare `off` as false.
        return "off" if value is False else value


def load_serve_settings(path: Path | None, overrides: dict[str, Any]) -> ServeSettings:
    """Settings from a file, with command-line values on top.

    Args:
        path: YAML file, or None.
        overrides: values given on the command line; None entries are left out.

    Raises:
        RecipeError: the file cannot be read, or a key or value is wrong (named).
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            text = read_yaml_text(path, RecipeError)
        except (OSError, ValueError) as error:
            raise RecipeError(f"{path}: cannot be read") from error
        data = parse_mapping(text, str(path), RecipeError)
    given = {key: value for key, value in overrides.items() if value is not None}
    return validate_mapping(
        ServeSettings, {**data, **given}, str(path or "taut serve"), RecipeError
    )
