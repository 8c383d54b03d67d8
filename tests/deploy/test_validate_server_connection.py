"""What the connection to a server does when the server ends it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.server_connection import ServerConnection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Forgetful:
    """Answers some requests of each connection, then ends it when the next one has come."""

    def __init__(self, answered: int) -> None:
        self.connections = 0
        self._answered = answered
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                for _ in range(self._answered):
                    if not connection.recv(65536):
                        break
                    connection.sendall(ANSWER)
                else:
                    connection.recv(65536)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Forgetful]:
    forgetful = Forgetful(request.param)
    yield forgetful
    forgetful.close()


@pytest.mark.parametrize("server", [1], indirect=True)
def test_request_that_meets_the_end_of_an_idle_connection_is_sent_again(server: Forgetful) -> None:
    connection = ServerConnection(server.url, "baseline", {}, 10.0)
    for _ in range(4):
        assert connection.call("/v1/completions", {"prompt": "a"}) == {}
    assert server.connections == 4


@pytest.mark.parametrize("server", [0], indirect=True)
def test_server_that_always_ends_it_is_named(server: Forgetful) -> None:
    connection = ServerConnection(server.url, "baseline", {}, 10.0)
    with pytest.raises(CouldNotValidateError, match=r"baseline http.*gave no answer"):
        connection.call("/v1/completions", {"prompt": "a"})
    assert server.connections == 2
