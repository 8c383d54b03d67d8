"""The faults of the nearest comparable gateway, production-stack's, one test each (a to k).

Each was found by reading or running vllm-project/production-stack at a6c01db (2026-08-05); the
numbers are its issues.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path

from live_processes import LivenessProbe, call, eventually, house, report
from raw_client import CHAT, COMPLETIONS, Client, body_of, post

from taut_deploy.bench.gateway_load import ClosedLoop, Single, chat_body, request_bytes

STREAM = request_bytes(body_of(stream=True), {}, COMPLETIONS)
WHOLE = request_bytes(chat_body(800, stream=False), {}, CHAT)


SLEEP_S = 0.1
"""What production-stack sleeps on the loop for each scrape."""


async def seconds_of(port: int, path: str) -> float:
    """Return what one GET takes, on a connection of its own."""
    begin = time.monotonic()
    status, _ = await asyncio.to_thread(call, port, "GET", path)
    assert status == 200
    return time.monotonic() - begin


async def test_a_scrape_of_metrics_does_not_stall_the_loop(tmp_path: Path) -> None:
    """There, every scrape sleeps 100 ms on the loop."""
    async with house(tmp_path, behaviour={"itl_s": 0.01, "chunks": 400}) as home:
        stream = asyncio.create_task(post(home.port, body_of(stream=True), timeout_s=30))
        scrapes, others = [], []
        for _ in range(20):
            # In turn, so that both meet the same machine; the thread of a scrape needs some of it.
            others.append(await seconds_of(home.port, "/health/live"))
            scrapes.append(await seconds_of(home.port, "/metrics"))
            await asyncio.sleep(0.05)
        reads = (await stream).reads
        gaps = [late - early for early, late in pairwise(reads)]
        scrape, other = statistics.median(scrapes), statistics.median(others)
        late = statistics.quantiles(gaps, n=20)[-1]
        report(
            f"/metrics: median {scrape * 1e3:.1f} ms a scrape, /health/live {other * 1e3:.1f} ms; "
            f"pauses of a 10 ms stream meanwhile: p95 {late * 1e3:.1f} ms"
        )
        # A sleep is in every scrape, a busy machine is not, so the quickest tell what the gateway
        # does; and every scrape that holds up the loop is a pause of the stream.
        assert min(scrapes) < min(others) + SLEEP_S / 2
        stalls = sum(gap >= SLEEP_S for gap in gaps)
        assert stalls < len(scrapes) / 2


async def test_b_gauges_do_not_leak_on_disconnects_and_failed_attempts(tmp_path: Path) -> None:
    """There, five dropped streams stay counted for ever and steer the routing."""
    async with house(tmp_path, engines=2, behaviour={"itl_s": 0.05, "chunks": 500}) as home:
        home.engines[0].behave(fault="reset", fault_every=2)
        visitors = [await Single().ask(home.port, STREAM) for _ in range(20)]
        await eventually(lambda: home.gateway.in_flight() > 0)
        for visitor in visitors:
            visitor.transport.abort()
        await home.quiet()
        assert home.gateway.in_flight() == 0


async def test_c_client_that_leaves_a_whole_request_ends_it_at_the_worker(tmp_path: Path) -> None:
    """There, the engine goes on to the end for nobody (#634, #867, #1040)."""
    async with house(tmp_path, behaviour={"ttft_s": 30}) as home:
        clients = [await Client.connect(home.port) for _ in range(10)]
        for client in clients:
            client.send(body_of())
        await eventually(lambda: home.engines[0].state()["open"] == 10)
        begin = time.monotonic()
        for client in clients:
            client.close()
        await eventually(lambda: home.engines[0].state()["aborted"] == 10, 2)
        report(f"10 whole requests left: worker free {time.monotonic() - begin:.3f} s later")


async def test_d_tokens_and_gaps_of_streams_are_counted(tmp_path: Path) -> None:
    """There, token counters see whole answers only and the gap between tokens is always -1."""
    async with house(tmp_path, behaviour={"chunks": 6, "itl_s": 0.02}) as home:
        await post(home.port, body_of(stream=True, stream_options={"include_usage": True}))
        await post(home.port, body_of())
        await home.quiet()
        assert home.gateway.total("taut_generated_tokens_total") == 12
        assert home.gateway.total("taut_prompt_tokens_total") == 10
        assert home.gateway.total("taut_inter_token_latency_seconds_count") >= 1
        assert home.gateway.total("taut_inter_token_latency_seconds_sum") > 0.01
        assert home.gateway.total("taut_time_to_first_token_seconds_count") == 1


async def test_e_memory_grows_neither_with_requests_nor_with_a_long_stream(tmp_path: Path) -> None:
    """There, whole streams are kept and two dictionaries grow with every request."""
    async with house(tmp_path) as home:
        await ClosedLoop(home.port, WHOLE).run(16, 1)
        before = home.gateway.rss_mb()
        tally = await ClosedLoop(home.port, WHOLE).run(16, 3)
        after_requests = home.gateway.rss_mb()
        home.engines[0].behave(chunks=12_000, chunk_text="x" * 4096)
        client = await Client.connect(home.port)
        client.send(body_of(stream=True))
        await client.head()
        size = 0
        while piece := await client.chunk():
            size += len(piece)
        client.close()
        report(
            f"memory: {tally.done} requests +{after_requests - before:.1f} MB, a stream of "
            f"{size / 1e6:.0f} MB +{home.gateway.rss_mb() - after_requests:.1f} MB"
        )
        assert size > 49_000_000
        assert after_requests - before < 10
        assert home.gateway.rss_mb() - after_requests < 20


async def test_f_load_that_workers_report_under_their_present_names_is_used(
    tmp_path: Path,
) -> None:
    """There, names of vLLM V0 are read, and every present worker seems idle."""
    async with house(tmp_path, engines=2) as home:
        home.engines[0].behave(capacity=4, queue=1000, ttft_s=30)
        others = [await Client.connect(home.engines[0].port) for _ in range(60)]
        for client in others:  # not through the gateway, which can only know it from /metrics
            client.send(body_of())
        await eventually(lambda: home.engines[0].state()["waiting"] == 56)
        seen = home.engines[0].state()["scrapes"]
        await eventually(lambda: home.engines[0].state()["scrapes"] >= seen + 2)
        busy = home.engines[0].state()["started"]
        for _ in range(50):
            assert (await post(home.port, body_of())).status == 200
        assert home.engines[0].state()["started"] == busy
        assert home.engines[1].state()["started"] >= 50
        for client in others:
            client.close()


async def test_g_request_without_a_field_is_a_400_and_not_a_type_error(tmp_path: Path) -> None:
    """There, the refusal is raised with a keyword that does not exist."""
    async with house(tmp_path) as home:
        for body in (b"{}", b'{"model": 3}', b'{"model": "m"}', b"[]", b"", b"null"):
            answer = await post(home.port, body)
            assert answer.status == 400
            assert answer.json["error"]["message"]
        assert home.engines[0].state()["started"] == 0


async def test_h_unknown_models_make_no_series(tmp_path: Path) -> None:
    """There, the name becomes a label before it is looked up."""
    async with house(tmp_path) as home:
        assert (await post(home.port, body_of(model="x0"))).status == 404
        before = set(home.gateway.series())
        for number in range(1, 200):
            assert (await post(home.port, body_of(model=f"x{number}"))).status == 404
        assert set(home.gateway.series()) == before


PROBE_TIMEOUT_S = 3
"""Of the chart's liveness probe; three in a row that take longer end a pod."""


async def test_i_a_thousand_users_at_once_crash_nothing_and_liveness_answers(
    tmp_path: Path,
) -> None:
    """There, more than a thousand users crash it and the liveness probe kills the pod (#448)."""
    admission = {"max_inflight": 64, "max_queued": 2000, "queue_timeout_s": 30}
    async with house(tmp_path, engines=2, behaviour={"ttft_s": 0.01}, admission=admission) as home:
        probe = LivenessProbe(home.port, tmp_path / "probe.log")
        probe.start()
        await eventually(lambda: probe.seconds())
        tally = await ClosedLoop(home.port, WHOLE).run(1200, 4)
        probe.signal(signal.SIGTERM)
        assert await probe.wait() == 0, probe.text()
        waits = probe.seconds()
        middle, slowest = statistics.median(waits), max(waits)
        report(
            f"1,200 users: {tally.done} answers, /health/live {len(waits)} times, median "
            f"{middle:.3f} s, slowest {slowest:.3f} s"
        )
        assert not tally.failures
        assert tally.done > 1200
        assert middle < 0.5
        assert slowest < PROBE_TIMEOUT_S, "behind the first wave of all users at once"
        await home.quiet()


async def test_j_later_waves_on_the_same_connections_are_answered(tmp_path: Path) -> None:
    """There, every wave of a benchmark after the first is answered 400 (#612)."""
    async with house(tmp_path, engines=2) as home:
        clients = [await Client.connect(home.port) for _ in range(20)]
        for wave in range(5):
            for number, client in enumerate(clients):
                client.send(body_of(stream=(wave + number) % 2 == 0))
            answers = [await client.answer() for client in clients]
            assert {answer.status for answer in answers} == {200}
            await asyncio.sleep(0.3)
        for client in clients:
            client.close()


async def test_k_replicas_start_together_and_send_a_session_to_the_same_worker(
    tmp_path: Path,
) -> None:
    """There, replicas race at their start (#768) and each keeps its own table of sessions."""
    model = {"affinity": {"by": "session"}}
    async with house(tmp_path, engines=4, gateways=3, model=model) as home:
        chosen = {}
        for session in range(30):
            answers = await asyncio.gather(
                *(post(g.port, body_of(), x_session_id=f"s{session}") for g in home.gateways)
            )
            assert {answer.status for answer in answers} == {200}
            workers = {answer.headers["x-taut-worker"] for answer in answers}
            assert len(workers) == 1, "the replicas disagree"
            chosen[session] = workers.pop()
        assert len(set(chosen.values())) == 4, "sessions are spread over all workers"
