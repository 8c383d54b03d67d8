"""One rival compressor on one model: ``python rival_compressors.py JOB.json``, in its environment.

Imports nothing of taut: what pins other versions of torch or transformers than taut does lives
beside it this way. The result is a dense model of the weights that the rival's own modules multiply
by, found by showing each of them the unit vectors. So every rival is judged by the same code, and
no reader of its format stands between.
"""

# mypy: ignore-errors

import importlib.metadata
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def llm_compressor(job, tokens, *before):
    """GPTQ or what else follows transforms, in llm-compressor."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch.utils.data import DataLoader

    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=job["symmetric"],
        strategy="group",
        group_size=job["group_size"],
    )
    scheme = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    last = (QuantizationModifier if before else GPTQModifier)(
        config_groups=scheme, ignore=["lm_head"]
    )
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype="auto", trust_remote_code=False
    )
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    oneshot(
        model=model,
        dataset=DataLoader(rows, batch_size=1),
        recipe=[*before, last],
        num_calibration_samples=len(rows),
        max_seq_length=tokens.shape[1],
    )
    return model


def llm_compressor_awq(job, tokens):
    """AWQ in llm-compressor."""
    from llmcompressor.modifiers.transform.awq import AWQModifier

    return llm_compressor(job, tokens, AWQModifier())


def auto_round(job, tokens):
    """AutoRound, 200 steps a block."""
    from auto_round import AutoRound

    rounding = AutoRound(
        model=job["model"],
        scheme="W4A16",
        group_size=job["group_size"],
        sym=job["symmetric"],
        iters=200,
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        dataset=list(torch.split(tokens, 8)),
        device_map=job["device"],
    )
    rounding.quantize_and_save(str(Path(job["output"]) / "own"), format="fake")
    return AutoModelForCausalLM.from_pretrained(_saved(job), dtype="auto", trust_remote_code=False)


def gptqmodel(job, tokens):
    """GPTQ in GPTQModel."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=job["group_size"], sym=job["symmetric"])
    model = GPTQModel.load(job["model"], config)
    rows = [
        {"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in tokens
    ]
    model.quantize(rows, batch_size=1)
    model.save(str(Path(job["output"]) / "own"))
    return GPTQModel.load(_saved(job), backend=BACKEND.TORCH, device=job["device"]).model


METHODS = {
    "llm-compressor": (llm_compressor, "llmcompressor"),
    "llm-compressor-awq": (llm_compressor_awq, "llmcompressor"),
    "auto-round": (auto_round, "auto-round"),
    "gptqmodel": (gptqmodel, "gptqmodel"),
}


def _saved(job):
    """The folder with config.json that a rival made below ``own``."""
    return str(next((Path(job["output"]) / "own").rglob("config.json")).parent)


def dense(job, model):
    """The base model with the weights that the rival's modules multiply by, and its other ones."""
    plain = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype="auto", trust_remote_code=False
    )
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layers = {name for name, one in plain.named_modules() if isinstance(one, torch.nn.Linear)}
    layers.discard("lm_head")
    for name, value in plain.named_parameters():
        layer = name.removesuffix(".weight")
        if layer in layers and name.endswith(".weight"):
            found = multiplied(model.get_submodule(layer), value.shape[1])
        else:
            found = own[name]
        if found.shape != value.shape:
            raise SystemExit(f"{name}: {tuple(found.shape)} of the rival, {tuple(value.shape)}")
        value.data = found.detach().cpu().to(value.dtype)
    return plain


@torch.no_grad()
def multiplied(module, width):
    """The weight [N, K] of anything that maps [..., K] to [..., N] linearly."""
    tensors = [*module.parameters(), *module.buffers()]
    floats = [one for one in tensors if one.is_floating_point()]
    kind = {"device": tensors[0].device, "dtype": floats[0].dtype}
    shifted = module(torch.eye(width, **kind)[None])[0]
    if getattr(module, "bias", None) is not None:
        shifted = shifted - module(torch.zeros(1, 1, width, **kind))[0]
    return shifted.T


def main() -> None:
    """Compress, write the dense model and what was measured."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    make, package = METHODS[job["method"]]
    tokens = torch.tensor(json.loads(Path(job["tokens"]).read_text(encoding="utf-8")))
    started = time.monotonic()
    model = make(job, tokens)
    seconds = time.monotonic() - started
    output = Path(job["output"]) / "dense"
    dense(job, model).save_pretrained(output)
    AutoTokenizer.from_pretrained(job["model"], trust_remote_code=False).save_pretrained(output)
    told = {"seconds": seconds, "version": f"{package} {importlib.metadata.version(package)}"}
    (output.parent / "measured.json").write_text(
        json.dumps(told, allow_nan=False), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
