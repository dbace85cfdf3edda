"""The contract that every engine on the network keeps, against a local server that speaks its protocol."""

import gzip
import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from scrl.handler.web_search_agent.search_api import BACKENDS, SearchError
from tests.unit.scrl.handler.web_search_agent.protocols import (
    PROTOCOLS,
    Protocol,
    counts,
    encoded,
    failure,
    form,
    made,
)


def test_every_engine_on_the_network_is_here():
    assert PROTOCOLS.keys() == BACKENDS.keys() - {"local"}


@pytest.fixture(params=sorted(PROTOCOLS))
def name(request) -> str:
    return request.param


@pytest.fixture
def protocol(name) -> Protocol:
    return PROTOCOLS[name]


@pytest.fixture
def backend(name, server, clock, metrics, monkeypatch):
    """The engine, its clock the fake one: no wait is slept, and ``clock() + s`` is a deadline in s seconds."""
    backend = made(name, server, clock, metrics, monkeypatch)
    yield backend
    backend.close()


# What it asks and what it finds.


def test_success(backend, name, protocol, server, clock, reply, metrics):
    server.script = [reply(200, encoded(protocol.found))]
    assert backend.search("who", 2, clock() + 30) == protocol.rows
    assert backend.search("who", 1, clock() + 30) == protocol.rows[:1]
    assert protocol.asks(server.received[0]) == protocol.asked
    assert server.received[0].path == protocol.path
    assert counts(metrics, name)["requests"] == 2 and "retries" not in counts(metrics, name)


def test_nothing_found_is_no_error(backend, name, protocol, server, clock, reply, metrics):
    server.script = [reply(200, encoded(protocol.nothing))]
    assert backend.search("who", 2, clock() + 30) == []
    assert counts(metrics, name) == {"requests": 1, "empty": 1}


def test_region_and_language_are_asked_for_and_part_of_the_cache_scope(
    name, protocol, server, clock, reply, metrics, monkeypatch
):
    backend = made(name, server, clock, metrics, monkeypatch, region="de", language="zh")
    server.script = [reply(200, encoded(protocol.found))]
    backend.search("who", 2, clock() + 30)
    backend.close()
    received = server.received[0]
    sent = received.params or (form(received.body) if name == "duckduckgo" else received.json)
    assert protocol.localised.items() <= sent.items()
    if protocol.localised:
        assert backend.cache_scope.startswith(f"{name}|") and "zh" in backend.cache_scope.split("|")
    else:
        assert "zh" not in backend.cache_scope.split("|")
    # Another server may find something else; the engine's own needs no name.
    assert backend.cache_scope.endswith(f"|{server.url}{urlsplit(backend.default_url).path}")


def test_a_policys_query_can_be_anything(backend, protocol, server, clock, reply):
    server.script = [reply(200, encoded(protocol.found))]
    for query in ("q" * 100_000, "\ud800 half a character", "a\x00b\r\nX-Evil: 1", '"&q=other#', "北京" * 500, " "):
        assert backend.search(query, 2, clock() + 30) == protocol.rows
        clock.now += 10
    assert all("x-evil" not in received.headers for received in server.received)
    assert max(len(protocol.asks(received)[0]) for received in server.received) <= backend.max_query_chars


def test_many_threads_get_their_own_answers(name, protocol, server, metrics, monkeypatch):
    backend = made(name, server, None, metrics, monkeypatch, rate_limit=1000.0)

    def echo(connection, request):
        query = str(protocol.asks(request)[0])
        body = encoded(protocol.found).decode().replace("A town", query, 1).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server.script = [echo]
    with ThreadPoolExecutor(16) as threads:
        queries = [f"question{i}" for i in range(64)]
        found = list(threads.map(lambda query: backend.search(query, 2, time.monotonic() + 60), queries))
    backend.close()
    assert [rows[0]["text"].split()[0] for rows in found] == queries


# What may pass is tried again.


def test_429_is_tried_again_when_its_time_fits(backend, name, protocol, server, clock, reply, metrics):
    server.script = [reply(429, b"slow down", "Retry-After: 7"), reply(200, encoded(protocol.found))]
    assert backend.search("who", 2, clock() + 30) == protocol.rows
    assert 7.0 <= sum(clock.sleeps) <= 7.5 + 1 / backend.limits.rate
    assert counts(metrics, name)["retries"] == 1


def test_429_is_told_at_once_when_its_time_does_not_fit(backend, name, server, clock, reply, metrics):
    server.script = [reply(429, b"\n slow down \nplease", "Retry-After: 31")]
    error = failure(backend, clock() + 30)
    assert error.kind == "rate_limited" and "answered 429 Too Many Requests: slow down (asks to wait 31 s)" in str(
        error
    )
    assert len(server.received) == 1 and not clock.sleeps
    assert counts(metrics, name) == {"requests": 1, "errors/rate_limited": 1}


