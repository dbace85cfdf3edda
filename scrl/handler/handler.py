"""The threaded search handler: tool calls in, results out, in order, each by its deadline, failures as values.

A query travels as a *flight*: the one search that everybody who asks the same at the same time waits for. A call is
*pending* until its flights have landed or its deadline has passed, whichever is first. What the cache has in memory
is answered at once; what it may have on disk is looked up on a thread of its own, so that neither the caller nor a
thread that could search waits for a disk, and a hit never queues behind slow searches.
"""

import heapq
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # started as a file: its own folder is on the path, the repository is not
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scrl.handler.cache import Outcome, SearchCache, normalise_query
from scrl.handler.config import HandlerConfig
from scrl.handler.contexts import EpisodeContexts
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.tools import TOOL_FUNCTIONS
from scrl.handler.web_search_agent.browser import Browser, PageSource
from scrl.handler.web_search_agent.fetch import PageError
from scrl.handler.web_search_agent.local_index import Row
from scrl.handler.web_search_agent.search_api import SearchBackend, SearchError, make_backend
from scrl.llm_agent.prompts import TOOLS, list_argument, well_formed
from scrl.types import ToolCall, ToolResult

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pending:
    """A call under way. ``outcomes[i]`` belongs to its i-th query; ``done`` once somebody has taken it to answer it."""

    started: float
    deadline: float
    outcomes: list[Outcome | None]
    not_run: int = 0  # queries beyond max_queries
    queries: list[str] = field(default_factory=list)  # of a search, those that are run
    episode_id: str = ""
    done: bool = False
    future: "Future[ToolResult]" = field(default_factory=Future)


@dataclass(eq=False)
class _Flight:
    key: str
    query: str
    deadline: float  # the latest of its waiters'
    waiters: list[tuple[_Pending, int]] = field(default_factory=list)


