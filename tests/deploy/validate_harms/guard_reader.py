"""What the live guard asks of a variant's workers, answered by a checkpoint in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from taut_deploy.validate.checkpoint_source import CheckpointSource
from taut_service.guard.divergence import Distribution
from taut_service.guard.tap import Heard


def _kept(scale: torch.Tensor, _: Any, __: Any, values: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(torch.float8_e4m3fn).max
    return (values / scale).clamp(-most, most).to(torch.float8_e4m3fn).to(values.dtype) * scale


class DirectoryReader:
    """Stands for :class:`taut_service.guard.reader.Reader`.

    Args:
        path: of the checkpoint.
        temperature: that its worker draws by.
        delay_s: seconds that it says a reading took.
        seed: of what it draws.
    """

    def __init__(
        self, path: Path, *, temperature: float = 1.0, delay_s: float = 0.1, seed: int = 0
    ) -> None:
        self.source = CheckpointSource(path, "candidate", "cpu", torch.float32)
        self.temperature = temperature
        self.delay_s = delay_s
        self.generator = torch.Generator().manual_seed(seed)

    def keep_in_fp8(self, share: float) -> None:
        """Round keys and values to FP8 by the checkpoint's scales, cut to a share of themselves."""
        scales = dict(self.source._model.state_dict())
        for name, module in self.source._model.named_modules():
            for part in ("k", "v"):
                if name.endswith(f"self_attn.{part}_proj"):
                    scale = scales[f"{name.removesuffix('_proj')}_scale"].float() * share
                    module.register_forward_hook(partial(_kept, scale))

    async def tokens(self, fields: Mapping[str, Any]) -> list[int]:
        tokenizer = self.source.tokenizer
        if "messages" in fields:
            return tokenizer.conversation(fields["messages"], fields.get("tools") or ())
        return tokenizer.encode(fields["prompt"], special=fields.get("add_special_tokens", True))

    def logs(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities [places, vocabulary] of each next token."""
        return self.source.score([*tokens, tokens[-1]]).logits.float().log_softmax(-1)

    async def distributions(
        self, tokens: list[int], prompt: int, top_k: int
    ) -> tuple[list[Distribution], float]:
        found = []
        for row, token in zip(self.logs(tokens)[prompt - 1 : -1], tokens[prompt:], strict=True):
            shown = {token, *row.topk(top_k).indices.tolist()}
            found.append({one: float(row[one]) for one in shown})
        return found, self.delay_s

    async def ask(self, path: str, fields: Mapping[str, Any], tokens: int = 1) -> Any:
        """Draw an answer."""
        ids = await self.tokens(fields)
        before = len(ids)
        for _ in range(fields["max_tokens"]):
            shares = (self.logs(ids)[-1] / self.temperature).softmax(-1)
            ids.append(int(torch.multinomial(shares, 1, generator=self.generator)))
        text = self.source.tokenizer.written(ids[before:])
        named = {"message": {"content": text}} if "messages" in fields else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": "stop", **named}]}

    async def heard(self, fields: Mapping[str, Any], variant: str) -> Heard:
        """Return a request and its answer, as a client got it."""
        answer = json.dumps(await self.ask("", fields)).encode()
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        return Heard("m", variant, path, json.dumps(fields).encode(), [answer])