def test_500_is_tried_again(backend, protocol, server, clock, reply):
    server.script = [reply(500, b"oops"), reply(502, b"<html>"), reply(200, encoded(protocol.found))]
    assert backend.search("who", 2, clock() + 30) == protocol.rows
    assert len(server.received) == 3


def test_500_for_ever_ends_after_four_requests(backend, server, clock, reply):
    server.script = [reply(500, b"oops: database")]
    error = failure(backend, clock() + 60)
    assert error.kind == "bad_reply" and "answered 500 Internal Server Error: oops: database" in str(error)
    assert len(server.received) == 4


def test_a_reset_is_tried_again(backend, protocol, server, clock, reply):
    server.script = [server.reset, server.reset, reply(200, encoded(protocol.found))]
    assert backend.search("who", 2, clock() + 30) == protocol.rows


def test_a_reset_for_ever_is_a_connection_error(backend, server, clock):
    server.script = [server.reset]
    assert failure(backend, clock() + 60).kind == "connection"
    assert len(server.received) == 4


def test_a_body_cut_off_by_the_connections_end_is_tried_again(backend, protocol, server, clock, reply):
    whole = reply(200, encoded(protocol.found))
    server.script = [whole[:-30], whole]
    assert backend.search("who", 2, clock() + 30) == protocol.rows
    assert len(server.received) == 2


def test_no_server_is_a_connection_error(backend, server, clock):
    server.close()
    assert failure(backend, clock() + 60).kind == "connection"


# What won't pass is told at once, with the body's first line.


def test_an_html_page(backend, name, server, clock, reply):
    server.script = [reply(200, b"\n<!DOCTYPE html><title>Log in</title>\n<p>more", "Content-Type: text/html")]
    error = failure(backend, clock() + 30)
    what = "sent a page without results" if name == "duckduckgo" else "sent an HTML page"
    assert error.kind == "bad_reply" and f"{what}: <!DOCTYPE html><title>Log in</title>" in str(error)
    assert len(server.received) == 1


def test_half_a_reply(backend, name, protocol, server, clock, reply):
    half = encoded(protocol.found)[: 40 if name == "duckduckgo" else 60]
    server.script = [reply(200, half)]
    error = failure(backend, clock() + 30)
    assert error.kind == "bad_reply" and half.decode()[:30] in str(error)
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "bad_request"), (422, "bad_request"), (401, "no_backend"), (404, "no_backend")]
)
def test_4xx(backend, server, clock, reply, status, kind):
    server.script = [reply(status, encoded({"error": f"no, {backend._key} won't do", "more": "x" * 5000}))]
    error = failure(backend, clock() + 30)
    assert error.kind == kind and f"answered {status} " in str(error)
    assert f"no, {'***' if backend.key_variable else ''} won't do" in str(error)
    assert len(str(error)) < 450 and len(server.received) == 1
    assert error.fault == (kind == "no_backend")


def test_a_redirect_is_not_followed(backend, server, clock, reply):
    server.script = [reply(302, b"", f"Location: {server.url}/elsewhere")]
    error = failure(backend, clock() + 30)
    assert error.kind == "no_backend" and "elsewhere" in str(error)
    assert len(server.received) == 1


@pytest.mark.parametrize("announced", [True, False])
def test_an_oversized_body(backend, server, clock, announced):
    def flood(connection, request):
        length = b"Content-Length: 50000000\r\n" if announced else b"Transfer-Encoding: chunked\r\n"
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")
        for _ in range(700):  # 45 MB
            connection.sendall(b"" if announced else b"10000\r\n" + b" " * 65536 + b"\r\n")

    server.script = [flood]
    error = failure(backend, clock() + 30)
    assert error.kind == "bad_reply" and "sent more than 4 MiB" in str(error)
    assert len(server.received) == 1


BOMB = gzip.compress(b"<p>" * 10_000_000)  # 30 MB in 30 KB


def test_a_decompression_bomb(backend, server, clock, reply):
    server.script = [reply(200, BOMB, "Content-Encoding: gzip")]
    error = failure(backend, clock() + 30)
    assert error.kind == "bad_reply" and "sent more than 4 MiB" in str(error)


LAYERED = gzip.compress(gzip.compress(b"\0" * 200_000_000))  # 200 MB in a kilobyte


def test_a_bomb_in_layers_is_not_unpacked(name, backend, server, clock, reply):
    server.script = [reply(200, LAYERED, "Content-Encoding: gzip, gzip")]
    tracemalloc.start()
    try:
        error = failure(backend, clock() + 30)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # DuckDuckGo's transport unpacks by itself, and leaves layers alone.
    said = "sent a page without results" if name == "duckduckgo" else "packed as 'gzip, gzip', which was not offered"
    assert error.kind == "bad_reply" and said in str(error)
    assert peak < 50e6


