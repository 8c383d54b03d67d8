"""A mock worker that reads, as a process: ``reading_worker.py PORT HARM``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mock_engine import Faults
from mock_reader import Reading, ReadingEngine


async def main(port: int, harm: float) -> None:
    engine = ReadingEngine(Reading(harm=harm), Faults(tokens=12))
    engine.port = port
    async with engine:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
