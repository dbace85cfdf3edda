"""The search cache: what it keeps, how long, for whom, and what becomes of a search when its file fails."""

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from scrl.handler import cache as cache_module
from scrl.handler.cache import Outcome, SearchCache
from scrl.handler.cache_file import CacheFile
from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.web_search_agent.search_api import SearchError
from scrl.types import ToolCall, ToolResult

DAY = 86_400.0


class Engine:
    """Answers "what" with a row that says how often it was asked; ``nothing*`` is empty and ``fail*`` fails."""

    name = "engine"

    def __init__(self, scope: str = "engine/us/en", found: int = 3) -> None:
        self.cache_scope, self.found = scope, found
        self.asked: Counter[str] = Counter()

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        self.asked[query] += 1
        if query.startswith("fail"):
            raise SearchError("rate_limited", f"not {query} again")
        if query.startswith("nothing"):
            return []
        rows = min(topk, self.found)
        return [{"title": f"{query} {self.asked[query]}.{i}", "url": "u\x00", "text": "héß 漢字"} for i in range(rows)]

    def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 1.7e9

    def __call__(self) -> float:
        return self.now


@contextmanager
def handler_over(engine: Engine | None, path: Path | str, **values) -> Iterator[SearchHandler]:
    config = HandlerConfig(**{"cache_path": str(path), "timeout_s": 30.0, "max_workers": 4, **values})
    with SearchHandler(config, engine) as handler:
        yield handler


def ask(handler: SearchHandler, *queries: str) -> list[ToolResult]:
    return handler.handle([ToolCall("web_search", {"query": [query]}) for query in queries])


def titles(results: list[ToolResult]) -> list[list[str]]:
    return [[row["title"] for row in result.items[0]] for result in results]


def settle(cache: SearchCache, key: str, *found: str) -> None:
    outcome = Outcome([{"title": title, "url": "", "text": ""} for title in found])
    cache.save(key, cache.settle(key, outcome))
    written(cache)


def written(cache: SearchCache) -> None:
    """Returns when all that was to be written is: one thread writes, in order."""
    cache._writer.submit(lambda: None).result(timeout=60)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cache_mode": "replay"}, "search.cache_mode=replay needs a file; set search.cache_path"),
        ({"cache_mode": "again", "cache_path": "c"}, "search.cache_mode='again' is unknown"),
        ({"cache_ttl_s": 0.0}, "search.cache_ttl_s=0.0 is no time"),
        ({"cache_empty_ttl_s": float("nan")}, "search.cache_empty_ttl_s=nan is no time"),
        ({"cache_fuzzy_threshold": 0.1}, "search.cache_fuzzy_threshold=0.1 is out of range"),
        ({"cache_fuzzy_threshold": 0.8, "cache_mode": "record", "cache_path": "c"}, "set it to 0 with .*record"),
    ],
)
def test_settings_that_cannot_be_are_refused(values, says):
    with pytest.raises(ValueError, match=says):
        HandlerConfig(**values)


# What is kept, for whom, how long.


def test_results_outlive_the_process_and_come_back_as_they_were(tmp_path):
    first, second = Engine(), Engine()
    with handler_over(first, tmp_path / "new" / "c.sqlite") as handler:
        (found,) = ask(handler, "Red  Harbour")
    with handler_over(second, tmp_path / "new" / "c.sqlite") as handler:
        (kept,) = ask(handler, "red harbour")
        again = ask(handler, "ｒｅｄ HARBOUR")[0]
        assert handler.metrics()["search/cache_hits"] == 2 and handler.metrics()["search/searches"] == 0
    assert kept.items == again.items == found.items and kept.cached and not found.cached
    assert first.asked == {"Red  Harbour": 1} and not second.asked


def test_engines_regions_and_languages_do_not_share(tmp_path):
    for scope, searched in (("google/us/en", 1), ("google/cn/zh", 1), ("google/us/en", 0)):
        engine = Engine(scope)
        with handler_over(engine, tmp_path / "c.sqlite") as handler:
            ask(handler, "a")
        assert engine.asked["a"] == searched