def test_a_damaged_compressed_body(name, backend, server, clock, reply):
    server.script = [reply(200, b"no gzip at all", "Content-Encoding: gzip")]
    error = failure(backend, clock() + 30)
    assert error.kind == ("connection" if name == "duckduckgo" else "bad_reply")


def test_a_result_is_cut_to_a_size_that_can_be_cached(backend, name, protocol, server, clock, reply):
    found = encoded(protocol.found).decode().replace("Tarnow", "T" * 30_000).replace("A town", "x" * 900_000)
    server.script = [reply(200, found.encode())]
    rows = backend.search("who", 2, clock() + 30)
    assert len(rows[0]["title"]) == 1000 and len(rows[0]["text"]) == 20_000 and rows[0]["url"] == ""
    assert rows[1] == protocol.rows[1]


# Its deadline holds.


def test_a_stall_ends_by_the_deadline(backend, server, clock):
    server.script = [server.stall]
    started = time.monotonic()
    error = failure(backend, clock() + 0.3)
    assert error.kind == "timeout" and time.monotonic() - started < 10
    assert not error.fault  # 0.3 s says nothing about the server
    assert len(server.received) <= 1


@pytest.mark.parametrize("name", ["searxng", "duckduckgo"])  # one for each transport
def test_a_byte_now_and_then_does_not_extend_the_deadline(backend, server, clock):
    server.script = [server.drip]
    started = time.monotonic()
    error = failure(backend, clock() + 1.2)
    assert error.kind == "timeout" and error.fault and time.monotonic() - started < 15


@pytest.mark.parametrize("name", ["searxng", "duckduckgo"])
def test_closing_ends_what_is_under_way(backend, server, clock):
    server.script = [server.stall]
    failed: list[SearchError] = []
    thread = threading.Thread(target=lambda: failed.append(failure(backend, clock() + 60)))
    thread.start()
    assert server.entered.acquire(timeout=20)
    backend.close()
    thread.join(timeout=20)
    assert not thread.is_alive() and failed[0].kind == "internal" and not failed[0].fault
    assert failure(backend, clock() + 60).kind == "internal"


# Its breaker.


def test_an_outage_opens_the_breaker_and_an_answer_closes_it(backend, name, protocol, server, clock, reply, metrics):
    server.script = [reply(500, b"down")]
    for _ in range(20):
        failure(backend, clock() + 30)
    asked = len(server.received)
    assert asked <= 4 * 7  # five searches, and a probe or two for the time that the retries took
    assert "failed" in str(failure(backend, clock() + 30)) and counts(metrics, name)["breaker_opened"] >= 1
    server.script = [reply(200, encoded(protocol.found))]
    clock.now += 31
    assert backend.search("who", 2, clock() + 30) == backend.search("who", 2, clock() + 30) == protocol.rows


# Whatever the JSON holds.

SHAPES: list[Any] = [
    *(None, 0, "text", [], [[]], {}, {"result": None}, {"results": {}}, {"organic": "x"}, {"web": []}),
    *({"webPages": 3}, {"references": 1}, {"organic_results": {"a": 1}}, {"result": [1]}, {"result": [[1, None, "x"]]}),
    *({key: [None, 1, [], {}, {"title": None, "url": 3}] for key in ("results", "organic", "references")},),
    {"results": [], "unresponsive_engines": [1, [2, None], "x"]},
    {"web": {"results": [{"title": "<" * 50_000, "url": "\ud800", "description": "&#x110000;"}]}},
    {"result": [[{"document": {"contents": 5}}, {"document": None}, {"contents": "\ud800"}]]},
    {"error": {"deep": 1}, "code": [], "message": 4},
]


def test_json_of_any_shape_is_rows_or_a_bad_reply(backend, name, server, clock, reply):
    bodies = [json.dumps(shape).encode() for shape in SHAPES]
    bodies += [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe\x00",
        b"",
        b"NaN",
        b"1" * 5000,
        b"\x00",
        b"<?xml version='1.0' encoding='x'?>",
    ]
    server.script = [reply(200, body) for body in bodies]
    for _ in bodies:
        try:
            for row in backend.search("who", 9, clock() + 60):
                assert (
                    set(row) == {"title", "url", "text"}
                    and "".join(row.values()).encode()
                    and (row["title"] or row["text"])
                )
        except SearchError as error:
            assert error.kind in ("bad_reply", "no_backend")
        clock.now += 31  # past an open breaker
    assert len(server.received) >= len(bodies) - 1
