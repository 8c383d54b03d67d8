"""Compile the gateway's hot path with mypyc: ``python service/compile.py``, or ``--remove``.

The same ``.py`` files are what is read, tested and compiled; without the compiled ones Python runs
them. What is compiled stands in :data:`MODULES`. Left out is what mypyc cannot take (subclasses of
``list`` and of uvicorn's classes, pydantic's models, asynchronous generators), and what ran
otherwise when compiled (mypy 2.4.1): exceptions whose class has attributes (``errors.py``: they
were not there). To be avoided in what is compiled: ``data[os.write(fd, data):]`` (the call is made
twice), an attribute ``_thread`` (no C name), ``append`` on a subclass of ``list`` (that of ``list``
is called), a ``cast`` that is not true (it is checked), weak references (they crash:
:mod:`taut_service.watch.tallies`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOM = Path(__file__).resolve().parent
PACKAGE = "taut_service"
GROUP = "taut_service_native"
"""Of the shared library beside the package that holds the code of all modules."""
SOURCES = ROOM / PACKAGE / "compiled_from.json"
"""Written beside the compiled modules: the SHA-256 of each source."""
MODULES = (
    "admit/admission.py",
    "admit/auth.py",
    "admit/claims.py",
    "admit/fair_queue.py",
    "admit/first_look.py",
    "admit/inspection.py",
    "admit/key_places.py",
    "admit/lax.py",
    "admit/limits/bucket.py",
    "admit/limits/estimate.py",
    "admit/limits/limiter.py",
    "admit/limits/memory.py",
    "admit/limits/settlement.py",
    "admit/limits/texts.py",
    "admit/request_checks.py",
    "call.py",
    "expiry.py",
    "http/body.py",
    "http/client_exchange.py",
    "http/dialect.py",
    "http/framing.py",
    "http/front.py",
    "http/headers.py",
    "http/json_body.py",
    "http/json_bounds.py",
    "http/relay.py",
    "http/request_head.py",
    "http/request_watch.py",
    "http/rewrite.py",
    "http/splice.py",
    "http/sse.py",
    "http/stream_relay.py",
    "http/stream_usage.py",
    "route/affinity.py",
    "route/attempt.py",
    "route/balance.py",
    "route/breaker.py",
    "route/fleet.py",
    "route/gateway.py",
    "route/hedge.py",
    "route/rendezvous.py",
    "route/retry_budget.py",
    "route/routed.py",
    "route/variants.py",
    "timer.py",
    "watch/access_log.py",
    "watch/drain.py",
    "watch/key_usage.py",
    "watch/metrics.py",
    "watch/tally.py",
    "worker/answer_reader.py",
    "worker/connection.py",
    "worker/outgoing.py",
    "worker/worker.py",
    "worker/worker_load.py",
)
_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
group, configuration, *sources = sys.argv[1:]
sys.argv[1:] = ["-q", "build_ext", "--inplace"]
told = ["--config-file", configuration, *sources]
extensions = mypycify(told, opt_level="1", debug_level="0", group_name=group)
for extension in extensions:
    # To look for warnings in generated code is half of the C compiler's time.
    extension.extra_compile_args.append("-Wno-all")
    extension.extra_link_args = ["-Wl,-s"]
setup(name=group, packages=[], ext_modules=extensions)
"""


def digests() -> dict[str, str]:
    """Return the SHA-256 of every module that is compiled, as it is now."""
    found = {name: (ROOM / PACKAGE / name).read_bytes() for name in MODULES}
    return {name: hashlib.sha256(text).hexdigest() for name, text in found.items()}


def outputs() -> list[Path]:
    """Return the compiled files that lie here."""
    return sorted([*ROOM.glob(f"{GROUP}__mypyc.*.so"), *(ROOM / PACKAGE).rglob("*.so")])


def remove() -> None:
    """Leave only Python."""
    for file in [*outputs(), SOURCES]:
        file.unlink(missing_ok=True)


def is_current() -> bool:
    """Whether what lies here was compiled from the sources as they are."""
    return (
        len(outputs()) == len(MODULES) + 1
        and SOURCES.is_file()
        and json.loads(SOURCES.read_text()) == digests()
    )


def what_is_missing() -> str | None:
    """Return what compiling needs and is not here; None where all of it is."""
    for module in ("mypyc", "setuptools", "pydantic", "uvicorn", "fastapi"):
        if find_spec(module) is None:
            return f"no {module} here"
    compiler = os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler.split()[0]) is None:
        return f"no C compiler ({compiler.split()[0]}) here"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python.h here"
    return None


def build() -> None:
    """Compile every module to lie beside its source.

    Raises:
        subprocess.CalledProcessError: mypy or the C compiler refused; they have said why.
    """
    remove()
    read = digests()
    with tempfile.TemporaryDirectory(prefix="taut-compile-") as folder:
        # mypyc writes its C and mypy its cache to where they run.
        room = Path(folder)
        (room / PACKAGE).symlink_to(ROOM / PACKAGE)
        configuration = ROOM.parent / "pyproject.toml"
        sources = [f"{PACKAGE}/{name}" for name in MODULES]
        command = [sys.executable, "-c", _SETUP, GROUP, str(configuration), *sources]
        environment = {**os.environ, "MYPYPATH": folder, "PYTHONSAFEPATH": "1"}
        subprocess.run(command, cwd=room, env=environment, check=True)
        for library in room.glob("*.so"):
            (ROOM / library.name).write_bytes(library.read_bytes())
    SOURCES.write_text(json.dumps(read, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Compile, or remove what was compiled; return the exit code."""
    parser = argparse.ArgumentParser(description="Compile the gateway's hot path with mypyc.")
    parser.add_argument("--remove", action="store_true", help="leave only Python")
    if parser.parse_args(arguments).remove:
        remove()
        return 0
    if is_current():
        return 0
    missing = what_is_missing()
    if missing is not None:
        remove()
        print(f"compile: the gateway stays Python: {missing}", file=sys.stderr)  # noqa: T201
        return 0
    try:
        build()
    except subprocess.CalledProcessError:
        remove()
        print("compile: the gateway stays Python, for the reason above", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
