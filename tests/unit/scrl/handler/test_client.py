"""The HTTP client as a search handler: the same answers and counts as in-process, deadlines, retries, endings."""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from fastapi import FastAPI, Request

from scrl.handler.client import HttpSearchHandler
from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.http_service import json_error, json_response
from scrl.handler.proxy import create_proxy_app
from scrl.handler.server_handler import create_app
from scrl.handler.web_search_agent.search_api import SearchError
from scrl.types import ToolCall, ToolResult


class Backend:
    """Names the query in its row; ``gate`` holds back queries that start with "slow"; "fail*" and "nothing*" do so."""

    name = "test"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.asked: list[str] = []

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        self.asked.append(query)
        self.entered.release()
        if query.startswith("slow"):
            self.gate.wait(60)
        if query.startswith("fail"):
            raise SearchError("rate_limited", f"too many requests for {query}")
        row = {
            "title": query,
            "url": f"https://a.example/{query}",
            "text": "half \ud83d emoji" if query == "b" else "t",
        }
        return [] if query.startswith("nothing") else [row]

    def close(self) -> None:
        self.gate.set()


def search(*queries: str) -> ToolCall:
    return ToolCall("web_search", {"query": list(queries)})


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def url(serve_app, backend) -> str:
    config = HandlerConfig(max_workers=32)
    return serve_app(create_app(config, SearchHandler(config, backend)))


@pytest.fixture
def client(url, backend):
    with HttpSearchHandler(url, HandlerConfig(max_workers=32)) as handler:
        yield handler
        backend.gate.set()


def test_answers_and_counts_are_those_of_the_handler_in_this_process(serve_app, client, url):
    calls = [search("a", "nothing"), search("b", "fail"), search("fail"), search("c", "d"), search("a"), search("  ")]
    calls += [ToolCall("rm", {"query": ["x"]}), search()]
    behind_two_proxies = serve_app(
        create_proxy_app(
            HandlerConfig(server_url_list=(serve_app(create_proxy_app(HandlerConfig(server_url_list=(url,)))),))
        )
    )

    def outcome(handler: SearchHandler | HttpSearchHandler) -> tuple[list[tuple], dict[str, float]]:
        results = [handler.handle([call])[0] for call in calls]
        kept = [(r.items, r.ok, r.error, r.error_kind, r.cached) for r in results[:5]]
        kept += [(r.ok, r.error_kind) for r in results[5:]]  # refused in other words
        metrics = handler.metrics()
        names = ("calls", "empty", "errors", "errors/rate_limited", "errors/bad_request")
        return kept, {name: metrics[f"search/{name}"] for name in names}

    with SearchHandler(HandlerConfig(), Backend()) as inprocess:
        expected, counted = outcome(inprocess)
    expected[1][0][0][0]["text"] = "half ? emoji"  # what UTF-8 can't hold
    assert [result[0] for result in expected[:5]] != [[]] * 5
    assert outcome(client) == (expected, counted)
    with HttpSearchHandler(behind_two_proxies, HandlerConfig()) as far:
        again = outcome(far)
    uncached = lambda kept: [result[:-1] if len(result) > 2 else result for result in kept]  # noqa: E731
    assert (uncached(again[0]), again[1]) == (uncached(expected), counted)  # the server remembers the first client's


def test_every_field_is_carried_over(client):
    first, second = client.handle([search("a")]) + client.handle([search("a")])
    assert (first.cached, second.cached) == (False, True) and client.metrics()["search/cache_hits"] == 1
    assert 0 < first.latency_s < 30
    assert first.items == [[{"title": "a", "url": "https://a.example/a", "text": "t"}]]


def test_at_most_so_many_at_once(url, backend):
    with HttpSearchHandler(url, HandlerConfig(max_workers=3)) as handler:
        futures = [handler.submit(search(f"slow {i}")) for i in range(10)]
        for _ in range(3):
            assert backend.entered.acquire(timeout=20)
        assert not backend.entered.acquire(timeout=0.3), "a fourth was let in"
        backend.gate.set()
        assert [future.result(30).items[0][0]["title"] for future in futures] == [f"slow {i}" for i in range(10)]


