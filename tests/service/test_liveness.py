"""The liveness probe is answered in time while large bodies arrive and are read."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import signal
import statistics
from collections import Counter
from pathlib import Path

from live_processes import LivenessProbe, eventually, house, report
from raw_client import CHAT, COMPLETIONS, MODEL, post

PROBE_TIMEOUT_S = 3
"""Of the chart's liveness probe."""
MESSAGE = {"role": "user", "content": "hello there hello there hello"}
MANY = json.dumps({"model": MODEL, "max_tokens": 4, "messages": [MESSAGE] * 65_000}).encode()
LONG = json.dumps({"model": MODEL, "max_tokens": 4, "prompt": "lorem ipsum " * 345_000}).encode()


async def test_thirty_bodies_of_four_megabytes_do_not_silence_the_probe(tmp_path: Path) -> None:
    """Ten of many messages, ten of one text, ten compressed: parsed and decoded beside the loop."""
    assert 4_000_000 < len(MANY) < 4 * 1024 * 1024
    assert 4_000_000 < len(LONG) < 4 * 1024 * 1024
    noise = random.Random(5).randbytes(30_000).hex()
    packed = gzip.compress(MANY[:-1] + f', "user": "{noise}"}}'.encode(), 1)
    assert len(packed) * 100 > len(MANY), "within the ratio"
    async with house(tmp_path, model={"max_model_len": 1_000_000}) as home:
        probe = LivenessProbe(home.port, tmp_path / "probe.log")
        probe.start()
        await eventually(lambda: probe.seconds())
        sent = [post(home.port, MANY, CHAT, 200) for _ in range(10)]
        sent += [post(home.port, LONG, COMPLETIONS, 200) for _ in range(10)]
        sent += [post(home.port, packed, CHAT, 200, content_encoding="gzip") for _ in range(10)]
        answers = await asyncio.gather(*sent)
        probe.signal(signal.SIGTERM)
        assert await probe.wait() == 0, probe.text()
        waits = probe.seconds()
        report(
            f"30 bodies of 4 MB: /health/live {len(waits)} times, median "
            f"{statistics.median(waits):.3f} s, slowest {max(waits):.3f} s"
        )
        assert Counter(answer.status for answer in answers) == {200: 30}
        assert max(waits) < PROBE_TIMEOUT_S
