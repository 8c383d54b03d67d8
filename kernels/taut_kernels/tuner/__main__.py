"""Measure products in a process of its own, which gives the card's memory back when it ends.

``python -m taut_kernels.tuner --output FILE --budget-s S`` reads ``[[N, K, format, layers], …]``
as JSON from its input, tells people on stderr what it measured, and prints what the file says of
each product as JSON. Exit 0; 2 with one line where it could not measure.
"""

from __future__ import annotations

import time

_START = time.monotonic()
"""Before the libraries are imported: that is part of the budget."""

import argparse  # noqa: E402
import datetime  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from filelock import FileLock, Timeout  # noqa: E402

from taut_kernels.gemm.w4a16.weight_format import WeightFormat  # noqa: E402
from taut_kernels.launch import measured_here  # noqa: E402
from taut_kernels.tuner.w4a16_candidates import Product  # noqa: E402
from taut_kernels.tuner.w4a16_session import Session, Wish, judged  # noqa: E402


def _wishes(text: str) -> list[Wish]:
    return [
        Wish(Product(N, K, WeightFormat(named)), layers) for N, K, named, layers in json.loads(text)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m taut_kernels.tuner")
    parser.add_argument("--output", type=Path, required=True, help="file of the verdicts")
    parser.add_argument("--budget-s", type=float, required=True, help="no product begins later")
    parser.add_argument("--tiles", type=int, default=2, help="of the cost model, beside what runs")
    arguments = parser.parse_args(argv)
    deadline = _START + arguments.budget_s
    today = datetime.datetime.now(datetime.UTC).date().isoformat()

    def say(line: str) -> None:
        sys.stderr.write(f"taut: {line}\n")
        sys.stderr.flush()

    try:
        wishes = _wishes(sys.stdin.read())
        machine = measured_here.this_machine()
        session = Session(
            arguments.output, machine, f"taut tune, {today}", deadline, arguments.tiles, say
        )
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        # Of several workers of one model, the first measures and the others read.
        lock = FileLock(arguments.output.with_suffix(".lock"), timeout=arguments.budget_s)
        with lock:
            document = session.run(wishes)
    except Timeout:
        sys.stderr.write(f"error: {arguments.output}: another process still measures\n")
        return 2
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(json.dumps(judged(document, wishes)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