def test_a_call_ends_by_its_deadline_wherever_it_hangs(client, url, backend):
    started = time.monotonic()
    (late,) = client.handle([search("slow")], 0.5)
    assert (late.ok, late.error_kind) == (False, "timeout") and time.monotonic() - started < 20
    with HttpSearchHandler(url, HandlerConfig(max_workers=1)) as handler:
        futures = [handler.submit(search("slow 1"), 30.0), handler.submit(search("slow 2"), 0.2)]
        assert futures[1].result(20).error.endswith("gave no answer within 0.2 s."), "it stood in the queue"
        assert not futures[0].done()
        backend.gate.set()
        assert futures[0].result(30).ok
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and says nothing
        with HttpSearchHandler(f"http://127.0.0.1:{deaf.getsockname()[1]}", HandlerConfig()) as handler:
            assert handler.handle([search("a")], 0.3)[0].error_kind == "timeout"


def test_a_connection_error_is_tried_again_until_the_deadline():
    reply = json.dumps({"query_contents": [{"result": {"items": [[{"title": "a", "url": "u", "text": "t"}]]}}]})
    granted: list[float] = []

    def reset_twice_then_answer(listener: socket.socket) -> None:
        for attempt in range(3):
            connection, _ = listener.accept()
            with connection:
                head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
                body += b"" if body else connection.recv(65536)
                granted.append(json.loads(body)["timeout_s"])
                if attempt < 2:  # closed without a word: the client sees it break
                    continue
                connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(reply)}\r\n\r\n{reply}".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=reset_twice_then_answer, args=(listener,), daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with HttpSearchHandler(address, HandlerConfig()) as handler:
            (result,) = handler.handle([search("a")])
    assert result.ok and result.items[0][0]["title"] == "a"
    assert len(granted) == 3 and 30 > granted[0] > granted[1] > granted[2], "what is left, not the whole again"
    with HttpSearchHandler(address, HandlerConfig()) as handler:  # nobody listens there now
        started = time.monotonic()
        (result,) = handler.handle([search("a")], 2.0)
        assert time.monotonic() - started >= 2.0
    assert result.error_kind == "connection"
    assert result.error.startswith(f"No search server at {address} within 2 s: ")


def test_a_server_that_refuses_or_lies_is_one_sentence(serve_app, monkeypatch, url):
    replies: list[Callable[[dict], object]] = [
        lambda item: {"query_contents": [item]},  # a server of the family: content only
        lambda item: {"query_contents": [item | {"result": {"items": "x"}}]},
        lambda item: {"query_contents": [item | {"result": {"items": [[], []]}}]},
        lambda item: {"query_contents": []},
        lambda item: [],
    ]
    app = FastAPI()

    @app.post("/{kind}/handle_execution")
    async def reply(kind: int, request: Request):
        if kind == 99:
            return json_error(503, "busy")
        return json_response(replies[kind]((await request.json())["query_contents"][0]))

    liar = serve_app(app)
    for kind in (*range(len(replies)), 99):
        with HttpSearchHandler(f"{liar}/{kind}", HandlerConfig()) as handler:
            (result,) = handler.handle([search("a")])
        assert (result.ok, result.error_kind) == (False, "bad_reply"), kind
        assert f"{liar}/{kind}" in result.error and result.error.endswith(".")
    monkeypatch.setenv("SCRL_TOKEN", "secret")
    config = HandlerConfig()
    guarded = serve_app(create_app(config, SearchHandler(config, Backend())))
    with HttpSearchHandler(guarded, config) as handler:
        assert handler.handle([search("a")])[0].ok
    monkeypatch.delenv("SCRL_TOKEN")
    with HttpSearchHandler(guarded, config) as handler:
        (result,) = handler.handle([search("a")])
    assert result.error_kind == "bad_request" and "answered 401: the token is missing or wrong" in result.error


