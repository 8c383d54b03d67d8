"""The page at /docs: complete, self-contained, and safe to show."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from gateway_harness import gateway, settings_for
from mock_engine import MockEngine

from taut_service.http.docs_page import render


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]


async def test_docs_load_nothing_from_another_host_and_list_every_route() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.request("GET", "/docs")
        document = (await harness.request("GET", "/openapi.json")).json
        redoc = await harness.request("GET", "/redoc")
    text = answer.body.decode()
    page = Page(text)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert redoc.status == 404
    assert page.links == ["openapi.json"]
    assert not re.search(r"https?:|//[a-z]", text)
    assert not {"script", "link", "img", "iframe", "form"} & set(page.tags)
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in text
    style = re.search("<style>(.*)</style>", text)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert "unsafe" not in policy


def test_texts_of_the_document_are_escaped() -> None:
    evil = "<script>alert('x')</script>\"&"
    schema = {
        "required": ["model"],
        "properties": {"model": {"type": "string", "enum": [evil]}, evil: {}},
    }
    operation = {
        "summary": evil,
        "parameters": [{"name": evil, "in": "query"}],
        "requestBody": {"content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": evil, "content": {evil: {}}}},
    }
    info = {"title": evil, "version": evil, "summary": evil}
    text = render({"info": info, "paths": {f"/{evil}": {"post": operation}}})
    assert set(Page(text).tags).isdisjoint({"script"})
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 9