def test_fewer_results_than_asked_for_are_searched_again_unless_there_were_no_more(tmp_path):
    for topk, found, searched in ((2, 9, 1), (1, 9, 0), (3, 9, 1), (9, 5, 1), (10, 5, 0)):
        engine = Engine(found=found)
        with handler_over(engine, tmp_path / "c.sqlite", topk=topk) as handler:
            result = ask(handler, "a")[0]
        assert (len(result.items[0]), engine.asked["a"]) == (min(topk, found), searched)


@pytest.mark.parametrize("memory", [0, 100])
def test_results_count_for_seven_days_and_empty_ones_for_minutes(tmp_path, memory):
    clock = Clock()
    cache = SearchCache(HandlerConfig(cache_path=str(tmp_path / "c.sqlite"), cache_size=memory), "s", clock)

    def known(key: str) -> bool:
        return (cache.recall(key) or cache.look_up(key)) is not None

    settle(cache, "a", "found")
    settle(cache, "empty")
    assert (known("a"), known("empty")) == (True, True)
    clock.now += 299
    assert (known("a"), known("empty")) == (True, True)
    clock.now += 2
    assert (known("a"), known("empty")) == (True, False)
    clock.now += 7 * DAY - 302
    assert known("a")
    clock.now += 1
    assert not known("a")
    clock.now -= 30 * DAY  # a clock set back must not keep entries for longer
    assert not known("a")
    cache.close()


def test_failures_are_never_kept(tmp_path):
    engine = Engine()
    for _ in range(2):
        with handler_over(engine, tmp_path / "c.sqlite") as handler:
            assert [result.error_kind for result in ask(handler, "fail 1")] == ["rate_limited"]
    assert engine.asked == {"fail 1": 2}


def test_old_entries_go_and_the_words_that_led_to_them(tmp_path):
    clock = Clock()
    cache = SearchCache(HandlerConfig(cache_path=str(tmp_path / "c.sqlite")), "s", clock)
    for i in range(20):
        settle(cache, f"old query {i}", "x")
    clock.now += 8 * DAY
    for i in range(10):
        settle(cache, f"new {i}", "x")
    cache.close()
    with sqlite3.connect(tmp_path / "c.sqlite") as database:
        assert {key for (key,) in database.execute("SELECT key FROM entry")} == {f"new {i}" for i in range(10)}
        assert {token for (token,) in database.execute("SELECT token FROM token")} == {"new", *map(str, range(10))}
    database.close()


def test_any_text_can_be_a_query_or_a_result(tmp_path):
    hostile = ["a\x00b", "\ud800", "'; DROP TABLE entry; --", "🦀" * 3000, "<|im_start|>", "w " * 5000, "[", "\\ud800"]
    engine = Engine()
    with handler_over(engine, tmp_path / "c.sqlite") as handler:
        before = titles(ask(handler, *hostile))
    with handler_over(Engine(), tmp_path / "c.sqlite", cache_fuzzy_threshold=0.9) as handler:
        assert titles(ask(handler, *hostile[:-1])) == before[:-1]
        assert handler.metrics()["search/cache_hits"] == len(hostile) - 1
        assert handler.metrics()["search/cache_errors"] == 0


def test_a_hit_in_memory_does_not_touch_the_file(tmp_path):
    cache = SearchCache(HandlerConfig(cache_path=str(tmp_path / "c.sqlite")), "s")
    settle(cache, "a", "x")
    cache._file.close()
    started = time.perf_counter()
    for _ in range(1000):
        assert cache.recall("a").cached
    assert (time.perf_counter() - started) / 1000 < 1e-3  # microseconds; a disk's lock would be waited for


# Similar queries.


