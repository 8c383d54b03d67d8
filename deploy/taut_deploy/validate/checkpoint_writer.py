"""Answers of a model in memory: greedy decoding by transformers, as a server at temperature 0."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from taut_deploy.validate.generation import Answer, FinishReason, Generation, cut_at_stop

Decode = Callable[[list[int]], str]


class _AtStopText(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Ends when a stop text has been written."""

    def __init__(self, decode: Decode, prompt: int, stop: Sequence[str]) -> None:
        self._decode, self._prompt, self._stop = decode, prompt, stop

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        written = self._decode(input_ids[0, self._prompt :].tolist())
        ended = cut_at_stop(written, self._stop) is not None
        return torch.tensor([ended], device=input_ids.device)


def write_answer(
    model: Any, decode: Decode, ids: Sequence[int], generation: Generation, device: torch.device
) -> Answer:
    """Continue ``ids`` greedily.

    Args:
        model: of transformers, in evaluation mode.
        decode: text of token ids without special tokens.
        ids: the prompt.
        generation: length and stop texts.
        device: of the model.
    """
    tokens = torch.tensor([list(ids)], device=device)
    stops = [_AtStopText(decode, len(ids), generation.stop)] if generation.stop else []
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=generation.max_tokens,
            do_sample=False,
            # Settings of sampling that greedy decoding would warn about.
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=_pad_token(model),
            stopping_criteria=StoppingCriteriaList(stops),
        )
    written = out[0, len(ids) :].tolist()
    text = decode(written)
    cut = cut_at_stop(text, generation.stop)
    own_end = bool(written) and written[-1] in _end_tokens(model)
    reason: FinishReason = "stop" if cut is not None or own_end else "length"
    return Answer(text if cut is None else cut, len(written), reason)


def _end_tokens(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset() if ends is None else frozenset(ends if isinstance(ends, list) else [ends])


def _pad_token(model: Any) -> int:
    """Any token: with one sequence nothing is padded, and unset it is warned about."""
    return min(_end_tokens(model), default=0)
