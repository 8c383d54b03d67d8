"""A dense model, whole in memory: what is cut smaller, what teaches, and the way back to disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from taut_deploy.compress.job import compute_dtype, stored_dtype
from taut_deploy.compress.kept_files import kept_files
from taut_deploy.compress.shrink.axes import EXPERT_COUNTS
from taut_deploy.compress.workspace import Workspace
from taut_deploy.errors import ModelError
from taut_deploy.files import copy_files, write_json_atomically
from taut_deploy.models.directory import read_config
from taut_deploy.models.pretrained import loading_class, refusal
from taut_deploy.out_of_memory import let_pass

_SHARD_BYTES = 2 << 30
# Of config.json, what a model's shape decides.
_SHAPE_KEYS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "hidden_size"),
    *EXPERT_COUNTS,
)


def load_dense(
    directory: Path, device: str, *, trust_remote_code: bool, held_on: str | None = None
) -> Any:
    """The model of a directory, ready to run, nothing in it trained.

    Args:
        directory: of the model.
        device: ``cpu`` or ``cuda``, where it computes.
        trust_remote_code: let the model's own Python code run.
        held_on: device of the weights until they are moved; ``device`` if None.

    Raises:
        ModelError: transformers cannot load it.
    """
    import taut_deploy.hf  # noqa: F401  registers quant_method taut

    build = loading_class(directory, trust_remote_code=trust_remote_code)
    dtype = compute_dtype(stored_dtype(directory), device)

    def read(attention: str) -> Any:
        return build.from_pretrained(
            directory,
            attn_implementation=attention,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )

    try:
        model = _with_attention(read)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        let_pass(error)
        raise ModelError(f"{directory}: cannot be loaded ({refusal(directory, error)})") from error
    return model.to(held_on or device).eval().requires_grad_(False)


def _with_attention(read: Callable[[str], Any]) -> Any:
    """Read a model with torch's attention, or with its own where it knows no other."""
    try:
        return read("sdpa")
    except ValueError as error:
        if "scaled_dot_product" not in str(error):
            raise
        return read("eager")


def write_dense(
    model: Any, source: Path, workspace: Workspace, *, trust_remote_code: bool = False
) -> None:
    """Write weights in shards, the configuration as it is now, and the files that travel unchanged.

    Tensors get the names that checkpoints of the family have: experts, which transformers stacks,
    are one by one.

    Args:
        model: a causal LM of transformers; a tied head is left out, as it was in the source.
        source: directory of the model it was made from, whose dtype the weights are stored in.
        workspace: to write into.
        trust_remote_code: take the model's own Python code along.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from transformers.core_model_loading import revert_weight_conversion

    target = workspace.directory
    dtype = stored_dtype(source)
    buffers = {name for name, _ in model.named_buffers()}  # counts, or scores that stay exact
    state = {
        name: value if name in buffers else value.to(dtype)
        for name, value in model.state_dict().items()
    }
    if model.config.get_text_config().tie_word_embeddings:
        head = model.get_output_embeddings()
        tied = {name for name, module in model.named_modules() if module is head}
        state = {
            name: value for name, value in state.items() if name.rpartition(".")[0] not in tied
        }
    state = revert_weight_conversion(model, state)
    split = split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda value: int(value.nbytes),
        filename_pattern="model{suffix}.safetensors",
        # Experts are views of one stack, and still tensors of their own.
        get_storage_id=lambda value: (value.data_ptr(), value.shape),
        max_shard_size=_SHARD_BYTES,
    )
    for shard, names in split.filename_to_tensors.items():
        workspace.save_shard(shard, {name: state[name].clone() for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json_atomically(target / "model.safetensors.index.json", index)
    write_json_atomically(target / "config.json", _config(read_config(source), model.config))
    copy_files(kept_files(source, with_code=trust_remote_code), source, target)


def _config(document: dict[str, Any], config: Any) -> dict[str, Any]:
    """The source's document with what changed, and nothing that only transformers would add."""
    now = config.to_dict()
    changed = {key: now[key] for key in _SHAPE_KEYS if now.get(key) is not None}
    lists = {
        key: now[key] for key, value in document.items() if isinstance(value, list) and key in now
    }
    return {**document, **changed, **lists}
