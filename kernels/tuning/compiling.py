"""Compile candidates into Triton's cache before they are timed, in processes beside each other."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
from collections.abc import Callable, Collection
from typing import TypeVar

Job = TypeVar("Job")


def compile_all(
    compile_one: Callable[[Job], str | None], jobs: Collection[Job], processes: int
) -> list[Job]:
    """Compile every job, and print a line for each that does not compile.

    Args:
        compile_one: of a module, so that processes find it; returns the line, None where all went
            well.
        jobs: what to compile.
        processes: compilers beside each other.

    Returns:
        The jobs that compile, in their order.
    """
    context = multiprocessing.get_context("spawn")
    chunk = max(1, len(jobs) // (4 * processes))
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        lines = list(pool.map(compile_one, jobs, chunksize=chunk))
    for line in filter(None, lines):
        sys.stdout.write(f"does not compile: {line}\n")
    good = [job for job, line in zip(jobs, lines, strict=True) if not line]
    sys.stdout.write(f"compiled {len(good)} of {len(jobs)} candidates\n")
    sys.stdout.flush()
    return good
