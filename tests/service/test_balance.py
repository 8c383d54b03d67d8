"""Which worker is next."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from taut_service.config.settings import Affinity, Breaker, Timeouts, WorkerSettings
from taut_service.route.balance import Balancer
from taut_service.route.rendezvous import seed_of
from taut_service.worker.upstream import UpstreamClient
from taut_service.worker.worker import Worker, WorkerState
from taut_service.worker.worker_load import ReportedLoad, parse_load

AFFINITY = Affinity(by="session", min_requests=4, max_load_ratio=1.5)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


def hashed(*names: bytes) -> list[int]:
    return [seed_of(name) for name in names]


def workers(count: int) -> list[Worker]:
    made = []
    for i in range(count):
        settings = WorkerSettings(name=f"w{i}", url=f"http://127.0.0.1:{9000 + i}")
        client = UpstreamClient(settings.host, settings.port, Timeouts())
        worker = Worker(settings, "m", None, client, Breaker(failures=2), monotonic=CLOCK)
        worker.become(WorkerState.READY)
        worker.stale_after_s = 5
        made.append(worker)
    return made


def balancer(**affinity: Any) -> Balancer:
    return Balancer("v", AFFINITY.model_copy(update=affinity), random.Random(1))


async def test_idle_workers_take_turns() -> None:
    crew, chooser = workers(4), balancer()
    chosen = [chooser.choose(crew) for _ in range(8)]
    assert Counter(w.name for w in chosen if w) == {"w0": 2, "w1": 2, "w2": 2, "w3": 2}


async def test_less_loaded_of_two_gets_the_request() -> None:
    crew, chooser = workers(2), balancer()
    crew[0].take(100)
    crew[1].take(40)
    assert {chooser.choose(crew) for _ in range(10)} == {crew[1]}
    crew[1].take(70)
    assert {chooser.choose(crew) for _ in range(10)} == {crew[0]}


async def test_two_choices_keep_the_load_even_and_one_does_not() -> None:
    crew, chooser, rng = workers(10), balancer(), random.Random(7)
    single = [0] * 10
    for _ in range(2000):
        tokens = rng.choice([10, 10, 10, 2000])
        worker = chooser.choose(crew)
        assert worker is not None
        worker.take(tokens)
        single[rng.randrange(10)] += tokens
    loads = [worker.outstanding_tokens for worker in crew]
    assert max(loads) - min(loads) < 6000
    assert max(single) - min(single) > 3 * (max(loads) - min(loads))


@pytest.mark.parametrize("how", ["drained", "broken", "unreachable", "wrong", "tried"])
async def test_worker_that_must_not_be_used_is_left_out(how: str) -> None:
    crew, chooser = workers(3), balancer()
    out = crew[1]
    if how == "drained":
        out.drain()
    elif how == "broken":
        for _ in range(2):
            out.breaker.failed(out.take(1))
            out.give_back(1)
    elif how != "tried":
        state = WorkerState.UNREACHABLE if how == "unreachable" else WorkerState.WRONG_TOKEN
        out.become(state)
    tried = [out] if how == "tried" else []
    for keys in ([], hashed(b"a"), hashed(b"b"), hashed(b"c")):
        assert out not in {chooser.choose(crew, tried, keys) for _ in range(20)}
    if how == "drained":
        out.undrain()
        assert out in {chooser.choose(crew) for _ in range(20)}


async def test_worker_that_said_too_busy_is_avoided_while_there_are_others() -> None:
    crew, chooser = workers(2), balancer()
    crew[0].back_off()
    assert {chooser.choose(crew) for _ in range(5)} == {crew[1]}
    crew[1].back_off()
    assert {chooser.choose(crew) for _ in range(5)} == set(crew)
    CLOCK.now += 0.15
    crew[1].back_off()
    assert {chooser.choose(crew) for _ in range(5)} == {crew[0]}


async def test_back_off_grows_and_an_answer_ends_it() -> None:
    (worker,) = workers(1)
    for _ in range(20):
        worker.back_off()
    CLOCK.now += 1.9
    assert worker.busy
    worker.answered(False)
    assert not worker.busy


async def test_broken_worker_is_the_last_resort_and_no_worker_is_none() -> None:
    crew, chooser = workers(1), balancer()
    for _ in range(2):
        crew[0].breaker.failed(False)
    assert chooser.choose(crew) is None
    assert chooser.choose(crew, last_resort=True) is crew[0]
    assert chooser.choose(crew, crew, last_resort=True) is None
    crew[0].drain()
    assert chooser.choose(crew, last_resort=True) is None
    assert chooser.choose([]) is None


async def test_affinity_sends_a_key_to_one_worker_and_keys_to_all() -> None:
    crew, chooser = workers(4), balancer()
    places: Counter[str] = Counter()
    for i in range(400):
        key = b"session-%d" % i
        first = chooser.choose(crew, keys=hashed(key))
        assert first is not None
        assert all(chooser.choose(crew, keys=hashed(key)) is first for _ in range(3))
        places[first.name] += 1
    assert min(places.values()) > 60


async def test_two_gateways_agree() -> None:
    one, other = balancer(), Balancer("v", AFFINITY, random.Random(99))
    crew, same = workers(5), workers(5)
    for i in range(100):
        a, b = (
            one.choose(crew, keys=hashed(b"k%d" % i)),
            other.choose(same, keys=hashed(b"k%d" % i)),
        )
        assert a is not None and b is not None and a.name == b.name


async def test_variants_do_not_share_their_placement() -> None:
    crew = workers(8)
    one, other = Balancer("a", AFFINITY), Balancer("b", AFFINITY)
    same = sum(
        one.choose(crew, keys=hashed(b"k%d" % i)) is other.choose(crew, keys=hashed(b"k%d" % i))
        for i in range(400)
    )
    assert same < 100


async def test_hot_key_cannot_overload_its_worker() -> None:
    crew, chooser = workers(4), balancer()
    for _ in range(400):
        worker = chooser.choose(crew, keys=hashed(b"hot"))
        assert worker is not None
        worker.take(100)
    loads = sorted(worker.outstanding for worker in crew)
    assert loads[-1] <= 1.5 * 100 + 1
    assert loads[0] >= 50


async def test_next_depth_of_a_hot_prefix_keeps_groups_together() -> None:
    crew, chooser = workers(4), balancer(min_requests=0)
    hot = chooser.choose(crew, keys=hashed(b"hot"))
    assert hot is not None
    natural = {
        b"group-%d" % i: chooser.choose(crew, keys=hashed(b"group-%d" % i)) for i in range(40)
    }
    assert set(natural.values()) == set(crew)
    hot.take(10_000)
    for group, own in natural.items():
        places = {chooser.choose(crew, keys=hashed(b"hot", group)) for _ in range(8)}
        if own is not hot:
            assert places == {own}
        assert hot not in places


async def test_load_counts_what_a_worker_reports_to_have_from_elsewhere() -> None:
    crew, chooser = workers(2), balancer()
    crew[0].take(100)
    crew[1].reported = ReportedLoad(9, 1, 0.5, foreign=10, at=CLOCK.now)
    assert crew[1].load() == 10 * crew[1].mean_tokens * 1.5
    assert {chooser.choose(crew) for _ in range(5)} == {crew[0]}
    CLOCK.now += 5.1
    assert crew[1].load() == 0, "a stale report is ignored"


async def test_what_is_taken_is_given_back() -> None:
    (worker,) = workers(1)
    for tokens in (5, 70, 1):
        worker.take(tokens)
    assert (worker.outstanding, worker.outstanding_tokens) == (3, 76)
    for tokens in (70, 1, 5):
        worker.give_back(tokens)
    assert (worker.outstanding, worker.outstanding_tokens) == (0, 0)


SCRAPE = b"""# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b}"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
"""


def test_scrape_of_vllm_is_read() -> None:
    assert parse_load(SCRAPE, outstanding=4, at=7.0) == ReportedLoad(5, 4, 0.75, 5, 7.0)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"rubbish",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running{} x\n",
        b"vllm:num_requests_running{} NaN\n",
        b"vllm:num_requests_running{} -1\n",
        b"# vllm:num_requests_running 3\n",
        b"xvllm:num_requests_running 3\n",
    ],
)
def test_scrape_of_anything_else_is_no_load(text: bytes) -> None:
    assert parse_load(text, 0, 0.0) is None


def test_own_requests_are_not_foreign() -> None:
    load = parse_load(b"vllm:num_requests_running 3\n", outstanding=8, at=0.0)
    assert load is not None and load.foreign == 0
