"""The threaded handler: order, single flight, deadlines, failures; proved by counts of what the backend was asked."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler, normalise_query
from scrl.handler.web_search_agent.search_api import SearchError
from scrl.types import ToolCall

ROOT = Path(__file__).resolve().parents[4]


class RecordingBackend:
    """Answers a query with one row that names it, once ``gate`` is open; queries named ``fail*`` and ``bug*`` don't."""

    name = "recording"

    def __init__(self, gated: bool = False, obeys_deadline: bool = True) -> None:
        self.asked: list[str] = []
        self.entered = threading.Semaphore(0)  # one release a search begun
        self.gate = threading.Event()
        self.obeys_deadline = obeys_deadline
        if not gated:
            self.gate.set()

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        self.asked.append(query)
        self.entered.release()
        if not self.gate.wait(max(deadline - time.monotonic(), 0) if self.obeys_deadline else 60):
            raise SearchError("timeout", "the backend took too long")
        if query.startswith("fail"):
            raise SearchError("rate_limited", f"too many requests for {query}")
        if query.startswith("bug"):
            raise KeyError(query)
        return [] if query.startswith("nothing") else [{"title": query, "url": "u", "text": f"about {query}"}]

    def close(self) -> None:
        self.asked.append("closed")


def web_search(*queries: str) -> ToolCall:
    return ToolCall("web_search", {"query": list(queries)})


def titles(items: list[list[dict[str, str]]]) -> list[list[str]]:
    return [[row["title"] for row in rows] for rows in items]


def handler_over(backend: RecordingBackend, **values) -> SearchHandler:
    return SearchHandler(HandlerConfig(**{"timeout_s": 30.0, "max_workers": 4, **values}), backend)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_results_in_order_per_query_and_call():
    with handler_over(RecordingBackend()) as handler:
        results = handler.handle([web_search("c", "a", "b"), web_search("d"), web_search("b", "b")])
    assert [titles(result.items) for result in results] == [[["c"], ["a"], ["b"]], [["d"]], [["b"], ["b"]]]
    assert all(result.ok and not result.error and not result.error_kind for result in results)
    assert results[0].items[1] == [{"title": "a", "url": "u", "text": "about a"}]


def test_a_hundred_threads_with_one_query_search_once():
    backend = RecordingBackend(gated=True)
    with handler_over(backend) as handler, ThreadPoolExecutor(100) as threads:
        waiting = [
            threads.submit(handler.handle, [web_search("Red  Harbour" if i % 2 else "red harbour ")])
            for i in range(100)
        ]
        wait_until(lambda: handler.metrics()["search/shared"] == 99)  # all have joined the one search
        backend.gate.set()
        results = [future.result(timeout=30)[0] for future in waiting]
        assert len(backend.asked) == 1
        assert {result.items[0][0]["title"].strip() for result in results} <= {"Red  Harbour", "red harbour"}
        assert handler.handle([web_search("RED HARBOUR")])[0].cached
        assert len(backend.asked) == 1
        results[0].items[0][0]["title"] = "changed"  # the caller's own copy
        assert handler.handle([web_search("red harbour")])[0].items[0][0]["title"] != "changed"


def test_one_calls_failure_is_that_calls_result():
    with handler_over(RecordingBackend()) as handler:
        good, limited, bug, partial = handler.handle(
            [web_search("a"), web_search("fail 1"), web_search("bug"), web_search("b", "fail 2")]
        )
        metrics = handler.metrics()
    assert good.ok and titles(good.items) == [["a"]]
    assert (limited.ok, limited.error_kind, limited.error) == (False, "rate_limited", "too many requests for fail 1")
    assert (bug.ok, bug.error_kind, bug.error) == (False, "internal", "recording: KeyError: 'bug'")
    assert partial.ok and titles(partial.items) == [["b"], []] and partial.error == "too many requests for fail 2"
    assert metrics["search/errors"] == 3
    assert metrics["search/errors/rate_limited"] == 2 and metrics["search/errors/internal"] == 1