def test_similar_queries_are_off_by_default_and_counted_apart(tmp_path):
    with handler_over(Engine(), tmp_path / "c.sqlite") as handler:
        ask(handler, "who wrote the red harbour", "nothing like the red harbour")
    for threshold, hit in ((0.0, False), (0.84, False), (0.83, True)):  # "... in 1984" shares 5 of 6
        engine = Engine()
        path = tmp_path / f"{threshold}.sqlite"
        path.write_bytes((tmp_path / "c.sqlite").read_bytes())
        with handler_over(engine, path, cache_fuzzy_threshold=threshold) as handler:
            results = ask(handler, "Red Harbour, who wrote the?") if hit else []
            results += [
                *ask(handler, "who wrote the red harbour 1984"),
                *ask(handler, "who wrote the red harbour 1984"),
            ]
            metrics = handler.metrics()
        assert metrics.get("search/cache_fuzzy_hits", 0) == (3 if hit else 0)
        assert metrics["search/cache_hits"] == (0 if hit else 1)
        assert titles(results)[-1][0] == (
            "who wrote the red harbour 1.0" if hit else "who wrote the red harbour 1984 1.0"
        )


def test_a_similar_query_that_found_nothing_answers_no_other(tmp_path):
    with handler_over(Engine(), tmp_path / "c.sqlite") as handler:
        ask(handler, "nothing about the red harbour")
    engine = Engine()
    with handler_over(engine, tmp_path / "c.sqlite", cache_fuzzy_threshold=0.5) as handler:
        (result,) = ask(handler, "all about the red harbour")
    assert result.items[0] and engine.asked == {"all about the red harbour": 1}


# Record and replay.


def test_a_recorded_run_is_repeated_exactly_without_an_engine(tmp_path):
    queries = ["a", "b", "nothing here", "fail 1", "A ", "b", "nothing here", "fail 1"]
    engine = Engine()
    with handler_over(
        engine, tmp_path / "r.sqlite", cache_mode="record", cache_ttl_s=1.0, cache_empty_ttl_s=0.0
    ) as one:
        recorded = [ask(one, query)[0] for query in queries]
    assert engine.asked == {"a": 1, "b": 1, "nothing here": 1, "fail 1": 2}  # failures are written down, not served
    for memory in (0, 100):
        with handler_over(
            None, tmp_path / "r.sqlite", cache_mode="replay", search_engine="google", cache_size=memory
        ) as two:
            replayed = [ask(two, query)[0] for query in queries]
            (missing,) = ask(two, "never asked")
            metrics = two.metrics()
        assert [(r.items, r.ok, r.error_kind, r.error) for r in replayed] == [
            (r.items, r.ok, r.error_kind, r.error) for r in recorded
        ]
        assert (missing.ok, missing.error_kind) == (False, "not_recorded")
        assert missing.error.startswith("the recording has no results for 'never asked'")
        assert metrics["search/replay_misses"] == 1 and metrics["search/searches"] == 0


def test_two_recorders_answer_alike(tmp_path):
    """Each engine would answer differently; what is recorded first is what both give from then on."""
    config = {"cache_mode": "record", "topk": 1}
    one, two = Engine(), Engine()
    two.asked["a"] = 7
    with (
        handler_over(one, tmp_path / "r.sqlite", **config) as first,
        handler_over(two, tmp_path / "r.sqlite", **config) as second,
    ):
        assert second._cache.look_up("a") is None  # both are searching
        ask(first, "a")
        outcome = second._cache.settle("a", Outcome([{"title": "a 8.0", "url": "", "text": ""}]))
        assert [row["title"] for row in outcome.rows] == ["a 1.0"]
        assert titles(ask(second, "a")) == [["a 1.0"]]


# When the file fails.


