"""The contract that every engine on the network keeps, against a local server that speaks its protocol."""

import gzip
import json
import logging
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from scrl.handler.config import HandlerConfig
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.web_search_agent.remote import RemoteBackend
from scrl.handler.web_search_agent.resilience import Guard
from scrl.handler.web_search_agent.search_api import BACKENDS, SearchError

KEY = "sk-very/secret+key=1"
HITS = [
    ("Tarnow", "https://w.org/wiki/Tarnow", "A town on the river Sel."),
    ("Sel (river)", "https://w.org/wiki/Sel", "Höhe 12 m; 北京 & more"),
]
ROWS = [dict(zip(("title", "url", "text"), hit, strict=True)) for hit in HITS]


def items(title: str, url: str, text: str, **more: Any) -> list[dict[str, Any]]:
    return [{title: hit[0], url: hit[1], text: hit[2], **more} for hit in HITS]


def contents(title: str, text: str) -> dict[str, str]:
    return {"id": "12", "contents": f'"{title}"\n{text}'}


@dataclass
class Protocol:
    """One engine's replies in the shapes recorded from it, and what a request to it must hold."""

    found: Any
    nothing: Any
    asks: Callable[[Any], Any]  # received -> (query, results wanted, key)
    asked: tuple[Any, ...] = ("who", 2, KEY)
    path: str = ""
    localised: dict[str, str] = field(default_factory=dict)  # what region=de, language=zh adds
    rows: list[dict[str, str]] = field(default_factory=lambda: ROWS)


def page(*hits: tuple[str, str, str]) -> str:
    """DuckDuckGo's HTML page."""
    results = "".join(
        f'<div class="result results_links results_links_deep web-result"><div class="links_main result__body">'
        f'<h2 class="result__title"><a rel="nofollow" class="result__a" href="{url}">{title}</a></h2>'
        f'<div class="result__extras"><a class="result__url" href="{url}"> w.org </a></div>'
        f'<a class="result__snippet" href="{url}">{text}</a></div></div>'
        for title, url, text in hits
    )
    none = "" if hits else '<div class="no-results">No results found for <b>who</b></div>'
    title = "<title>who at DuckDuckGo</title>"
    return f'<!DOCTYPE html><html><head>{title}</head><body><div id="links">{results}{none}</div></body></html>'


def form(body: bytes) -> dict[str, str]:
    return dict(parse_qsl(body.decode(), keep_blank_values=True))