def test_close_answers_what_is_pending_and_what_comes_later(url, backend):
    handler = HttpSearchHandler(url, HandlerConfig(max_workers=1))
    futures = [handler.submit(search(f"slow {i}")) for i in range(3)]
    assert backend.entered.acquire(timeout=20)
    handler.close()
    handler.close()
    assert [future.result(0).error for future in futures] == ["The search handler was closed."] * 3
    assert handler.handle([search("a")])[0].error == "The search handler is closed."
    assert handler.metrics()["search/errors/internal"] == 4
    backend.gate.set()


def test_an_episode_may_browse_what_its_searches_found_until_it_is_released(serve_app):
    class Recording:
        """A handler that notes what it is told."""

        def __init__(self) -> None:
            self.told: list[tuple[str, str, str, dict[str, str] | None]] = []
            self.released: queue.Queue[str] = queue.Queue()

        def release(self, episode_id: str) -> None:
            self.released.put(episode_id)

        def submit(self, call, timeout_s, *, episode_id, question, allowed_urls) -> "Future[ToolResult]":
            self.told.append((call.name, episode_id, question, allowed_urls))
            future: Future[ToolResult] = Future()
            rows = [{"title": "t", "url": f"https://{q}.example", "text": ""} for q in call.arguments.get("query", [])]
            future.set_result(ToolResult(items=[[row] for row in rows] or [[]]))
            return future

        def close(self) -> None: ...

    recording = Recording()
    browse = ToolCall("browse_webpage", {"url_list": ["https://a.example"]})
    with HttpSearchHandler(serve_app(create_app(HandlerConfig(), recording)), HandlerConfig()) as handler:
        handler.submit(search("b", "a"), episode_id="e1", question="who?").result(30)
        handler.submit(search("c"), episode_id="e2").result(30)
        handler.submit(browse, episode_id="e1", question="who?").result(30)
        handler.release("e1")
        handler.submit(browse, episode_id="e1").result(30)
        assert recording.released.get(timeout=20) == "e1", "the server was not told"
    assert recording.told == [
        ("web_search", "e1", "who?", None),
        ("web_search", "e2", "", None),
        ("browse_webpage", "e1", "who?", {"https://a.example": "a", "https://b.example": "b"}),
        ("browse_webpage", "e1", "", {}),
    ]


def test_a_release_reaches_every_server_behind_proxies_and_its_failure_is_only_counted(serve_app):
    config = HandlerConfig()
    handlers = [SearchHandler(config, Backend()) for _ in range(2)]
    urls = tuple(serve_app(create_app(config, handler)) for handler in handlers)
    inner = serve_app(create_proxy_app(HandlerConfig(server_url_list=urls)))
    outer = serve_app(create_proxy_app(HandlerConfig(server_url_list=(inner,))))
    with HttpSearchHandler(outer, config) as client:
        for number in range(4):
            client.submit(search("a"), episode_id=f"e{number}").result(30)
        assert sum(len(handler._contexts) for handler in handlers) == 4
        for number in range(4):
            client.release(f"e{number}")
        deadline = time.monotonic() + 20
        while any(len(handler._contexts) for handler in handlers) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [len(handler._contexts) for handler in handlers] == [0, 0]
        assert "search/unreleased" not in client.metrics()
    with HttpSearchHandler("http://127.0.0.1:9", config) as client:
        client.release("e")
        while not client.metrics().get("search/unreleased") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.metrics()["search/unreleased"] == 1 and client.metrics()["search/errors"] == 0


@pytest.mark.parametrize("arguments", [None, {}, {"query": "lone"}, {"query": [object()]}, {"query": {}}, {"a": [1]}])
def test_arguments_of_any_kind_are_a_result(client, arguments):
    (result,) = client.handle([ToolCall("web_search", arguments)])
    assert isinstance(result, ToolResult) and result.error_kind in ("bad_request", "internal", "bad_reply")


@pytest.mark.parametrize("address", ["", "127.0.0.1:5004", "ftp://x", "http://", "http://[", "nowhere"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ValueError, match="search.server_url=.*write it as http://127.0.0.1:5004"):
        HttpSearchHandler(address, HandlerConfig())
