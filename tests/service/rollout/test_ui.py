"""The operator's page in a real browser: what it draws, what its buttons do, what it asks for."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from admin_harness import administered
from browser import Tab, needs_chromium, tab
from mock_engine import Faults
from mock_reader import Reading, ReadingEngine
from rollout_settings import ADMIN, KEYS, settings_of

NASTY = "<img/src=x/onerror=alert(1)>"


async def has(page: Tab, text: str) -> None:
    await page.until(f"document.body.innerText.includes({text!r})")


async def click(page: Tab, words: str) -> None:
    button = f"[...document.querySelectorAll('button')].find(b => b.innerText === {words!r})"
    await page.until(f"!!{button}")
    await page.value(f"{button}.click()")


@needs_chromium
@pytest.mark.parametrize("width", [1000, 400])
async def test_the_page_shows_the_rollout_and_its_buttons_move_it(
    tmp_path: Path, width: int
) -> None:
    same = "one two three four"
    guard = {"max_kl_excess_nats": 0.013, "kl_clip_nats": 0.1}  # shown as it was given
    async with (
        ReadingEngine(Reading(answer=same)) as base,
        ReadingEngine(Reading(answer=f"one two {NASTY} four")) as small,
        tab(tmp_path / "profile", width) as page,
    ):
        rollout = {"directory": str(tmp_path / "r"), "min_step_s": 3600}
        settings = settings_of(base, small, rollout, guard=guard)
        async with administered(settings) as admin:
            root = f"http://127.0.0.1:{admin.port}"
            await page.open(f"{root}/ui")
            await has(page, "No rollout. Baseline: base.")
            await has(page, "base-0")
            await click(page, "Start small")
            await page.until("document.getElementById('confirm').open")
            # The dialog's first button is in focus: Enter is enough.
            await page.value("document.getElementById('confirm-yes').focus()")
            await page.press("Enter", 13)
            await has(page, "small is running at 0 %")
            for number in range(6):
                body = {"model": "m", "prompt": f"q {number}", "max_tokens": 12}
                assert (await admin.harness.post(body)).status == 200
            await has(page, "Agreement 100.00 %")
            await has(page, "Waits: ")
            times = "[...document.querySelectorAll('#latencies tbody td')].map(t => t.innerText)"
            await page.until(f"{times}.at(-1) === '6'")
            told = await page.value(times)
            assert told[:4] == ["m", "base", "–", "–"], "no answer was a stream"
            assert told[4].count("ms, ") + told[4].count("s, ") >= 1
            streamed = {**body, "stream": True}
            assert (await admin.harness.post(streamed)).status == 200
            await page.until(f"{times}[2].endsWith('s')")
            await agreement_is_drawn(page, admin)
            label = "document.querySelector('svg[aria-label^=kl]').getAttribute('aria-label')"
            assert (await page.value(label)).endswith(" nats, at most 0.013 nats")
            await click(page, "Hold")
            await page.value("document.getElementById('why').value = 'lunch'")
            await click(page, "Do it")
            await has(page, "small is held at 0 %: lunch.")
            await click(page, "Go on")
            await click(page, "Do it")
            await has(page, "small is running at 0 %")
            await click(page, "Roll back")
            await page.value("document.getElementById('why').value = 'a hunch'")
            await click(page, "Do it")
            await has(page, "small is rolled back at 0 %: a hunch.")
            await page.value("document.getElementById('prompt').value = 'count'")
            await click(page, "Ask both")
            await has(page, "The first different token is number 3.")
            marked = "[...document.querySelectorAll('mark.differs')].map(m => m.textContent)"
            assert await page.value(marked) == ["three", NASTY]
            title = "document.querySelector('mark.differs').title"
            assert await page.value(title) == "probability 60.65 %"
            await tokens_are_told_without_a_mouse(page)

            assert page.complaints() == []
            assert {url.split("/")[2] for url in page.requested()} == {root.split("/")[2]}
            wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            assert await page.value(wide)
            unnamed = (
                "[...document.querySelectorAll('input, select, textarea, button')].filter(e =>"
                " !e.labels?.length && !e.getAttribute('aria-label') && !e.innerText).length"
            )
            assert await page.value(unnamed) == 0


async def tokens_are_told_without_a_mouse(page: Tab) -> None:
    """The arrow keys go along both answers at once; so does the pointer."""
    told = "document.getElementById('token').innerText"
    assert await page.value("document.getElementById('token').role") == "status"
    await page.value("document.querySelector('.tokens').focus()")
    for key, code, place in (("ArrowRight", 39, 1), ("End", 35, 4), ("ArrowLeft", 37, 3)):
        await page.press(key, code)
        assert (await page.value(told)).startswith(f"Token {place}: base ")
    assert await page.value(told) == (
        f"Token 3: base “three”, probability 60.65 %; small “{NASTY}”, probability 60.65 %."
    )
    here = "[...document.querySelectorAll('.tokens .here')].map(t => t.textContent)"
    assert await page.value(here) == ["three", NASTY]
    assert await page.value("document.activeElement.matches('.tokens')")
    box = "document.querySelectorAll('.tokens')[1].firstChild"
    await page.value(f"void {box}.scrollIntoView()")
    place = await page.value(f"{box}.getBoundingClientRect().toJSON()")
    x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    await page.until(f"{told}.startsWith('Token 1: base “one”')")


async def agreement_is_drawn(page: Tab, admin: Any) -> None:
    """Ask until the series has three points; the page draws each, a band around the mean."""
    path = "/admin/rollout/agreement?model=m&variant=small"
    async with asyncio.timeout(30):
        for number in count():
            body = {"model": "m", "prompt": f"later {number}", "max_tokens": 12}
            assert (await admin.harness.post(body)).status == 200
            points = (await admin.ask("GET", path)).json
            if len(points) > 2:
                break
            await asyncio.sleep(0.3)
    assert [point["mean"] for point in points] == [1.0] * len(points)
    widths = [point["high"] - point["low"] for point in points]
    assert widths == sorted(widths, reverse=True) and widths[-1] < widths[0]
    shape = "document.querySelector('svg.course polyline').getAttribute('points').split(' ')"
    await page.until(f"!!document.querySelector('svg.course') && {shape}.length > 2")
    drawn = await page.value(shape)
    band = "document.querySelector('svg.course polygon').getAttribute('points').split(' ').length"
    assert await page.value(band) == 2 * len(drawn)
    assert [float(drawn[0].split(",")[0]), float(drawn[-1].split(",")[0])] == [0, 100]
    label = "document.querySelector('svg.course').getAttribute('aria-label')"
    told = await page.value(label)
    assert told.startswith("Agreement of small over time, ") and ": now 100.00 % in " in told
    await page.until("document.querySelector('svg.course').getBoundingClientRect().height > 40")
    wrong = await admin.ask("GET", path.replace("small", "base"))
    assert wrong.status == 404, "a baseline has no agreement with itself"


@needs_chromium
async def test_the_page_asks_for_a_key_and_keeps_it_to_itself(tmp_path: Path) -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        tab(tmp_path / "profile") as page,
    ):
        settings = settings_of(base, small, {"directory": str(tmp_path / "r")}, api_keys=KEYS)
        async with administered(settings) as admin:
            await page.open(f"http://127.0.0.1:{admin.port}/ui")
            await page.until("!document.getElementById('key-form').hidden")
            assert "base-0" not in await page.value("document.body.innerText")
            await page.value(f"document.getElementById('key').value = {ADMIN!r}")
            await click(page, "Use it")
            await has(page, "base-0")
            assert await page.value("localStorage.length + sessionStorage.length") == 0
            assert await page.value("document.cookie") == ""
            assert ADMIN not in await page.value("document.documentElement.outerHTML")


async def test_its_files_forbid_everything_from_elsewhere_and_other_pages_are_refused(
    tmp_path: Path,
) -> None:
    async with ReadingEngine() as base, ReadingEngine() as small:
        settings = settings_of(base, small, {"directory": str(tmp_path)}, api_keys=KEYS)
        async with administered(settings) as admin:
            for path in (
                "/ui",
                "/ui/app.js",
                "/ui/draw.js",
                "/ui/tokens.js",
                "/ui/style.css",
                "/ui/icon.svg",
            ):
                answer = await admin.ask("GET", path)
                assert answer.status == 200, path
                policy = answer.headers["content-security-policy"]
                assert policy.startswith("default-src 'self'; ")
                assert b"http://" not in answer.body.replace(b"http://www.w3.org/", b"")
            key = {"authorization": f"Bearer {ADMIN}"}
            authority = f"127.0.0.1:{admin.port}"
            for origin, status in (
                (f"http://{authority}", 200),
                ("http://127.0.0.1", 403),
                ("https://evil.example", 403),
                ("null", 403),
            ):
                headers = {**key, "host": authority, "origin": origin}
                assert (await admin.ask("GET", "/admin/state", b"", headers)).status == status
            assert (await admin.ask("GET", "/admin/state")).status == 401


@pytest.mark.parametrize("chat", [False, True])
async def test_the_playground_answers_token_by_token(tmp_path: Path, chat: bool) -> None:
    one, two = ReadingEngine(Reading(answer="a b c")), ReadingEngine(Reading(answer="a b"))
    async with one as base, two as small:
        settings = settings_of(base, small, {"directory": str(tmp_path)})
        async with administered(settings) as admin:
            body = {"model": "other", "variants": ["base", "small"], "prompt": "x", "chat": chat}
            found = (await admin.ask("POST", "/admin/playground", _json(body))).json
            assert [[t["text"] for t in a["tokens"]] for a in found["answers"]] == [
                ["a", "b", "c"],
                ["a", "b"],
            ]
            assert found["first_difference"] == 2
            small.faults.status = 500
            small.reading.answer = None
            found = (await admin.ask("POST", "/admin/playground", _json(body))).json
            assert "status 500" in found["answers"][1]["error"]
            wrong = {**body, "variants": ["base", "x"]}
            assert (await admin.ask("POST", "/admin/playground", _json(wrong))).status == 404


@pytest.mark.parametrize("chat", [False, True])
async def test_the_playground_streams_both_answers(tmp_path: Path, chat: bool) -> None:
    slow = Faults(interval_s=0.05, chunk=7)
    one, two = ReadingEngine(Reading(answer="a b c")), ReadingEngine(Reading(answer="a b"), slow)
    async with one as base, two as small:
        settings = settings_of(base, small, {"directory": str(tmp_path)})
        async with administered(settings) as admin:
            body = {"model": "other", "variants": ["base", "small"], "prompt": "x", "chat": chat}
            path = "/admin/playground/stream"
            parts = _events((await admin.ask("POST", path, _json(body))).body)
            heard = [[t for p in parts if p["side"] == i for t in p["tokens"]] for i in (0, 1)]
            assert [[t["text"] for t in side] for side in heard] == [["a", "b", "c"], ["a", "b"]]
            assert all(abs(t["probability"] - 0.6065) < 1e-3 for side in heard for t in side)
            assert [p["side"] for p in parts if p["last"]] == [0, 1], "the slow one ends last"
            assert max(len(p["tokens"]) for p in parts) == 1, "each as it comes"
            small.faults.kill_at_byte = 400
            parts = _events((await admin.ask("POST", path, _json(body))).body)
            assert [bool(p["error"]) for p in parts if p["last"]] == [False, True]
            wrong = {**body, "variants": ["base", "x"]}
            assert (await admin.ask("POST", path, _json(wrong))).status == 404


def _streamed(event: str) -> bytes:
    """The answer of a worker that sends this and no more."""
    body = event.encode() + b"\n\n"
    head = b"content-type: text/event-stream\r\ncontent-length: %d" % len(body)
    return b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (head, body)


def _told(**logprobs: Any) -> str:
    return "data: " + json.dumps({"choices": [{"text": " b", "logprobs": logprobs}]})


NOT_AS_VLLM = "the worker's answer is not as vLLM writes it"
TOLD: list[tuple[str, list[tuple[str, float | None]], str]] = [
    ('data: {"choices": [{"text": " b"}]}', [(" b", None)], ""),
    ('data: {"choices": [{"delta": {"content": " b"}}]}', [(" b", None)], ""),
    ('data: {"choices": [{"delta": {"role": "assistant"}}]}', [], ""),
    (_told(tokens=[" b"], token_logprobs=[1000.0]), [(" b", 1.0)], ""),
    (_told(tokens=[" b"], token_logprobs=[-1e999]), [(" b", None)], ""),
    (_told(tokens=[" b"], token_logprobs=[10**400]), [], NOT_AS_VLLM),
    (_told(tokens=[" b"], token_logprobs=[]), [], NOT_AS_VLLM),
    ('data: {"choices": [5]}', [], NOT_AS_VLLM),
    ("data: {no", [], "/v1/completions answered with what is no JSON"),
    ('data: {"error": {"message": "x"}}', [], "/v1/completions: the worker broke off its answer"),
    ("data: " + "x" * 2_000_000, [], "/v1/completions: an event of more than 262144 bytes"),
]


async def test_the_playground_shows_what_a_worker_tells_and_says_what_it_does_wrong(
    tmp_path: Path,
) -> None:
    async with ReadingEngine(Reading(answer="a b c")) as base, ReadingEngine() as small:
        settings = settings_of(base, small, {"directory": str(tmp_path)})
        async with administered(settings) as admin:
            body = _json({"model": "m", "variants": ["base", "small"], "prompt": "x"})
            for event, tokens, error in TOLD:
                small.faults.raw = _streamed(event)
                answer = await admin.ask("POST", "/admin/playground/stream", body)
                ours, theirs = _sides(_events(answer.body))
                assert theirs == (tokens, error), event[:100]
                assert ([text for text, _ in ours[0]], ours[1]) == (["a", "b", "c"], "")


def _sides(parts: list[dict[str, Any]]) -> list[tuple[list[tuple[str, float | None]], str]]:
    """Return each side's tokens, and the error that it ended with."""
    found = []
    for number in (0, 1):
        side = [part for part in parts if part["side"] == number]
        tokens = [(t["text"], t["probability"]) for part in side for t in part["tokens"]]
        found.append((tokens, side[-1]["error"]))
    return found


async def test_the_playground_names_the_first_token_that_differs(tmp_path: Path) -> None:
    one, two = ReadingEngine(Reading(answer="a b c")), ReadingEngine(Reading(answer="a x c"))
    async with one as base, two as small:
        settings = settings_of(base, small, {"directory": str(tmp_path)})
        async with administered(settings) as admin:
            body = {"model": "m", "variants": ["base", "small"], "prompt": "x"}
            found = (await admin.ask("POST", "/admin/playground", _json(body))).json
            assert found["first_difference"] == 1
            body["variants"] = ["base", "base"]
            found = (await admin.ask("POST", "/admin/playground", _json(body))).json
            assert found["first_difference"] is None


def _events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n") if event]


def _json(body: object) -> bytes:
    return json.dumps(body).encode()
