"""The search server: DeepResearcher's payload in and out, limits, the token, errors that are one sentence."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from scrl.handler import http_service
from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.server_handler import create_app, main
from scrl.types import ToolCall, ToolResult

ROOT = Path(__file__).resolve().parents[4]


class Backend:
    """Answers a query with a row that names it; ``gate`` holds back the queries that start with "slow"."""

    name = "test"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.texts: dict[str, str] = {}

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        if query.startswith("slow"):
            self.gate.wait(60)
        if query.startswith("nothing"):
            return []
        return [{"title": query, "url": "https://a.example", "text": self.texts.get(query, f"about {query}")}]

    def close(self) -> None:
        self.gate.set()


@asynccontextmanager
async def client_of(config: HandlerConfig, handler=None, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client that talks to the app without a socket."""
    transport = httpx.ASGITransport(create_app(config, handler or SearchHandler(config, Backend())))
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
        yield client


def item(idx: int, tool_call: object) -> dict:
    return {"idx": idx, "question": "q", "think": "t", "tool_call": tool_call, "total_number": 9}


def search(*queries: str) -> dict:
    return {"name": "web_search", "arguments": {"query": list(queries)}}


async def test_the_familys_payload_comes_back_in_order_with_content():
    calls = [
        search("b", "a"),
        json.dumps(search("nothing here")),
        '```json\n{"name": "web_search", "arguments": {"query": "lone"}}\n```',  # repaired, as in an episode
        search("</tool_call> and </think>"),
    ]
    sent = [item(7 - i, call) | {"extra": i} for i, call in enumerate(calls)]
    async with client_of(HandlerConfig()) as client:
        reply = await client.post("/handle_execution", json={"query_contents": sent})
    assert reply.status_code == 200
    back = reply.json()["query_contents"]
    assert [{k: v for k, v in one.items() if k not in ("content", "result")} for one in back] == sent
    read = [json.loads(one["content"]) for one in back]
    assert read[0] == [
        {"query": q, "results": [{"title": q, "url": "https://a.example", "text": f"about {q}"}]} for q in ("b", "a")
    ]
    assert read[1] == [{"query": "nothing here", "results": []}]
    assert read[2][0]["results"][0]["title"] == "lone"
    assert read[3][0]["query"] == "</tool_call> and </think>"
    result = ToolResult(**back[0]["result"])
    assert result.ok and [rows[0]["title"] for rows in result.items] == ["b", "a"] and result.latency_s > 0


async def test_every_query_gets_its_results_also_the_same_one_twice():
    """Search noise may ask one thing for two queries; the client counts on a list for each."""
    async with client_of(HandlerConfig(max_queries=3)) as client:
        sent = [item(0, search("a", "a")), item(1, search("a", "b", "c", "d"))]
        reply = await client.post("/handle_execution", json={"query_contents": sent})
    first, second = (one["result"]["items"] for one in reply.json()["query_contents"])
    assert [rows[0]["title"] for rows in first] == ["a", "a"]
    assert [[row["title"] for row in rows] for rows in second] == [["a"], ["b"], ["c"], []]  # as in the process


async def test_one_calls_failure_is_that_calls_content():
    broken = [
        None,
        5,
        {},
        {"name": "rm", "arguments": {}},
        search(),
        "no json",
        '{"name": "web_search"}',
        "[" * 100_000,
    ]
    broken += [{"name": "web_search", "arguments": {"query": ["<answer>x</answer>"] * 2, "a": "</tool_call><answer>"}}]
    sent = [item(i, call) for i, call in enumerate([search("a"), *broken])] + [{}]
    async with client_of(HandlerConfig()) as client:
        reply = await client.post("/handle_execution", json={"query_contents": sent})
    back = reply.json()["query_contents"]
    assert len(back) == len(sent) and back[0]["result"]["ok"] and back[-2]["result"]["ok"]
    for one in [*back[1:-2], back[-1]]:
        assert one["result"]["error_kind"] == "bad_request", one
        assert json.loads(one["content"]) == {"error": one["result"]["error"]}
        assert one["result"]["error"].endswith(".") and len(one["result"]["error"]) < 200


