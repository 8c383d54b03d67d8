"""Next-token distributions from a Hugging Face directory, computed by transformers.

Of compressed-tensors checkpoints, transformers 5.19 with compressed-tensors 0.17 unpacks the
weights once, before the first forward pass, and keeps rounding the activations of every layer whose
scheme asks for it (W8A8: int8, one scale per token); ``tests/deploy/test_validate_checkpoints.py``
proves both against own arithmetic. The rounding runs in the model's type: in bf16 its scales have
eight bits, and the error of a Gaussian activation is 0.82 % of its norm where an int8 kernel with
fp32 scales leaves 0.76 % (512 x 576, seed 0), so W8A8 looks slightly worse here than served.
Comparing servers shows the kernels themselves.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

import taut_deploy.hf  # noqa: F401  registers quant_method taut
from taut_deploy.cpu_products import WideProducts
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import require_contained
from taut_deploy.models.pretrained import loading_class, refusal
from taut_deploy.models.remote_code import why_code_is_needed
from taut_deploy.models.values import is_finite
from taut_deploy.out_of_memory import let_pass
from taut_deploy.validate.checkpoint_tokenizer import CheckpointTokenizer
from taut_deploy.validate.checkpoint_writer import write_answer
from taut_deploy.validate.configuration import read_config
from taut_deploy.validate.divergence import FullDistribution
from taut_deploy.validate.errors import CouldNotValidateError, NotOfferedError, one_line
from taut_deploy.validate.generation import Answer, Generation, Message, within
from taut_deploy.validate.weights import RoundedWeight, plain_weights, rounded_weights

_LOAD_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


_CACHE_SCALES = (".k_scale", ".v_scale")


class CheckpointSource:
    """A model in memory that answers with full distributions.

    Args:
        path: Hugging Face directory with ``config.json`` and safetensors.
        role: ``baseline`` or ``candidate``, named in errors.
        device: torch device.
        dtype: type to compute in; by default the checkpoint's own, as it is served.
        trust_remote_code: let the model's own Python code run.

    Raises:
        CouldNotValidateError: the directory is missing, incomplete, unreadable or of an unknown
            kind.
    """

    def __init__(
        self,
        path: Path,
        role: str,
        device: str,
        dtype: torch.dtype | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self.path, self.role = path, role
        self._trust_remote_code = trust_remote_code
        self.config = read_config(path, role)
        _refuse_unknown_quantization(self.config, path, role)
        self._device = usable_device(device)
        self._model = self._load(dtype)
        self._unpacked = False
        self._tokenizer: CheckpointTokenizer | None = None

    def _load(self, dtype: torch.dtype | None) -> Any:
        try:
            require_contained(self.path)
        except ModelError as error:
            raise CouldNotValidateError(f"--{self.role} {error}") from error
        try:
            with _silenced_bars(), _silenced_report():
                build = loading_class(self.path, trust_remote_code=self._trust_remote_code)
                model, info = build.from_pretrained(
                    self.path,
                    dtype=dtype or "auto",
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=self._trust_remote_code,
                    # Reported below by name; the library would only say that there are some.
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except ModelError as error:
            raise CouldNotValidateError(f"--{self.role} {error}") from error
        except _LOAD_ERRORS as error:
            let_pass(error)
            needed = why_code_is_needed(self.path) if "trust_remote_code" in str(error) else None
            message = f"{self.role} {self.path}: cannot be loaded: {refusal(self.path, error, 300)}"
            raise CouldNotValidateError(needed or message) from error
        # transformers fills absent tensors with random numbers and only warns.
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            # A mismatch is a tuple of name and two shapes.
            names = sorted(key if isinstance(key, str) else key[0] for key in info[problem])
            if names:
                raise CouldNotValidateError(
                    f"{self.role} {self.path}: {len(names)} {problem.split('_')[0]} tensors, "
                    f"the first is {names[0]}"
                )
        broken = [name for name, value in model.state_dict().items() if not is_finite(value)]
        if broken:
            raise CouldNotValidateError(
                f"{self.role} {self.path}: {broken[0]} holds NaN or infinity; the weights are "
                "broken"
            )
        self._refuse_useless_scales(model)
        if dtype is not None:
            _follow_inputs(model)
        return model.to(self._device).eval()

    def _refuse_useless_scales(self, model: torch.nn.Module) -> None:
        """Refuse scales of a KV cache that keys and values cannot be divided by."""
        for name, value in model.state_dict().items():
            if name.endswith(_CACHE_SCALES) and not bool((value > 0).all()):
                raise CouldNotValidateError(
                    f"{self.role} {self.path}: {name} has {float(value.min()):g}, and the scale of "
                    "a KV cache is above zero; compress the model again"
                )

    @property
    def dtype(self) -> torch.dtype:
        """The floating type the model computes in."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def model_name(self) -> None:
        """Directories have no served name."""
        return

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model takes, if its configuration says so."""
        value = self.config.get("max_position_embeddings")
        return int(value) if isinstance(value, int) else None

    @torch.inference_mode()
    def score(self, ids: Sequence[int]) -> FullDistribution:
        """Run one sequence.

        Args:
            ids: token ids.

        Returns:
            Logits [len(ids) - 1, vocabulary] in the model's type.

        Raises:
            CouldNotValidateError: an id is outside the vocabulary or a logit is not finite.
        """
        vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        if max(ids) >= vocabulary:
            raise CouldNotValidateError(
                f"{self.role} {self.path}: token {max(ids)} is outside its vocabulary of "
                f"{vocabulary}"
            )
        tokens = torch.tensor([list(ids)], device=self._device)
        # compressed-tensors unpacks, with a bar, in the first forward pass; later passes leave
        # stderr to whoever shows progress there.
        with contextlib.nullcontext() if self._unpacked else _silenced_bars(), WideProducts():
            logits = self._model(tokens, use_cache=False).logits[0, :-1]
        self._unpacked = True
        if not torch.isfinite(logits).all():
            position = int((~torch.isfinite(logits)).any(-1).nonzero()[0])
            raise CouldNotValidateError(
                f"{self.role} {self.path}: NaN or infinite logits at position {position} of a "
                "sequence; the weights are broken"
            )
        return FullDistribution(logits)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Its matrices, by the name of their module."""
        return plain_weights(self._model)

    @property
    def rounded_weights(self) -> dict[str, RoundedWeight]:
        """Those that were quantised, as they are multiplied; known once something was scored."""
        return rounded_weights(self._model) if self._unpacked else {}

    @property
    def tokenizer(self) -> CheckpointTokenizer:
        """The directory's tokenizer, loaded when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = CheckpointTokenizer(
                self.path, trust_remote_code=self._trust_remote_code
            )
        return self._tokenizer

    def write(self, ids: Sequence[int], generation: Generation) -> Answer:
        """Continue a prompt greedily.

        Args:
            ids: token ids.
            generation: length and stop texts.

        Raises:
            CouldNotValidateError: the prompt fills the context, or the tokenizer does not load.
        """
        shortened = within(generation, len(ids), self.max_positions)
        if shortened is None:
            raise CouldNotValidateError(
                f"{self.role} {self.path}: a prompt of {len(ids)} tokens leaves no room in its "
                f"{self.max_positions} positions; shorten it"
            )
        with _silenced_bars(), _silenced_report(), WideProducts():
            answer = write_answer(self._model, self.tokenizer.written, ids, shortened, self._device)
        self._unpacked = True
        return answer

    def converse(
        self, messages: Sequence[Message], tools: Sequence[Message], generation: Generation
    ) -> Answer:
        """Answer a conversation; see :class:`~taut_deploy.validate.slices.measures.Speaker`.

        Raises:
            CouldNotValidateError: the chat template refuses the messages.
            NotOfferedError: no chat template, or there are tools and it knows of none.
        """
        if self.tokenizer.chat_template is None:
            raise NotOfferedError(f"{self.role} {self.path}: it has no chat template")
        if tools and "tools" not in self.tokenizer.chat_template:
            raise NotOfferedError(f"{self.role} {self.path}: its chat template teaches no tools")
        return self.write(self.tokenizer.conversation(messages, tools), generation)


def _follow_inputs(model: torch.nn.Module) -> None:
    """Let linear layers have the type of what they multiply.

    compressed-tensors makes bf16 of an FP4 weight, whatever type the model was asked for; it does
    so at the first call, in front of the layers.
    """

    def cast(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        weight = layer.weight
        if weight.dtype is torch.bfloat16 and inputs[0].dtype is not torch.bfloat16:
            weight.data = weight.data.to(inputs[0].dtype)

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(cast)


def _refuse_unknown_quantization(config: dict[str, Any], path: Path, role: str) -> None:
    """Refuse what transformers would quietly load as if it were not quantised."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise CouldNotValidateError(
            f"--{role} {path}: transformers cannot compute quant_method {method!r}; "
            "serve it and give its URL, or export it dense"
        )


def usable_device(device: str) -> torch.device:
    """Turn a device name into a device that is there.

    Raises:
        CouldNotValidateError: unknown name or absent device.
    """
    try:
        # An allocation, because torch.device("cuda:7") itself is accepted everywhere.
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CouldNotValidateError(f"--device {device}: {one_line(error, 120)}") from error


def wider_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the A/A run: fp32 for half precision, fp64 for fp32."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


@contextlib.contextmanager
def _silenced_report() -> Iterator[None]:
    """Keep transformers' table of wrong tensors off the log: the error that follows names them."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextlib.contextmanager
def _silenced_bars() -> Iterator[None]:
    """Keep the libraries' progress bars off the terminal; logging keeps its own stderr."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
