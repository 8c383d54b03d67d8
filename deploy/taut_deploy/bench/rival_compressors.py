"""One rival compressor on one model: ``python rival_compressors.py JOB.json``, in its environment.

Imports nothing of taut: what pins other versions of torch or transformers than taut does lives
beside it this way. The result is a dense model of the weights that the rival's own modules multiply
by, found by showing each of them the unit vectors. So every rival is judged by the same code, and
no reader of its format stands between.
"""

# mypy: ignore-errors

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import types
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

    channel = job["group_size"] == "channel"
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=job["symmetric"],
        strategy="channel" if channel else "group",
        group_size=None if channel else job["group_size"],
        observer="memoryless_mse",
    )
    scheme = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    given = {"config_groups": scheme, "ignore": ["lm_head"]}
    last = QuantizationModifier(**given) if before else GPTQModifier(actorder="static", **given)
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
    """AWQ in llm-compressor, searching scales with and without the weights as its examples do."""
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        # 0.14 pins what it caches for the copy to a device, and fails where there is none.
        IntermediatesCache._pin_intermediate = classmethod(lambda cls, intermediate: None)
    return llm_compressor(job, tokens, AWQModifier(duo_scaling="both"))


def auto_round(job, tokens):
    """AutoRound, 200 steps a block."""
    from auto_round import AutoRound

    rounding = AutoRound(
        model=job["model"],
        scheme="W4A16",
        group_size=_group(job),
        sym=job["symmetric"],
        iters=200,
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        dataset=list(torch.split(tokens, 8)),
        device_map=job["device"],
        # Its compilation for a CPU takes longer than its steps.
        enable_torch_compile=job["device"] != "cpu",
    )
    rounding.quantize_and_save(str(Path(job["output"]) / "own"), format="fake")
    return AutoModelForCausalLM.from_pretrained(_saved(job), dtype="auto", trust_remote_code=False)


def gptqmodel(job, tokens):
    """GPTQ in GPTQModel."""
    _stand_in_for_torchvision()
    # One thread on a machine of two cores, of which it then asks two.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    # Its order within groups wants groups; by row, the plain order costs nothing to serve.
    order = {} if _group(job) > 0 else {"desc_act": True, "act_group_aware": False}
    grid = {"bits": 4, "group_size": _group(job), "sym": job["symmetric"]}
    config = QuantizeConfig(**grid, **order, mse=2.4)
    model = GPTQModel.load(job["model"], config)
    rows = [
        {"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in tokens
    ]
    model.quantize(rows, batch_size=8)
    model.save(str(Path(job["output"]) / "own"))
    return GPTQModel.load(_saved(job), backend=BACKEND.TORCH, device=job["device"]).model


METHODS = {
    "llm-compressor": (llm_compressor, "llmcompressor", "static act-order, MSE"),
    "llm-compressor-awq": (llm_compressor_awq, "llmcompressor", "duo scaling both, MSE"),
    "auto-round": (auto_round, "auto-round", "200 steps, batches of 8"),
    "gptqmodel": (gptqmodel, "gptqmodel", "act-order, MSE 2.4"),
}
"""By name: what compresses, the package, and its settings that are not defaults or worth a word."""


def _group(job):
    """Weights a scale covers, as GPTQModel and AutoRound write it: -1 for a whole row."""
    return -1 if job["group_size"] == "channel" else job["group_size"]


def _stand_in_for_torchvision():
    """GPTQModel imports it for a model of images, without saying that it needs it."""
    import datasets  # noqa: F401  # before the stand-in: they ask whether torchvision is there

    if importlib.util.find_spec("torchvision"):
        return
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[0]].transforms = sys.modules[names[1]]
    sys.modules[names[1]].functional = sys.modules[names[2]]
    sys.modules[names[2]].InterpolationMode = types.SimpleNamespace(BICUBIC=3)


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
    make, package, settings = METHODS[job["method"]]
    tokens = torch.tensor(json.loads(Path(job["tokens"]).read_text(encoding="utf-8")))
    started = time.monotonic()
    model = make(job, tokens)
    seconds = time.monotonic() - started
    output = Path(job["output"]) / "dense"
    dense(job, model).save_pretrained(output)
    AutoTokenizer.from_pretrained(job["model"], trust_remote_code=False).save_pretrained(output)
    version = f"{package} {importlib.metadata.version(package)}; {settings}"
    told = {"seconds": seconds, "version": version}
    (output.parent / "measured.json").write_text(
        json.dumps(told, allow_nan=False), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
