"""A server on this machine that answers as it is told, and a clock that only moves when somebody sleeps."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from scrl.handler.metrics import HandlerMetrics


@dataclass
class Received:
    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def http(status: int, body: bytes, *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


class ScriptedServer:
    """Gives its ``script``'s answers in order, the last one again and again; remembers what it was asked.

    An answer is the bytes to send, or a function of (connection, request) that sends them, or not.
    """

    def __init__(self) -> None:
        self.script: list[bytes | Callable[[socket.socket, Received], None]] = []
        self.received: list[Received] = []
        self.entered = threading.Semaphore(0)  # one release a request
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        if self.over.is_set():
            return
        self.over.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which close alone doesn't
        self._socket.close()

    def stall(self, connection: socket.socket, request: Received) -> None:
        self.over.wait(60)

    def drip(self, connection: socket.socket, request: Received) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not self.over.wait(0.05):
            connection.sendall(b" ")

    @staticmethod
    def reset(connection: socket.socket, request: Received) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = _read(connection)
                with self._lock:
                    answer = self.script[min(len(self.received), len(self.script) - 1)]
                    self.received.append(request)
                self.entered.release()
                if callable(answer):
                    answer(connection, request)
                else:
                    connection.sendall(answer)
            except OSError:  # the client left, which is what some tests are about
                pass


def _read(connection: socket.socket) -> Received:
    file = connection.makefile("rb")
    method, target, _ = file.readline().decode().split(" ")
    headers = {}
    while line := file.readline().decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    parts = urlsplit(target)
    params = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    return Received(method, parts.path, params, headers, file.read(int(headers.get("content-length", 0))))


class FakeClock:
    """``clock()`` is the time, ``sleep`` makes it pass; ``sleeps`` are the seconds slept."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def reply() -> Callable[..., bytes]:
    """reply(status, body, *header lines) -> the bytes of an HTTP reply."""
    return http


@pytest.fixture
def metrics() -> HandlerMetrics:
    return HandlerMetrics()