@pytest.mark.parametrize("rows", [None, ["text"], [{"title": "t", "url": 5}]], ids=["none", "texts", "no url"])
def test_rows_that_are_none_cost_their_call_and_nobody_waits_for_ever(rows):
    backend = RecordingBackend()
    with handler_over(backend, timeout_s=60.0) as handler:
        backend.search = lambda *_: rows
        broken = handler.submit(web_search("a"), episode_id="e").result(timeout=30)
        assert (broken.ok, broken.error_kind) == (False, "internal") and broken.error
        del backend.search
        assert titles(handler.handle([web_search("b")])[0].items) == [["b"]]


def test_failures_are_not_cached_nor_empty_results_when_they_count_no_time():
    backend = RecordingBackend()
    with handler_over(backend, cache_empty_ttl_s=0) as handler:
        for query in ("fail", "nothing", "fail", "nothing", "a", "a"):
            handler.handle([web_search(query)])
        assert backend.asked == ["fail", "nothing", "fail", "nothing", "a"]
        assert handler.metrics()["search/empty"] == 2


def test_the_cache_forgets_what_was_used_longest_ago():
    backend = RecordingBackend()
    with handler_over(backend, cache_size=2) as handler:
        for query in ("a", "b", "a", "c", "a", "b"):  # c pushes out b, not a
            handler.handle([web_search(query)])
        assert backend.asked == ["a", "b", "c", "b"]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (ToolCall("browse_webpage", {"url_list": ["http://a"]}), "bad_request"),  # no search has found it
        (ToolCall("rm -rf", {}), "bad_request"),
        (ToolCall("web_search", {}), "bad_request"),
        (ToolCall("web_search", {"query": []}), "bad_request"),
        (ToolCall("web_search", {"query": ["a", " "]}), "bad_request"),
        (ToolCall("web_search", {"query": "a"}), "bad_request"),
        (ToolCall("web_search", {"query": [1]}), "bad_request"),
        (ToolCall("web_search", None), "bad_request"),
    ],
    ids=range(8),
)
def test_a_call_that_cannot_run_is_an_error_result(call, kind):
    backend = RecordingBackend()
    with handler_over(backend) as handler:
        bad, good = handler.handle([call, web_search("a")])
    assert (bad.ok, bad.error_kind, bool(bad.error)) == (False, kind, True)
    assert good.ok and backend.asked == ["a", "closed"]


def test_queries_beyond_the_limit_get_no_results_but_keep_their_place():
    backend = RecordingBackend()
    with handler_over(backend, max_queries=2) as handler:
        assert titles(handler.handle([web_search("a", "b", "c", "d")])[0].items) == [["a"], ["b"], [], []]
    assert sorted(backend.asked[:-1]) == ["a", "b"]


def test_deadline_holds_though_the_backend_ignores_it_and_the_queue_is_not_searched_late():
    backend = RecordingBackend(gated=True, obeys_deadline=False)
    with handler_over(backend, max_workers=1, timeout_s=0.3) as handler:
        started = time.monotonic()
        results = handler.handle([web_search(f"q{i}", f"r{i}") for i in range(50)])
        assert time.monotonic() - started < 10  # a stuck backend alone would hold it for 60
        assert {(result.ok, result.error_kind) for result in results} == {(False, "timeout")}
        assert results[0].error == "no answer within 0.3 s" and titles(results[0].items) == [[], []]
        assert handler.metrics()["search/errors/timeout"] == 50
        backend.gate.set()
        wait_until(lambda: handler.metrics()["search/expired_unsearched"] == 99)
        assert len(backend.asked) == 1  # of 100 queries, the 99 nobody waited for any more were dropped
        assert handler.handle([web_search("after")], timeout_s=30)[0].ok


def test_what_was_found_by_the_deadline_is_kept():
    backend = RecordingBackend(gated=True)
    with handler_over(backend) as handler:
        backend.gate.set()
        handler.handle([web_search("known")])
        backend.gate.clear()
        result = handler.handle([web_search("known", "slow")], timeout_s=0.1)[0]
    assert result.ok and titles(result.items) == [["known"], []]
    assert result.error_kind == "timeout" and not result.cached


def test_a_patient_call_that_joins_a_hasty_ones_search_gets_its_own_time():
    backend = RecordingBackend(gated=True)
    with handler_over(backend) as handler:
        hasty = handler.submit(web_search("a"), timeout_s=0.2)
        assert backend.entered.acquire(timeout=10)
        patient = handler.submit(web_search("a"), timeout_s=30)
        assert hasty.result(timeout=10).error_kind == "timeout"
        assert backend.entered.acquire(timeout=10)  # searched again, for the patient one
        backend.gate.set()
        assert titles(patient.result(timeout=10).items) == [["a"]]
    assert backend.asked == ["a", "a", "closed"]


