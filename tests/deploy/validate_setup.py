"""Tiny models on disk and a fake model server for the validation tests. Nothing here is a real LLM
or vLLM."""

from __future__ import annotations

import dataclasses
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from taut_deploy.validate import Access, Directories, Items, Sampling, Servers, ValidationJob

WORDS = [f"w{i}" for i in range(60)]
VOCABULARY = {"<s>": 0, "<unk>": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_tokenizer(path: Path, *, bos: bool = False, words: dict[str, int] = VOCABULARY) -> None:
    """A word-level tokenizer; with ``bos`` it puts ``<s>`` in front of a text by itself."""
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")
    wrapped.save_pretrained(path)


def write_model(
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = len(VOCABULARY),
    bos: bool = False,
    max_positions: int = 128,
) -> Path:
    """A random two-layer Llama with weights large enough that its predictions differ between
    tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(path)
    write_tokenizer(path, bos=bos)
    return path


def perturb(
    source: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]
) -> Path:
    """Copy a model with every tensor passed through ``change(name, tensor)``."""
    return rewrite(source, target, lambda tensors: {k: change(k, v) for k, v in tensors.items()})


def add_noise(source: Path, target: Path, share: float) -> Path:
    """Copy a model with noise on every tensor, ``share`` of its standard deviation."""
    generator = torch.Generator().manual_seed(0)
    return perturb(
        source,
        target,
        lambda _, t: t + share * t.std().nan_to_num() * torch.randn(t.shape, generator=generator),
    )


def rewrite(
    source: Path,
    target: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    **config: Any,
) -> Path:
    """Copy a model with changed tensors and configuration keys."""
    target.mkdir()
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = change(load_file(source / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    merged = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(merged))
    return target


def write_text(path: Path, tokens: int, seed: int = 0) -> Path:
    """Random words, ten a line."""
    generator = torch.Generator().manual_seed(seed)
    words = [WORDS[i] for i in torch.randint(len(WORDS), (tokens,), generator=generator).tolist()]
    path.write_text("\n".join(" ".join(words[i : i + 10]) for i in range(0, tokens, 10)) + "\n")
    return path


GROUPS = {
    "sampling": Sampling,
    "items": Items,
    "directories": Directories,
    "servers": Servers,
    "access": Access,
}


def job_of(**settings: Any) -> ValidationJob:
    """A job from its settings as if it had no groups."""
    for name, group in GROUPS.items():
        own = {field.name for field in dataclasses.fields(group)} & settings.keys()
        settings[name] = group(**{key: settings.pop(key) for key in own})
    return ValidationJob(**settings)


def job_for(folder: Path, **changes: Any) -> ValidationJob:
    """A small job; ``folder`` holds ``baseline/``, ``candidate/`` and ``text.txt``."""
    defaults: dict[str, Any] = {
        "baseline": str(folder / "baseline"),
        "candidate": str(folder / "candidate"),
        "text": folder / "text.txt",
        "policy": "balanced",
        "output": folder / "report",
        "sequences": 6,
        "sequence_length": 24,
        "bootstrap": 300,
        "noise_sequences": 2,
    }
    return job_of(**(defaults | changes))


class FakeServer:
    """The part of vLLM's HTTP interface that the validation uses, answered by a tiny model through
    torch.

    It is a fake: the shape of its answers was copied from the interface's definition, not from a
    running server. ``alter`` may change an answer (path, body) → body before it is sent; a returned
    integer is sent as an HTTP error, None ends the connection without an answer.
    """

    def __init__(self, model_path: Path, max_logprobs: int = 20) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
        self.max_logprobs = max_logprobs
        self.alter: Callable[[str, Any], Any] = lambda _path, body: body
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.pins: set[str | None] = set()
        self.itl_s = 0.0
        self.default_temperature = 1.0
        self.root = str(model_path)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to one request."""
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "root": self.root, "max_model_len": 128, "created": 1}]}
        if path == "/tokenize" and "messages" in body:
            return self.conversation(body)
        if path == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {
                "tokens": ids["input_ids"],
                "count": len(ids["input_ids"]),
                "max_model_len": 128,
            }
        if path == "/detokenize":
            return {"prompt": self.tokenizer.decode(body["tokens"])}
        if path == "/v1/completions" and body.get("stream"):
            return self.stream(body)
        if path == "/v1/completions" and "prompt_logprobs" not in body:
            return self.written(body)
        if path == "/v1/completions":
            if body["prompt_logprobs"] > self.max_logprobs:
                return 400
            return {"choices": [{"text": "", "prompt_logprobs": self.prompt_logprobs(body)}]}
        return 404

    def stream(self, body: dict[str, Any]) -> Iterator[bytes]:
        """Server-sent events at the pace of ``itl_s``, as many as tokens were asked for."""
        for count in range(1, body["max_tokens"] + 1):
            time.sleep(self.itl_s)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            event = {"choices": [{"index": 0, "text": "w"}], "usage": usage}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def conversation(self, body: dict[str, Any]) -> Any:
        """The tokens of a conversation, or the refusal of a model without a template."""
        if self.tokenizer.chat_template is None:
            return 400
        ids = self.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=False
        )
        return {"tokens": ids, "count": len(ids), "max_model_len": 128}

    def written(self, body: dict[str, Any]) -> dict[str, Any]:
        """A continuation, one full forward pass a token; by the server's temperature by default."""
        ids, told = list(body["prompt"]), []
        temperature = body.get("temperature", self.default_temperature)
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        for _ in range(body["max_tokens"]):
            with torch.inference_mode():
                logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            if temperature:
                shares = (logits / temperature).softmax(-1)
                ids.append(int(torch.multinomial(shares, 1, generator=generator)))
            else:
                ids.append(int(logits.argmax()))
            told.append(float(logits.log_softmax(-1)[ids[-1]]))
        text = self.tokenizer.decode(ids[len(body["prompt"]) :], skip_special_tokens=True)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        choice = {"text": text, "finish_reason": "length", "logprobs": {"token_logprobs": told}}
        return {"choices": [choice], "usage": usage}

    def prompt_logprobs(self, body: dict[str, Any]) -> list[Any]:
        """Null, then one dictionary per token: the K most likely and the true one, keyed by id as
        string."""
        ids = body["prompt"]
        with torch.inference_mode():
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        entries: list[Any] = [None]
        for row, token in zip(logprobs[:-1], ids[1:], strict=True):
            chosen = {token, *row.topk(body["prompt_logprobs"]).indices.tolist()}
            entries.append({str(i): {"logprob": row[i].item(), "rank": None} for i in chosen})
        return entries

    @contextmanager
    def listening(self, tls: ssl.SSLContext | None = None) -> Iterator[str]:
        """Serve on a free loopback port; yields the base URL."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond({})

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self._respond(json.loads(self.rfile.read(length)))

            def _respond(self, body: dict[str, Any]) -> None:
                fake.requests.append((self.path, body, self.headers.get("Authorization")))
                fake.pins.add(self.headers.get("X-Taut-Variant"))
                answer = fake.alter(self.path, fake.answer(self.path, body))
                if answer is None:
                    self.close_connection = True
                    return
                status, content = (
                    (answer, {"error": {"message": f"refused with {answer}"}})
                    if isinstance(answer, int)
                    else (200, answer)
                )
                if isinstance(content, Iterator):
                    self._stream(content)
                    return
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, events: Iterator[bytes]) -> None:
                self.send_response(200)
                self.end_headers()
                for event in events:
                    self.wfile.write(event)

            def log_message(self, *_: Any) -> None:
                """Tests stay quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            scheme = "http" if tls is None else "https"
            yield f"{scheme}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