PROTOCOLS: dict[str, Protocol] = {
    "retriever": Protocol(
        found={"result": [[{"document": contents(t, x) | {"url": u}, "score": 0.8} for t, u, x in HITS]]},
        nothing={"result": [[]]},
        asks=lambda r: (*r.json["queries"], r.json["topk"], r.json["return_scores"]),
        asked=("who", 2, True),
        path="/retrieve",
    ),
    "searxng": Protocol(
        found={"query": "who", "number_of_results": 0, "results": items("title", "url", "content", engine="google")},
        nothing={"query": "who", "number_of_results": 0, "results": [], "answers": [], "unresponsive_engines": []},
        asks=lambda r: (r.params["q"], r.params["format"]),
        asked=("who", "json"),
        path="/search",
        localised={"language": "zh"},
    ),
    "google": Protocol(
        found={
            "searchParameters": {"q": "who"},
            "organic": items("title", "link", "snippet", position=1),
            "credits": 1,
        },
        nothing={"searchParameters": {"q": "who"}, "organic": [], "credits": 1},
        asks=lambda r: (r.json["q"], r.json["num"], r.headers["x-api-key"]),
        path="/search",
        localised={"gl": "de", "hl": "zh"},
    ),
    "serpapi": Protocol(
        found={"search_metadata": {"status": "Success"}, "organic_results": items("title", "link", "snippet")},
        nothing={
            "search_metadata": {"status": "Success"},
            "search_information": {"organic_results_state": "Fully empty"},
            "error": "Google hasn't returned any results for this query.",
        },
        asks=lambda r: (r.params["q"], int(r.params["num"]), r.params["api_key"]),
        path="/search.json",
        localised={"gl": "de", "hl": "zh"},
    ),
    "bing": Protocol(
        found={"_type": "SearchResponse", "webPages": {"value": items("name", "url", "snippet")}},
        nothing={"_type": "SearchResponse", "queryContext": {"originalQuery": "who"}},
        asks=lambda r: (r.params["q"], int(r.params["count"]), r.headers["ocp-apim-subscription-key"]),
        path="/v7.0/search",
        localised={"cc": "de", "setLang": "zh"},
    ),
    "duckduckgo": Protocol(
        found=page(*HITS),
        nothing=page(),
        asks=lambda r: (form(r.body)["q"], form(r.body)["l"]),
        asked=("who", "wt-wt"),
        path="/html/",
        localised={"l": "de-zh"},
    ),
    "baidu": Protocol(
        found={"request_id": "1", "references": items("title", "url", "content", id=1, type="web", web_anchor="w")},
        nothing={"request_id": "1", "references": []},
        asks=lambda r: (
            r.json["messages"][0]["content"],
            r.json["resource_type_filter"][0]["top_k"],
            r.headers["authorization"].removeprefix("Bearer "),
        ),
        path="/v2/ai_search/web_search",
    ),
    "tavily": Protocol(
        found={
            "query": "who",
            "answer": None,
            "results": items("title", "url", "content", score=0.9, raw_content=None),
        },
        nothing={"query": "who", "answer": None, "results": []},
        asks=lambda r: (r.json["query"], r.json["max_results"], r.headers["authorization"].removeprefix("Bearer ")),
        path="/search",
    ),
    "brave": Protocol(
        found={
            "type": "search",
            "web": {
                "results": [
                    {
                        "title": t,
                        "url": u,
                        "description": x.replace("river", "<strong>river</strong>").replace("&", "&amp;"),
                    }
                    for t, u, x in HITS
                ]
            },
        },
        nothing={"type": "search", "query": {"original": "who"}, "mixed": {}},
        asks=lambda r: (r.params["q"], int(r.params["count"]), r.headers["x-subscription-token"]),
        path="/res/v1/web/search",
        localised={"country": "DE", "search_lang": "zh-hans"},
    ),
    "proxy": Protocol(
        found={"query": "who", "results": items("title", "url", "content")},
        nothing={"query": "who", "results": []},
        asks=lambda r: (r.params["q"], r.params["format"], r.headers["authorization"].removeprefix("Bearer ")),
        asked=("who", "json", KEY),
        path="/search",  # which language it searches in is what it was started with
    ),
}


def encoded(body: Any) -> bytes:
    return (body if isinstance(body, str) else json.dumps(body)).encode()


def test_every_engine_on_the_network_is_here():
    assert PROTOCOLS.keys() == BACKENDS.keys() - {"local"}


@pytest.fixture(params=sorted(PROTOCOLS))
def name(request) -> str:
    return request.param


@pytest.fixture
def protocol(name) -> Protocol:
    return PROTOCOLS[name]


@pytest.fixture
def metrics() -> HandlerMetrics:
    return HandlerMetrics()


@pytest.fixture
def backend(name, server, clock, metrics, monkeypatch):
    """The engine, its clock the fake one: no wait is slept, and ``clock() + s`` is a deadline in s seconds."""
    backend = _made(name, server, clock, metrics, monkeypatch)
    yield backend
    backend.close()


def _made(name, server, clock, metrics, monkeypatch, **config: Any) -> RemoteBackend:
    for variable in ("SERPER_API_KEY", "SERPAPI_API_KEY", "BING_SEARCH_KEY", "QIANFAN_API_KEY", "TAVILY_API_KEY"):
        monkeypatch.setenv(variable, KEY)
    monkeypatch.setenv("BRAVE_API_KEY", KEY)
    monkeypatch.setenv("SCRL_TOKEN", KEY)
    guard = Guard if clock is None else partial(Guard, clock=clock, sleep=clock.sleep)
    return BACKENDS[name](HandlerConfig(**config), metrics, url=server.url, guard=guard)


def counts(metrics: HandlerMetrics, name: str) -> dict[str, float]:
    prefix = f"search/backend/{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.as_dict().items() if key.startswith(prefix)}


def failure(backend, deadline: float) -> SearchError:
    with pytest.raises(SearchError) as caught:
        backend.search("who", 2, deadline)
    assert str(caught.value).startswith(f"{backend.name} ") and KEY not in str(caught.value)
    assert ("retired" in str(caught.value)) == (backend.name == "bing")
    return caught.value


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
    backend = _made(name, server, clock, metrics, monkeypatch, region="de", language="zh")
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
    backend = _made(name, server, None, metrics, monkeypatch, rate_limit=1000.0)

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
    if name == "duckduckgo":
        pytest.skip("its transport unpacks one layer by itself")
    server.script = [reply(200, LAYERED, "Content-Encoding: gzip, gzip")]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = failure(backend, clock() + 30)
    assert error.kind == "bad_reply" and "packed as 'gzip, gzip', which was not offered" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


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