def test_a_locked_file_costs_searches_nothing_but_its_lock_once(tmp_path, monkeypatch):
    monkeypatch.setattr("scrl.handler.cache_file.BUSY_S", 0.2)
    clock, engine = Clock(), Engine()
    with handler_over(engine, tmp_path / "c.sqlite", cache_size=0) as handler:
        handler._cache._clock = clock
        handler._cache._file._writer.execute("PRAGMA busy_timeout=200")
        with sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            assert titles(ask(handler, "a")) == [["a 1.0", "a 1.1", "a 1.2"]]
            wait_until(lambda: handler.metrics()["search/cache_errors"] == 1)
            assert all(result.ok for result in ask(handler, *"abcdef"))  # the file is left alone now
            other.execute("ROLLBACK")
        other.close()
        assert handler.metrics()["search/cache_errors"] == 1 and engine.asked["a"] == 2
        clock.now += cache_module.OFF_S
        ask(handler, "z")
        wait_until(lambda: handler._cache._file.get("z") is not None)
        ask(handler, "z")
        assert engine.asked["z"] == 1 and handler.metrics()["search/cache_errors"] == 1


def test_a_recording_that_cannot_be_written_waits_in_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache_module, "BUSY_S", 1.0)
    for recovers in (True, False):
        path = tmp_path / f"{recovers}.sqlite"
        cache = SearchCache(HandlerConfig(cache_path=str(path), cache_mode="record", cache_size=0), "s")
        cache._file._writer.execute("PRAGMA busy_timeout=50")
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            for key in "abc":
                outcome = cache.settle(key, Outcome([{"title": key, "url": "", "text": ""}]))
                assert [row["title"] for row in outcome.rows] == [key]
            cache.settle("a", Outcome([{"title": "a, found later", "url": "", "text": ""}]))
            cache.settle("d", Outcome(error_kind="timeout", error="too late"))
            assert cache.metrics()["search/cache_errors"] == 1
            if not recovers:
                cache.close()
            other.execute("ROLLBACK")
        other.close()
        if recovers:
            cache.close()
        file = CacheFile(path, "s", "recording")
        assert [file.get(key) and file.get(key).rows[0]["title"] for key in "abc"] == (
            ["a", "b", "c"] if recovers else [None] * 3
        )
        assert (file.get_failure("d") is not None) == recovers
        file.close()
    assert caplog.text.count("recording in memory for 30 s") == 3  # once each, and once more at the end
    assert caplog.text.count("THE RECORDING IS INCOMPLETE: it lacks 5 results") == 1


def test_a_file_damaged_while_running_is_counted_and_searches_go_on(tmp_path, caplog):
    engine = Engine()
    with handler_over(engine, tmp_path / "c.sqlite", cache_size=0) as handler:
        ask(handler, "a")
        file = handler._cache._file
        wait_until(lambda: file.get("a") is not None)  # saved after the answer
        with file._writing:
            file._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = (tmp_path / "c.sqlite").stat().st_size
        (tmp_path / "c.sqlite").write_bytes(b"\xff" * size)
        results = ask(handler, *"abc")
        assert all(result.ok for result in results)
        assert handler.metrics()["search/cache_errors"] >= 1
    assert "searching without it for 30 s" in caplog.text


# Many at once.


def test_a_hundred_threads_with_one_query_search_once(tmp_path):
    engine = Engine()
    with handler_over(engine, tmp_path / "c.sqlite") as handler, ThreadPoolExecutor(100) as threads:
        start = threading.Barrier(100)
        results = list(threads.map(lambda _: (start.wait(30), ask(handler, "a")[0])[1], range(100)))
    assert engine.asked == {"a": 1} and len({json.dumps(result.items) for result in results}) == 1


def test_a_hit_on_disk_does_not_wait_behind_slow_searches(tmp_path):
    class Slow(Engine):
        gate = threading.Event()

        def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
            self.gate.wait(30)
            return super().search(query, topk, deadline)

    with handler_over(Engine(), tmp_path / "c.sqlite") as handler:
        ask(handler, "known")
    slow = Slow()
    with handler_over(slow, tmp_path / "c.sqlite", max_workers=1) as handler:
        waiting = handler.submit(ToolCall("web_search", {"query": ["new"]}))
        assert ask(handler, "known")[0].cached and not waiting.done()
        slow.gate.set()
        assert waiting.result(timeout=30).ok


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
