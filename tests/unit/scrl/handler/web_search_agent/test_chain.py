"""A chain of backends: who is asked, in which order, with how much time."""

import json

import pytest

from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.web_search_agent.backend import SearchError
from scrl.handler.web_search_agent.chain import ChainBackend
from scrl.handler.web_search_agent.search_api import make_backend
from scrl.types import ToolCall


class Scripted:
    """A backend that does what ``answer`` says: rows, an error, or seconds to stall before an error."""

    def __init__(self, name: str, clock, answer) -> None:
        self.name = self.cache_scope = name
        self.clock, self.answer, self.given, self.open = clock, answer, [], True

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        self.given.append(deadline - self.clock())
        if self.answer == "stall":
            self.clock.sleep(deadline - self.clock())
            raise SearchError("timeout", f"{self.name} gave no answer")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.open = False


def row(title: str) -> list[dict[str, str]]:
    return [{"title": title, "url": "u", "text": ""}]


def chain(clock, *answers, metrics=None):
    members = [Scripted(f"b{i}", clock, answer) for i, answer in enumerate(answers)]
    return ChainBackend(members, metrics, clock), members


def test_the_first_that_finds_something_answers_and_no_other_is_asked(clock):
    backend, members = chain(clock, row("a"), row("b"))
    assert backend.search("q", 3, clock() + 30) == row("a")
    assert members[1].given == []
    assert (backend.name, backend.cache_scope) == ("b0+b1", "b0+b1")


@pytest.mark.parametrize("first", [[], SearchError("no_backend", "b0 is open"), "stall"])
def test_the_next_is_asked_where_one_is_empty_failing_or_stalls(clock, first):
    metrics = HandlerMetrics()
    backend, _ = chain(clock, first, row("b"), metrics=metrics)
    assert backend.search("q", 3, clock() + 30) == row("b")
    flat = metrics.as_dict()
    assert flat["search/chain/moved_on"] == 1
    assert flat["search/backend/b0_s/max"] == (15.0 if first == "stall" else 0.0)
    assert "search/backend/b1_s/p50" in flat


def test_time_is_shared_among_those_still_to_be_asked(clock):
    backend, members = chain(clock, "stall", SearchError("connection", "no"), "stall", row("d"))
    assert backend.search("q", 3, clock() + 40) == row("d")
    assert [member.given for member in members] == [[10.0], [10.0], [15.0], [15.0]]  # what b1 left unused is shared


def test_all_failing_is_one_error_that_tells_each(clock):
    backend, _ = chain(clock, SearchError("rate_limited", "b0 is busy"), SearchError("connection", "b1 is gone"))
    with pytest.raises(SearchError, match="b0 is busy; b1 is gone") as caught:
        backend.search("q", 3, clock() + 30)
    assert caught.value.kind == "connection"


def test_nothing_found_by_one_and_failure_of_another_is_nothing_found(clock):
    assert chain(clock, SearchError("connection", "no"), [])[0].search("q", 3, clock() + 30) == []
    assert chain(clock, [], SearchError("connection", "no"))[0].search("q", 3, clock() + 30) == []


def test_a_bug_is_not_taken_for_a_failure(clock):
    with pytest.raises(KeyError):
        chain(clock, KeyError("bug"), row("b"))[0].search("q", 3, clock() + 30)


def test_closing_closes_all(clock):
    backend, members = chain(clock, [], [], [])
    backend.close()
    assert not any(member.open for member in members)


def test_a_chain_whose_second_engine_can_not_be_made_closes_the_first(tmp_path, monkeypatch):
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    with pytest.raises(ValueError, match="search.index_corpus is empty"):
        make_backend(HandlerConfig(search_engine=("searxng", "local")))
    import threading

    assert not [thread for thread in threading.enumerate() if thread.name == "http-searxng"]


def test_the_handler_over_a_chain_moves_on_in_an_outage_and_shows_each_in_its_metrics(
    server, tmp_path, monkeypatch, reply
):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Tarnow", "url": "w", "text": "A town."}))
    monkeypatch.setenv("SEARXNG_URL", server.url)
    server.script = [reply(401, b"who are you")]
    config = HandlerConfig(search_engine=("searxng", "local"), index_corpus=str(corpus), max_workers=1, max_queries=20)
    with SearchHandler(config) as handler:
        queries = [f"tarnow {i}" for i in range(20)]
        result = handler.handle([ToolCall("web_search", {"query": queries})])[0]
        metrics = handler.metrics()
    assert result.ok and [rows[0]["title"] for rows in result.items] == ["Tarnow"] * 20
    assert len(server.received) == 5  # then its breaker opened
    assert metrics["search/backend/searxng/requests"] == 5 and metrics["search/backend/searxng/breaker_opened"] == 1
    assert metrics["search/backend/searxng/errors/no_backend"] == 20 and metrics["search/chain/moved_on"] == 20
    assert {"search/backend/searxng_s/p99", "search/backend/local_s/p99"} <= metrics.keys()


def test_closing_the_handler_does_not_wait_for_a_search_that_hangs(server, monkeypatch):
    monkeypatch.setenv("SEARXNG_URL", server.url)
    server.script = [server.stall]
    handler = SearchHandler(HandlerConfig(search_engine="searxng", timeout_s=300.0))
    future = handler.submit(ToolCall("web_search", {"query": ["who"]}))
    assert server.entered.acquire(timeout=20)
    handler.close()  # the test's own time limit is the 300 s above
    assert future.result(timeout=0).error == "the search handler was closed"
