"""Prove that moving code changed nothing that runs: digests of what kernels compile to.

    python kernels/tuning/fingerprints.py record before.json [--every N] [--only TEXT] [--jobs J]
    python kernels/tuning/fingerprints.py compare before.json after.json

``record`` compiles every kernel × tile of the ahead-of-time list to PTX, without a GPU, leaves out
what only names files, lines and functions, and writes a digest each. It also runs every op that has
a CPU implementation on seeded inputs and writes the digests of its results. ``compare`` exits 1
where a form or an op that both files have differs, and lists what only one of them has: forms are
matched by label and tile; one without a partner still counts as kept where its PTX is in the other
file. Digests of different versions of Triton cannot be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler

_SMALL = {"M": 3, "N": 256, "K": 256, "T": 4, "V": 512, "H": 64}
"""Sizes of the ops' inputs, where an op has them; others keep their default."""


class _InMemory:
    """A cache that keeps nothing: digests are of what was compiled just now."""

    def get_file(self, name: str) -> None:
        return None

    def get_group(self, name: str) -> None:
        return None

    def put(self, data: object, name: str, binary: bool = True) -> str:
        return name

    def put_group(self, name: str, group: object) -> str:
        return name


class _Stop(Exception):  # noqa: N818 (no error: the compiler has what is wanted)
    """Ends a compilation at its PTX."""


def _ptx(variant: Any, target: str) -> str:
    """Return the PTX of a variant; assembling it would take most of the time and add nothing."""
    from taut_bench.instruments import aot

    found: list[str] = []

    def keep(backend: CUDABackend, ptx: str, *_: Any) -> None:
        found.append(ptx)
        raise _Stop

    CUDABackend.make_cubin = keep
    gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    with variant.assembler():
        try:
            triton.compile(aot.source_of(variant), target=gpu, options=variant.options)
        except _Stop:
            return found[0]
    raise RuntimeError(f"{variant.label}: no PTX")


def normalised(ptx: str) -> str:
    """Leave out comments, files and lines, and give every function a number for its name."""
    lines = (line.split("//")[0].rstrip() for line in ptx.splitlines())
    text = "\n".join(line for line in lines if line and not re.match(r"\s*\.(file|loc)\b", line))
    names = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text)
    for number, name in enumerate(dict.fromkeys(names)):
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?=\b|_param)", f"function{number}", text)
    return text


def _digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:20]


@cache
def _variants() -> list[Any]:
    from taut_bench.instruments import aot

    return list(aot.every_variant())


def _form(job: tuple[str, int]) -> dict[str, str]:
    target, place = job
    variant = _variants()[place]
    try:
        digest = _digest(normalised(_ptx(variant, target)))
    except Exception as error:
        digest = f"does not compile: {type(error).__name__}"
    return {
        "target": target,
        "kernel": variant.kernel.__name__,
        "label": variant.label,
        "tile": str(variant.tile),
        "digest": digest,
    }


def _forms(targets: Sequence[str], every: int, only: str, jobs: int) -> Iterator[dict[str, str]]:
    from taut_bench.instruments import aot

    places = [(target, place) for target in targets for place in aot.chosen(target, every)]
    work = [job for job in places if only in _variants()[job[1]].label]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_forget_cache) as pool:
        for count, form in enumerate(pool.map(_form, work, chunksize=4)):
            if count % 100 == 0:
                sys.stderr.write(f"{count} of {len(work)}\n")
            yield form


def _forget_cache() -> None:
    compiler.get_cache_manager = lambda key: _InMemory()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _ops() -> dict[str, str]:
    """Return the digest of what every op with a CPU implementation returns and writes."""
    from taut_bench.instruments.op_cases import OP_CASES

    torch.use_deterministic_algorithms(True, warn_only=True)  # `torch.empty` holds NaN
    torch.manual_seed(0)
    found = {}
    for name, case in sorted(OP_CASES.items()):
        if "cpu" not in case.devices:
            continue
        sizes = {key: min(value, _SMALL.get(key, value)) for key, value in case.sizes.items()}
        dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
        try:
            arguments = case.make(sizes, dtype, torch.device("cpu"))
            call = case.call or getattr(torch.ops.taut, name)
            result = [*_tensors(call(*arguments)), *_tensors(arguments)]
        except Exception as error:
            found[name] = f"refused: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        parts = (t.detach().contiguous().flatten().view(torch.uint8).numpy() for t in result)
        found[name] = _digest(b"".join(part.tobytes() for part in parts))
    return found


def record(path: Path, wanted: tuple[Sequence[str], int, str], jobs: int) -> int:
    """Write the digests of the package beside this folder."""
    torch.set_num_threads(1)
    forms = list(_forms(*wanted, jobs))
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    document = {"versions": versions, "ops": _ops(), "forms": forms}
    path.write_text(json.dumps(document, indent=0) + "\n")
    failed = [form for form in forms if form["digest"].startswith("does not")]
    sys.stdout.write(f"{len(forms)} forms ({len(failed)} failed), {len(document['ops'])} ops\n")
    return 1 if failed else 0


def compare(before: Path, after: Path) -> int:
    """Print what differs; return 1 where something that both files have does."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    if old["versions"] != new["versions"]:
        sys.stdout.write(f"versions differ: {old['versions']} and {new['versions']}\n")
        return 1

    def key(form: dict[str, str]) -> tuple[str, ...]:
        return form["target"], form["label"], form["tile"]

    ours: dict[tuple[str, ...], set[str]] = defaultdict(set)
    theirs: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for found, document in ((ours, old), (theirs, new)):
        for form in document["forms"]:
            found[key(form)].add(form["digest"])
    known, kept = set().union(*ours.values()), set().union(*theirs.values())
    # Tiles of one name may differ in what the name leaves out.
    differ = [name for name in ours if name in theirs and not theirs[name] <= ours[name]]
    gone = [name for name in ours if name not in theirs and not ours[name] & kept]
    added = [name for name in theirs if name not in ours and not theirs[name] & known]
    ops = sorted(
        name for name in old["ops"] if old["ops"][name] != new["ops"].get(name, "not there")
    )
    for word, names in (("differs", differ), ("gone", gone), ("new", added)):
        for name in names:
            sys.stdout.write(f"{word}: {' | '.join(name)}\n")
    for name in ops:
        sys.stdout.write(f"op differs: {name}\n")
    sys.stdout.write(
        f"{len(ours)} forms before, {len(theirs)} after: {len(differ)} differ, {len(gone)} gone, "
        f"{len(added)} new; {len(old['ops'])} ops, {len(ops)} differ\n"
    )
    return 1 if differ or ops else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("output", type=Path)
    recording.add_argument("--target", action="append", choices=["sm_80", "sm_90"])
    recording.add_argument("--only", default="", metavar="TEXT", help="forms whose label has it")
    recording.add_argument("--every", type=int, default=1, metavar="N", help="a sample")
    recording.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(argv)
    if given.command == "compare":
        return compare(given.before, given.after)
    wanted = (given.target or ["sm_90"], given.every, given.only)
    return record(given.output, wanted, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