class RecordingHandler:
    """Notes how it is called, and finds nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, dict]] = []

    def submit(self, call: ToolCall, timeout_s: float, **about: object) -> "Future[ToolResult]":
        self.seen.append((call.name, timeout_s, about))
        future: Future[ToolResult] = Future()
        future.set_result(ToolResult(items=[[]]))
        return future


async def test_the_callers_deadline_counts_up_to_the_servers():
    handler = RecordingHandler()
    async with client_of(HandlerConfig(timeout_s=20.0), handler) as client:
        for asked in (0.5, 60.0, None):
            body = {"query_contents": [item(0, search("a"))], "timeout_s": asked}
            await client.post("/handle_execution", json=body)
    assert [timeout_s for _, timeout_s, _ in handler.seen] == [0.5, 20.0, 20.0]


async def test_a_call_that_takes_too_long_is_its_result():
    backend, config = Backend(), HandlerConfig()
    async with client_of(config, SearchHandler(config, backend)) as client:
        body = {"query_contents": [item(0, search("slow"))], "timeout_s": 0.2}
        result = (await client.post("/handle_execution", json=body)).json()["query_contents"][0]["result"]
        backend.gate.set()
    assert (result["ok"], result["error_kind"]) == (False, "timeout") and result["latency_s"] >= 0.2


async def test_what_the_handler_is_told_of_the_episode():
    handler = RecordingHandler()
    browse = {"name": "browse_webpage", "arguments": {"url_list": ["https://a.example/x"]}}
    sent = [item(0, browse) | {"episode_id": "e1", "allowed_urls": {"https://a.example/x": "a"}}, item(1, search("a"))]
    async with client_of(HandlerConfig(), handler) as client:
        reply = await client.post("/handle_execution", json={"query_contents": sent})
    (browsed, _, first), (searched, _, second) = handler.seen
    assert (browsed, searched) == ("browse_webpage", "web_search")
    assert first == {"episode_id": "e1", "question": "q", "allowed_urls": {"https://a.example/x": "a"}}
    assert second == {"episode_id": "", "question": "q", "allowed_urls": None}
    assert "allowed_urls" not in reply.json()["query_contents"][0]


async def test_text_that_utf8_cannot_hold_passes():
    backend, config = Backend(), HandlerConfig()
    backend.texts["a"] = "half \ud83d emoji"
    async with client_of(config, SearchHandler(config, backend)) as client:
        body = (
            b'{"query_contents": [{"idx": 0, "think": "\\ud800", "tool_call": %s}]}' % json.dumps(search("a")).encode()
        )
        reply = await client.post("/handle_execution", content=body, headers={"content-type": "application/json"})
    (back,) = reply.json()["query_contents"]
    assert back["think"] == "?" and back["result"]["items"][0][0]["text"] == "half ? emoji"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON decode error"),
        (b"[" * 200_000, "body"),
        (b"[]", "body: Input should be a valid"),
        (b"{}", "query_contents: Field required"),
        (b'{"query_contents": 5}', "query_contents: Input should be a valid list"),
        (b'{"query_contents": ["x"]}', "query_contents.0: Input should be a valid dictionary"),
        (b'{"query_contents": [], "timeout_s": -1}', "timeout_s: Input should be greater than 0"),
        (b'{"query_contents": [], "timeout_s": NaN}', "timeout_s: Input should be"),
        (json.dumps({"query_contents": [{}] * 4097}).encode(), "query_contents: List should have at most 4096 items"),
    ],
)
async def test_a_request_that_is_none_is_one_sentence(body, said):
    async with client_of(HandlerConfig()) as client:
        reply = await client.post("/handle_execution", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and said in reply.json()["error"]
        assert (await client.post("/nowhere")).json() == {"error": "Not Found"}
        assert (await client.get("/handle_execution")).json() == {"error": "Method Not Allowed"}


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_request_too_large_is_refused_before_it_is_read(chunked, monkeypatch):
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20
            sent.append(1)

    sent: list[int] = []
    async with client_of(HandlerConfig()) as client:
        content = chunks() if chunked else b" " * (http_service.MAX_BODY_BYTES + 1)
        reply = await client.post("/handle_execution", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 413 and "send fewer items at once" in reply.json()["error"]
    assert len(sent) <= http_service.MAX_BODY_BYTES / 2**20 + 2


async def test_without_the_token_nothing_is_answered(monkeypatch):
    monkeypatch.setenv("SCRL_TOKEN", "s3cret")
    async with client_of(HandlerConfig()) as client:
        for header in ("", "Bearer", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret"):
            for path in ("/health", "/metrics", "/nowhere"):
                reply = await client.get(path, headers={"Authorization": header} if header else {})
                assert reply.status_code == 401 and "SCRL_TOKEN" in reply.json()["error"]
        huge = {"content": b"x" * (http_service.MAX_BODY_BYTES + 1)}
        assert (await client.post("/handle_execution", **huge)).status_code == 401
        assert (await client.get("/health", headers={"Authorization": "bearer s3cret"})).status_code == 200
        assert (await client.get("/health", headers=http_service.client_headers())).status_code == 200
    monkeypatch.setenv("SCRL_TOKEN", "schlüssel")
    with pytest.raises(ValueError, match="SCRL_TOKEN holds a character that no HTTP header can"):
        http_service.client_headers()


async def test_health_and_metrics():
    async with client_of(HandlerConfig(topk=2)) as client:
        await client.post("/handle_execution", json={"query_contents": [item(0, search("a", "nothing"))]})
        assert (await client.get("/health")).json() == {"status": "ok", "search_engine": "local", "topk": 2}
        reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in reply.text.splitlines())
    assert (lines["scrl_search_queries"], lines["scrl_search_empty"]) == ("2", "1")
    assert float(lines["scrl_search_backend_test_s_p50"]) > 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_needs_a_token(host):
    with pytest.raises(ValueError, match=f"host={host} can be reached from other machines.*export SCRL_TOKEN"):
        http_service.serve(create_app(HandlerConfig(), SearchHandler(HandlerConfig(), Backend())), host, 0, "x")


def test_a_taken_port_and_a_wrong_setting_are_one_sentence(capsys, tmp_path):
    corpus = f"index_corpus={ROOT / 'data/demo/corpus.jsonl'}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([corpus, f"port={taken.getsockname()[1]}"]) == 2
        assert main([corpus, "port=70000"]) == 2
        assert main(["topk=many"]) == 2
        assert main(["topkk=2"]) == 2
        assert main(["--config", str(tmp_path / "none.yaml")]) == 2
        assert main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, said in zip(
        lines,
        ["can't listen on 127.0.0.1:", "can't listen on 127.0.0.1:70000", "topk='many'", "did you mean topk?"]
        + ["none.yaml can't be read", "index_corpus is empty"],
        strict=True,
    ):
        assert line.startswith("server_handler: ") and said in line


def test_it_starts_from_any_directory_and_ends_with_sigterm(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SCRL_TOKEN")}
    command = [sys.executable, "-P", str(ROOT / "scrl/handler/server_handler.py")]
    overrides = ["port=0", "index_corpus=data/demo/corpus.jsonl", f"index_dir={tmp_path}"]
    process = subprocess.Popen(
        [*command, *overrides], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url = process.stdout.readline().split()[-1]
        body = {"query_contents": [item(0, search("The Northern Anchor"))]}
        reply = httpx.post(url + "/handle_execution", json=body, timeout=60, trust_env=False)
        assert reply.json()["query_contents"][0]["result"]["items"][0][0]["title"] == "The Northern Anchor"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
