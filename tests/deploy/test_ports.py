"""Ports for what is started later."""

from __future__ import annotations

import random
import socket

from taut_deploy import ports


def test_port_is_none_an_outgoing_connection_may_take_meanwhile() -> None:
    assert all(ports.free_port() < 32_768 for _ in range(50))


def test_port_that_somebody_listens_on_is_passed_over(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first, second = taken.getsockname()[1], ports.free_port()
        monkeypatch.setattr(random, "sample", lambda *_: [first, second])
        monkeypatch.setattr(ports, "_given", set())
        assert ports.free_port() == second


def test_no_port_is_given_twice_while_nobody_listens_yet(monkeypatch) -> None:
    monkeypatch.setattr(ports, "_PORTS", range(20_000, 20_400))
    monkeypatch.setattr(ports, "_given", set())
    found = [ports.free_port() for _ in range(100)]
    assert len(set(found)) == 100
    assert all(ports.free_port() for _ in range(300)), "it begins anew, rather than run out"
