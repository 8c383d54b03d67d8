"""C++ of ours, compiled on the machine that runs it and kept for the next process.

On a CPU vLLM's workers have a compiler, with which Inductor compiles the model itself. A library
registers its ops by torch's stable interface, so it is built in two seconds and loaded by
`torch.ops.load_library`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

_OPTIONS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp")
_TIMEOUT_S = 300.0
_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@cache
def load(source: Path) -> str | None:
    """Compile a file unless that was done, and load it into this process, once.

    Args:
        source: registers implementations of ops that are defined already; may include headers of
            ours, by their paths from it.

    Returns:
        None where it is loaded, else why not, in one line.
    """
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"{source.name} is for x86 under Linux, not {platform.machine()}"
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"no C++ compiler for {source.name}: install g++ (or set CXX)"
    try:
        torch.ops.load_library(str(_built(source, compiler)))  # type: ignore[no-untyped-call]
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        return f"{compiler} could not compile {source.name}: {last[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{source.name} could not be built or loaded: {str(error).splitlines()[0]}"
    return None


def text_of(source: Path) -> str:
    """Return a source with the headers of ours that it includes: what a library is made of."""
    files, texts = [source], dict[Path, str]()
    while files:
        file = files.pop()
        if file not in texts:
            texts[file] = file.read_text(encoding="utf-8")
            files += [(file.parent / name).resolve() for name in _INCLUDED.findall(texts[file])]
    return "\n".join(texts.values())


def _built(source: Path, compiler: str) -> Path:
    """Return the library of a source, compiled if the cache has none."""
    installed = Path(torch.__file__).parent
    known = "\n".join((text_of(source), torch.__version__, str(installed), compiler, *_OPTIONS))
    key = hashlib.sha256(known.encode()).hexdigest()[:20]
    library = Path(cache_dir()) / "taut" / f"{source.stem}-{key}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Several workers may build at once; each moves a whole file into place.
        temporary = library.with_name(f".{library.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        command = [compiler, *_OPTIONS, f"-I{installed / 'include'}", str(source)]
        command += ["-o", str(temporary), f"-L{installed / 'lib'}", "-ltorch_cpu"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
            temporary.replace(library)
        finally:
            temporary.unlink(missing_ok=True)
    return library