# What only one engine does.


def test_retriever_without_scores_and_with_titles(server, clock, reply, metrics, monkeypatch):
    backend = _made("retriever", server, clock, metrics, monkeypatch)
    documents = [contents("Tarnow", "A town.\nOn a river."), {"title": "Sel", "text": "A river.", "url": "u"}]
    server.script = [reply(200, encoded({"result": [documents]}))]
    assert backend.search("who", 2, clock() + 30) == [
        {"title": "Tarnow", "url": "", "text": "A town.\nOn a river."},
        {"title": "Sel", "url": "u", "text": "A river."},
    ]
    assert backend.cache_scope == f"retriever|{server.url}/retrieve"
    backend.close()


def test_searxng_whose_engines_are_silent_is_an_error_not_an_empty_result(server, clock, reply, metrics, monkeypatch):
    backend = _made("searxng", server, clock, metrics, monkeypatch)
    silent = [["google", "CAPTCHA"], ["brave", "timeout"]]
    found = PROTOCOLS["searxng"].found
    server.script = [
        reply(200, encoded({"results": [], "unresponsive_engines": silent})),
        reply(200, encoded(found | {"unresponsive_engines": silent})),
        reply(403, b"<html>Forbidden"),
    ]
    assert "didn't answer (google: CAPTCHA, brave: timeout)" in str(failure(backend, clock() + 30))
    assert backend.search("who", 2, clock() + 30) == ROWS
    assert "add json to search.formats" in str(failure(backend, clock() + 30))
    backend.close()


def test_errors_under_status_200_and_an_empty_account(server, clock, reply, metrics, monkeypatch):
    cases = [
        ("serpapi", 200, {"error": "Your searches for the month have run out."}, "bad_reply", "searches for the month"),
        ("baidu", 200, {"code": "quota", "message": "daily limit"}, "bad_reply", "reports quota: daily limit"),
        ("google", 400, {"message": "Not enough credits", "statusCode": 400}, "no_backend", "Not enough credits"),
        ("duckduckgo", 202, {}, "rate_limited", "a check for robots"),
    ]
    for engine, status, body, kind, said in cases:
        backend = _made(engine, server, clock, metrics, monkeypatch)
        server.script = [reply(status, encoded(body))]
        error = failure(backend, clock() + 30)
        assert error.kind == kind and said in str(error)
        backend.close()


def test_the_key_is_in_no_log_though_serpapi_takes_it_in_the_address(
    server, clock, reply, metrics, monkeypatch, caplog
):
    backend = _made("serpapi", server, clock, metrics, monkeypatch)
    server.script = [reply(500, KEY.encode()), server.reset, reply(200, encoded({"organic_results": [{"title": KEY}]}))]
    with caplog.at_level(logging.INFO):
        assert backend.search("who", 2, clock() + 30) == [{"title": "***", "url": "", "text": ""}]
    backend.close()
    assert KEY not in caplog.text and "sk-very" not in caplog.text and "sk-very" not in repr(backend)


def test_brave_loses_its_markup_and_nothing_else(server, clock, reply, metrics, monkeypatch):
    backend = _made("brave", server, clock, metrics, monkeypatch)
    hit = {"title": "a < b and c > d", "url": "u", "description": "x<y, 1 <2> 3, <strong>so</strong>&lt;i&gt;<br/>."}
    server.script = [reply(200, encoded({"web": {"results": [hit]}}))]
    assert backend.search("who", 2, clock() + 30) == [
        {"title": "a < b and c > d", "url": "u", "text": "x<y, 1 <2> 3, so<i>."}
    ]
    backend.close()


def test_rate_limit_of_the_configuration_replaces_the_engines_own(server, clock, reply, metrics, monkeypatch):
    backend = _made("brave", server, clock, metrics, monkeypatch, rate_limit=0.5)
    server.script = [reply(200, encoded(PROTOCOLS["brave"].found))]
    for _ in range(3):
        backend.search("who", 2, clock() + 30)
    backend.close()
    assert clock.sleeps == [2.0, 2.0]