class SearchHandler:
    """Runs tool calls on at most ``config.max_workers`` threads.

    Building it opens the backend, so it raises ValueError for an engine or a corpus that can't be used; after that
    nothing raises. Results are the caller's own copies. ``close()`` it, or use it in a ``with`` statement.
    """

    def __init__(
        self, config: HandlerConfig, backend: SearchBackend | None = None, pages: PageSource | None = None
    ) -> None:
        """``backend``, ``pages``: where to search and read instead of where ``config`` says."""
        self._config = config
        self._metrics = HandlerMetrics()
        if backend is None and config.cache_mode != "replay":  # a replay needs no engine, nor its keys
            backend = make_backend(config, self._metrics)
        self._backend = backend
        self._cache = SearchCache(config, getattr(backend, "cache_scope", getattr(backend, "name", "")))
        self._contexts = EpisodeContexts()
        self._browser = Browser(config, self._contexts, self._metrics, pages)
        self._pool = ThreadPoolExecutor(config.max_workers, thread_name_prefix="search")
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="search-cache")
        self._others = ThreadPoolExecutor(config.max_workers, thread_name_prefix="tool")  # no search waits for a page
        # One lock for all that follows; futures are resolved outside it, since their callbacks may call submit.
        self._changed = threading.Condition()
        self._flights: dict[str, _Flight] = {}
        self._deadlines: list[tuple[float, int, _Pending]] = []  # a heap; the number only breaks ties
        self._numbers = itertools.count()
        self._closed = False
        threading.Thread(target=self._expire_calls, name="search-deadlines", daemon=True).start()

    def handle(self, calls: Sequence[ToolCall], timeout_s: float | None = None) -> list[ToolResult]:
        """Run ``calls`` at once; their results in order, within ``timeout_s`` (default: the configured one)."""
        return [future.result() for future in [self.submit(call, timeout_s) for call in calls]]

    def submit(
        self,
        call: ToolCall,
        timeout_s: float | None = None,
        *,
        episode_id: str = "",
        question: str = "",
        allowed_urls: Mapping[str, str] | None = None,
    ) -> "Future[ToolResult]":
        """Start ``call``; a future that never raises and is resolved by the call's deadline. It can't be cancelled.

        ``items`` has one list for each query (or URL) of the call, in order. A call is ``ok`` when at least one of its
        queries was answered; what went wrong with another is still told in ``error``.

        What an episode's searches find is kept under ``episode_id`` until ``release``, since it may browse that alone;
        ``allowed_urls`` (URL -> the query that found it) says so instead where the client keeps it. Pages are read for
        ``question``.
        """
        started = time.monotonic()
        self._metrics.count("calls")
        queries, problem = _read_call(call)
        searches = call.name == "web_search"
        run = queries[: self._config.max_queries]
        deadline = started + (self._config.timeout_s if timeout_s is None else timeout_s)
        pending = _Pending(
            started, deadline, [None] * len(run), len(queries) - len(run), run if searches else [], episode_id
        )
        future = pending.future
        future.set_running_or_notify_cancel()
        self._metrics.count("queries", len(pending.queries))
        with self._changed:
            if self._closed:
                problem = Outcome(error_kind="internal", error="the search handler is closed")
            if problem:
                pending.outcomes = [problem] * max(len(run), 1)
            elif searches:
                for position, query in enumerate(run):
                    self._ask(pending, position, query)
            else:
                work = self._work_of(call.name, pending.deadline, episode_id, question, allowed_urls)
                for position, item in enumerate(run):
                    self._others.submit(self._run, pending, position, call.name, item, work)
            finished = self._take_if_complete(pending)
            if not finished:
                while self._deadlines and self._deadlines[0][2].done:  # the heap would keep them until their deadlines
                    heapq.heappop(self._deadlines)
                heapq.heappush(self._deadlines, (deadline, next(self._numbers), pending))
                if self._deadlines[0][2] is pending:  # the thread sleeps until a later one
                    self._changed.notify()
        if finished:
            self._answer(pending)
        return future

    def release(self, episode_id: str) -> None:
        """The episode has ended, however it did: what it found and read is forgotten."""
        self._contexts.release(episode_id)

    def metrics(self) -> dict[str, float]:
        """Counts and latencies since the start, as ``search/...``; see HandlerMetrics and SearchCache."""
        return self._metrics.as_dict() | self._cache.metrics()

    def close(self) -> None:
        """Answer what is pending with an error, and let the threads go."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            cut = [pending for _, _, pending in self._deadlines if not pending.done]
            closing = Outcome(error_kind="internal", error="the search handler was closed")
            for pending in cut:
                self._give_up(pending, closing)
            self._deadlines.clear()
            self._changed.notify()
        for pending in cut:
            self._answer(pending)
        self._lookups.shutdown(wait=True, cancel_futures=True)  # first: it hands its misses to the other
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._backend is not None:
            self._backend.close()  # ends the searches under way, which the pool would wait for
        self._pool.shutdown(wait=True)
        self._browser.close()
        self._others.shutdown(wait=True, cancel_futures=True)
        self._cache.close()

    def __enter__(self) -> "SearchHandler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The methods from here to _take_expired are called with the lock held.

    def _ask(self, pending: _Pending, position: int, query: str) -> None:
        """Answer one query from the cache, or join the flight that searches for it, or start that flight."""
        key = normalise_query(query)
        if known := self._cache.recall(key):
            self._count_hit(known)
            pending.outcomes[position] = known
            return
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(key, query, pending.deadline)
            if self._cache.has_file:
                self._lookups.submit(self._look_up, flight)
            else:
                self._pool.submit(self._fly, flight)
        else:
            self._metrics.count("shared")
            flight.deadline = max(flight.deadline, pending.deadline)
        flight.waiters.append((pending, position))

    def _land(self, flight: _Flight, outcome: Outcome) -> list[_Pending]:
        """Hand ``outcome`` to all who wait; the calls that this completes."""
        del self._flights[flight.key]
        for pending, position in flight.waiters:
            if not pending.done:
                pending.outcomes[position] = outcome
        return [pending for pending, _ in flight.waiters if self._take_if_complete(pending)]

    def _take_if_complete(self, pending: _Pending) -> bool:
        if pending.done or None in pending.outcomes:
            return False
        pending.done = True
        return True

    def _give_up(self, pending: _Pending, outcome: Outcome) -> None:
        pending.outcomes = [outcome if known is None else known for known in pending.outcomes]
        pending.done = True

    def _take_expired(self) -> list[_Pending]:
        """The calls whose deadline has passed, given up. Those answered long ago leave the heap in passing."""
        expired, now = [], time.monotonic()
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now):
            _, _, pending = heapq.heappop(self._deadlines)
            if not pending.done:
                waited = pending.deadline - pending.started
                self._give_up(pending, Outcome(error_kind="timeout", error=f"no answer within {waited:g} s"))
                expired.append(pending)
        return expired

    # The threads.

    def _look_up(self, flight: _Flight) -> None:
        """Land ``flight`` with what the cache has on disk, or send it off to search."""
        known = self._cache.look_up(flight.key)
        if known is None:
            self._pool.submit(self._fly, flight)
            return
        self._count_hit(known)
        with self._changed:
            completed = self._land(flight, known)
        for pending in completed:
            self._answer(pending)

    def _count_hit(self, outcome: Outcome) -> None:
        if outcome.cached:
            self._metrics.count("cache_fuzzy_hits" if outcome.fuzzy else "cache_hits")

    def _fly(self, flight: _Flight) -> None:
        while True:
            with self._changed:
                deadline = flight.deadline
            outcome = self._cache.settle(flight.key, self._search(flight.query, deadline))
            with self._changed:
                # Somebody with more time joined a search that was started for those with less: it gets that time.
                extended = flight.deadline > deadline and not self._closed
                if not (extended and _may_need_time(outcome, deadline, flight.deadline)):
                    completed = self._land(flight, outcome)
                    break
        for pending in completed:
            self._answer(pending)
        self._cache.save(flight.key, outcome)

    def _search(self, query: str, deadline: float) -> Outcome:
        started = time.monotonic()
        if started >= deadline:  # it stood in the queue until nobody waited any more
            self._metrics.count("expired_unsearched")
            return Outcome(error_kind="timeout", error="the deadline passed before a thread was free")
        self._metrics.count("searches")
        try:
            rows = [dict(row) for row in self._backend.search(query, self._config.topk, deadline)]
        except SearchError as error:
            return Outcome(error_kind=error.kind, error=str(error))
        except Exception as error:  # a bug in a backend costs the calls that met it, not the run
            logger.exception("backend %s failed on %.200r", self._backend.name, query)
            return Outcome(error_kind="internal", error=f"{self._backend.name}: {type(error).__name__}: {error}")
        finally:
            self._metrics.observe(f"backend/{self._backend.name}", time.monotonic() - started)
        return Outcome(rows)

    def _work_of(
        self, tool: str, deadline: float, episode_id: str, question: str, allowed_urls: Mapping[str, str] | None
    ) -> Callable[[str], list[Row]]:
        """What ``tool`` does with one item of its call."""
        if tool == "browse_webpage":
            visit = self._browser.visit(episode_id, question, allowed_urls)
            return lambda url: [self._browser.read(url, visit, deadline)]
        return lambda item: TOOL_FUNCTIONS[tool](item, deadline)

    def _run(self, pending: _Pending, position: int, tool: str, item: str, work: Callable[[str], list[Row]]) -> None:
        if pending.done:  # it stood in the queue until nobody waited any more
            self._metrics.count("expired_unsearched")
            return
        try:
            outcome = Outcome([dict(row) for row in work(item)])
        except (PageError, SearchError) as error:
            outcome = Outcome(error_kind=error.kind, error=str(error))
        except Exception as error:  # a bug costs the call that met it, not the run
            logger.exception("%s failed on %.200r", tool, item)
            outcome = Outcome(error_kind="internal", error=f"{tool}: {type(error).__name__}: {error}")
        with self._changed:
            if not pending.done:
                pending.outcomes[position] = outcome
            finished = self._take_if_complete(pending)
        if finished:
            self._answer(pending)

    def _expire_calls(self) -> None:
        while True:
            with self._changed:
                expired = self._take_expired()
                if self._closed:
                    break
                if not expired:
                    wait = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
                    self._changed.wait(wait)
            for pending in expired:
                self._answer(pending)

    def _answer(self, pending: _Pending) -> None:
        """Resolve the call's future. Only whoever set ``done`` gets here, so it happens once."""
        try:
            result = self._result_of(pending)
        except Exception as error:  # rows that are none: nobody else would ever resolve it
            logger.exception("the results of %.200r can't be used", pending.queries)
            result = ToolResult(ok=False, error=f"{type(error).__name__}: {error}", error_kind="internal")
        self._metrics.record(result, time.monotonic() - pending.started, run=len(pending.outcomes))
        future = pending.future
        # The heap may hold the call until its deadline, long after its answer: it shall not hold the results as well.
        pending.outcomes, pending.future = [], Future()
        future.set_result(result)

    def _result_of(self, pending: _Pending) -> ToolResult:
        outcomes = [outcome for outcome in pending.outcomes if outcome is not None]
        assert len(outcomes) == len(pending.outcomes)
        for query, outcome in zip(pending.queries, outcomes, strict=False):
            self._contexts.record(pending.episode_id, [row["url"] for row in outcome.rows if row.get("url")], query)
            self._browser.remember(outcome.rows)
        failed = [outcome for outcome in outcomes if outcome.error_kind]
        return ToolResult(
            items=[[dict(row) for row in outcome.rows] for outcome in outcomes] + [[] for _ in range(pending.not_run)],
            ok=len(failed) < len(outcomes),
            error=failed[0].error if failed else "",
            error_kind=failed[0].error_kind if failed else "",
            latency_s=time.monotonic() - pending.started,
            cached=all(outcome.cached for outcome in outcomes),
        )


