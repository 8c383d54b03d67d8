"""Golden prompts: run beside the calibration, one of them ends as the readiness probe."""

from pathlib import Path
from typing import Any

import torch

from taut_deploy.checkpoint import Golden
from taut_deploy.errors import ModelError
from taut_deploy.models.pretrained import load_tokenizer

# Short, factual, and of different shapes; the one the compressed model answers most decidedly is
# kept.
PROMPTS = (
    "The capital of France is",
    "One, two, three, four, five, six, seven,",
    "Monday, Tuesday, Wednesday, Thursday,",
    "The opposite of hot is",
    "Water freezes at zero degrees",
    "To be, or not to be, that is the",
)


def tokenize_prompts(model: Path, *, trust_remote_code: bool = False) -> list[torch.Tensor]:
    """Each prompt's ids, [1, T], tokenised as a completion request would be."""
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    return [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in PROMPTS]


def ordinary_tokens(model: Path, *, trust_remote_code: bool = False) -> torch.Tensor:
    """The ids [V] of the tokenizer's own vocabulary, without tokens that were added later."""
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    added = set(tokenizer.get_added_vocab().values())
    return torch.tensor([id_ for id_ in tokenizer.get_vocab().values() if id_ not in added])


def require_embedded(streams: list[torch.Tensor], vocab_size: int, model: Path) -> None:
    """Check that every token has a row in the embedding.

    Args:
        streams: token ids.
        vocab_size: rows of the embedding.
        model: directory with the tokenizer.

    Raises:
        ModelError: the tokenizer gives an id beyond it.
    """
    largest = max(int(ids.max()) for ids in streams)
    if largest >= vocab_size:
        raise ModelError(
            f"{model / 'config.json'}: vocab_size is {vocab_size}, but the tokenizer gives the id "
            f"{largest}; the two are of different models"
        )


def choose_golden(
    logits: list[torch.Tensor], model: Path, *, trust_remote_code: bool = False
) -> Golden:
    """The prompt with the widest gap between first and second token.

    Args:
        logits: one [V] fp32 vector per prompt, in order.
        model: directory with the tokenizer.
        trust_remote_code: let the model's own Python code run.

    Raises:
        ModelError: if no answer is visible text, or a logit is not finite.
    """
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    best: Golden | None = None
    for prompt, scores in zip(PROMPTS, logits, strict=True):
        if not torch.isfinite(scores).all():
            raise ModelError(
                f"{model}: NaN or infinite logits for the readiness prompt {prompt!r}, so the "
                "weights are broken or overflow in the dtype of config.json"
            )
        top = scores.topk(2)
        token = int(top.indices[0])
        margin = float(top.values[0] - top.values[1])
        text = tokenizer.decode([token])
        if text.strip() and (best is None or margin > best.margin):
            best = Golden(prompt, text, token, round(margin, 4))
    if best is None:
        raise ModelError(
            f"{model}: answers every readiness prompt with white space, so the weights are broken"
        )
    return best


@torch.inference_mode()
def golden_of(model: Any, directory: Path, *, trust_remote_code: bool = False) -> Golden:
    """The golden prompt of a whole model in memory.

    Args:
        model: a causal LM of transformers, ready to run.
        directory: with its tokenizer.
        trust_remote_code: let the model's own Python code run.

    Raises:
        ModelError: if no answer is visible text, or a logit is not finite.
    """
    prompts = tokenize_prompts(directory, trust_remote_code=trust_remote_code)
    device = next(model.parameters()).device
    logits = [
        model(input_ids=prompt.to(device), use_cache=False).logits[0, -1].float().cpu()
        for prompt in prompts
    ]
    return choose_golden(logits, directory, trust_remote_code=trust_remote_code)