@pytest.mark.parametrize(("patience_s", "searches"), [(300, 2), (31, 1)])
def test_a_search_limited_for_a_hasty_call_is_tried_again_for_one_with_much_more_time(patience_s, searches):
    backend = RecordingBackend(gated=True)
    with handler_over(backend) as handler:
        hasty = handler.submit(web_search("fail"), timeout_s=30)
        assert backend.entered.acquire(timeout=10)
        patient = handler.submit(web_search("fail"), timeout_s=patience_s)
        backend.gate.set()
        assert hasty.result(timeout=30).error_kind == patient.result(timeout=30).error_kind == "rate_limited"
    assert backend.asked == ["fail"] * searches + ["closed"]


def test_no_more_searches_at_once_than_workers():
    backend = RecordingBackend(gated=True)
    with handler_over(backend, max_workers=3) as handler:
        futures = [handler.submit(web_search(f"q{i}")) for i in range(20)]
        for _ in range(3):
            assert backend.entered.acquire(timeout=10)
        assert not backend.entered.acquire(timeout=0.05)
        backend.gate.set()
        assert [titles(future.result(timeout=10).items) for future in futures] == [[[f"q{i}"]] for i in range(20)]


def test_closing_answers_what_is_pending_and_refuses_what_follows():
    backend = RecordingBackend(gated=True)
    handler = handler_over(backend, max_workers=1)
    futures = [handler.submit(web_search(f"q{i}")) for i in range(3)]
    assert backend.entered.acquire(timeout=10)
    closer = threading.Thread(target=handler.close)
    closer.start()
    results = [future.result(timeout=10) for future in futures]
    backend.gate.set()
    closer.join(timeout=10)
    assert not closer.is_alive() and backend.asked == ["q0", "closed"]
    assert {(result.error_kind, result.error) for result in results} == {("internal", "the search handler was closed")}
    assert handler.handle([web_search("late")])[0].error == "the search handler is closed"


def test_a_future_cannot_be_cancelled_and_its_callback_may_search():
    backend = RecordingBackend(gated=True)
    with handler_over(backend) as handler:
        followed = threading.Event()
        future = handler.submit(web_search("a"))
        future.add_done_callback(lambda _: (handler.handle([web_search("a")]), followed.set()))
        assert not future.cancel()
        backend.gate.set()
        assert followed.wait(timeout=10)


def test_from_a_coroutine():
    async def search(handler: SearchHandler) -> list[list[list[str]]]:
        calls = [web_search(f"q{i}") for i in range(64)]
        results = await asyncio.gather(*[asyncio.wrap_future(handler.submit(call)) for call in calls])
        return [titles(result.items) for result in results]

    with handler_over(RecordingBackend()) as handler:
        assert asyncio.run(search(handler)) == [[[f"q{i}"]] for i in range(64)]


def test_metrics_count_what_happened():
    with handler_over(RecordingBackend()) as handler:
        handler.handle([web_search("a", "b")])
        handler.handle([web_search("a"), ToolCall("browse_webpage", {"url_list": ["u"]})])
        metrics = handler.metrics()
    counts = {
        name.removeprefix("search/"): value
        for name, value in metrics.items()
        if not name.endswith(("0", "9", "n", "x"))
    }
    assert counts == {
        "calls": 3,
        "queries": 3,
        "searches": 2,
        "cache_hits": 1,
        "shared": 0,
        "empty": 0,
        "expired_unsearched": 0,
        "errors": 1,
        "errors/bad_request": 1,
        "browse/pages": 1,
    }
    assert 0 < metrics["search/backend/recording_s/p50"] <= metrics["search/backend/recording_s/max"] < 10
    assert all(isinstance(value, float) for value in metrics.values())


def test_queries_are_the_same_up_to_case_space_and_compatibility_forms():
    assert normalise_query("  Red\n\tHARBOUR ") == normalise_query("ｒｅｄ harbour") == "red harbour"


def test_no_heavy_import():
    heavy = ("torch", "ray", "verl", "transformers", "vllm", "pyarrow")
    code = f"import sys, scrl.handler.handler; print([name for name in {heavy} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