def _may_need_time(outcome: Outcome, had: float, has: float) -> bool:
    """Whether a search with the deadline ``had`` may have failed for want of time that one until ``has`` would have.

    A limited or broken search is tried again within its deadline: one with twice as long left may fare better. Less
    is no reason, or joining at all would ask a struggling engine twice.
    """
    now = time.monotonic()
    hurried = outcome.error_kind in ("rate_limited", "connection") and has - now > 2 * (had - now)
    return outcome.error_kind == "timeout" or hurried


def _read_call(call: ToolCall) -> tuple[list[str], Outcome | None]:
    """(queries or URLs, problem). The policy wrote the call, so nothing about its arguments is taken for granted."""
    if not isinstance(call.name, str) or call.name not in TOOLS:
        message = f"{str(call.name)[:80]!r} is not a tool; use {' or '.join(TOOLS)}"
        return [], Outcome(error_kind="bad_request", error=message)
    queries = well_formed(call.name, call.arguments)
    if queries is None:
        message = f"{call.name} needs {list_argument(call.name)}, a list of non-empty strings"
        return [], Outcome(error_kind="bad_request", error=message)
    return queries, None


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the proxy; see proxy.py. The family starts it by this file's name."""
    from scrl.handler import proxy  # here, so that the handler itself needs no web framework

    return proxy.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
