"""The search handler of ``search.mode=http``: a SearchHandler's interface over a search server or a proxy."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from scrl.handler.config import HandlerConfig
from scrl.handler.contexts import EpisodeContexts
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.wire import (
    EXECUTION_PATH,
    MAX_ITEMS,
    RELEASE_PATH,
    RELEASE_TIMEOUT_S,
    Item,
    checked_url,
    encode_json,
    hop_budget,
    http_client,
    problem_of,
    read_reply,
    read_result,
)
from scrl.types import ToolCall, ToolResult

logger = logging.getLogger(__name__)

# What says that no answer is coming, and nothing about the call: those that make it worth asking again.
_CONNECTION_ERRORS = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)


class HttpSearchHandler:
    """Sends tool calls to ``server_url``, at most ``config.max_workers`` at once, each with its deadline.

    Building it doesn't connect. Raises ValueError for a URL that is none; after that nothing raises. A broken
    connection is tried again until the call's deadline: a search done twice does no harm. ``close()`` it, or use it in
    a ``with`` statement.
    """

    def __init__(self, server_url: str, config: HandlerConfig) -> None:
        self._url = checked_url("search.server_url", server_url)
        self._config = config
        self._slots = asyncio.Semaphore(config.max_workers)
        self._client = http_client()
        self._metrics = HandlerMetrics()
        self._contexts = EpisodeContexts()
        self._ended: deque[str] = deque(maxlen=MAX_ITEMS)  # episodes whose end the server hasn't been told of
        self._releasing = False
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run_loop, name="search-client", daemon=True)
        self._thread.start()

    def handle(self, calls: Sequence[ToolCall], timeout_s: float | None = None) -> list[ToolResult]:
        """Run ``calls`` at once; their results in order, within ``timeout_s`` (default: the configured one)."""
        return [future.result() for future in [self.submit(call, timeout_s) for call in calls]]

    def submit(
        self, call: ToolCall, timeout_s: float | None = None, *, episode_id: str = "", question: str = ""
    ) -> "Future[ToolResult]":
        """Start ``call``; a future that never raises and is resolved by the call's deadline. See SearchHandler."""
        started = time.monotonic()
        deadline = started + (self._config.timeout_s if timeout_s is None else timeout_s)
        future: Future[ToolResult] = Future()
        future.set_running_or_notify_cancel()
        self._metrics.count("calls")
        self._metrics.count("queries", _count_asked(call))
        item: Item = {
            "idx": 0,
            "question": question,
            "think": "",
            "tool_call": {"name": call.name, "arguments": call.arguments},
            "total_number": 1,
            "episode_id": episode_id,
        }
        if call.name == "browse_webpage":
            item["allowed_urls"] = self._contexts.allowed(episode_id)
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(self._begin, future, call, item, episode_id, started, deadline)
                return future
        self._answer(future, _error("internal", "The search handler is closed."), started)
        return future

    def release(self, episode_id: str) -> None:
        """The episode has ended: forget what it found, here and, as soon as it hears of it, on the server."""
        self._contexts.release(episode_id)
        with self._lock:
            if episode_id and not self._closed:
                self._loop.call_soon_threadsafe(self._begin_release, episode_id)

    def metrics(self) -> dict[str, float]:
        """Counts and latencies since the start, as ``search/...``; see HandlerMetrics."""
        return self._metrics.as_dict()

    def close(self) -> None:
        """Answer what is pending with an error, and let the connections go."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> "HttpSearchHandler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The event loop's thread.

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._wind_up())
        self._loop.close()

    async def _wind_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def _begin(
        self, future: "Future[ToolResult]", call: ToolCall, item: Item, episode_id: str, started: float, deadline: float
    ) -> None:
        async def run() -> None:
            try:
                result = await self._ask(item, _count_asked(call), started, deadline)
            except asyncio.CancelledError:
                result = _error("internal", "The search handler was closed.")
            except Exception as error:  # a bug costs the calls that meet it, not the run
                logger.exception("the call %.200r failed", call)
                result = _error("internal", f"{type(error).__name__}: {error}")
            if result.ok and call.name == "web_search":
                for query, rows in zip(call.arguments["query"], result.items, strict=True):
                    self._contexts.record(episode_id, [row["url"] for row in rows if row.get("url")], query)
            self._answer(future, result, started)

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin_release(self, episode_id: str) -> None:
        self._ended.append(episode_id)
        if not self._releasing:
            self._releasing = True
            task = self._loop.create_task(self._release_ended())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _release_ended(self) -> None:
        """Tell the server, one request at a time. One that fails is only counted: the server's memory is bounded."""
        while self._ended:
            body = encode_json({"episode_ids": list(self._ended)})
            count = len(self._ended)
            self._ended.clear()
            try:
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    told = not problem_of(await self._client.post(self._url + RELEASE_PATH, content=body))
            except (httpx.HTTPError, TimeoutError):
                told = False
            if not told:
                self._metrics.count("unreleased", count)
        self._releasing = False

    async def _ask(self, item: Item, asked: int, started: float, deadline: float) -> ToolResult:
        broken: list[str] = []  # the last connection error

        def note(state: RetryCallState) -> None:
            assert state.outcome is not None
            error = state.outcome.exception()
            broken[:] = [str(error) or type(error).__name__]

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_CONNECTION_ERRORS),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            before_sleep=note,
        )
        try:
            async with asyncio.timeout_at(deadline), self._slots:  # the loop's clock is time.monotonic's
                reply = await retrying(self._post, item, deadline)
        except TimeoutError:
            waited = f"within {deadline - started:g} s"
            if broken:
                return _error("connection", f"No search server at {self._url} {waited}: {broken[0]}.")
            return _error("timeout", f"The search server at {self._url} gave no answer {waited}.")
        if problem := problem_of(reply):
            kind = "bad_request" if 400 <= reply.status_code < 500 else "bad_reply"
            return _error(kind, f"The search server at {self._url} {problem}.")
        try:
            result = read_result(read_reply(reply.content, 1)[0])
            if result.ok and len(result.items) != asked:
                raise ValueError(f"has {len(result.items)} lists of results for {asked} queries")
        except ValueError as error:
            return _error("bad_reply", f"The reply of {self._url} {error}.")
        return result

    async def _post(self, item: Item, deadline: float) -> httpx.Response:
        timeout_s = hop_budget(deadline - time.monotonic())
        body = encode_json({"query_contents": [item], "timeout_s": timeout_s})
        return await self._client.post(self._url + EXECUTION_PATH, content=body)

    def _answer(self, future: "Future[ToolResult]", result: ToolResult, started: float) -> None:
        self._metrics.count("cache_hits", len(result.items) if result.cached else 0)
        self._metrics.record(result, time.monotonic() - started, self._config.max_queries)
        future.set_result(result)


def _error(kind: str, sentence: str) -> ToolResult:
    return ToolResult(ok=False, error=sentence, error_kind=kind)


def _count_asked(call: ToolCall) -> int:
    """Queries or URLs of the call, for each of which there must be a list of results; the server judges the rest."""
    asked = list(call.arguments.values()) if isinstance(call.arguments, dict) else []
    return len(asked[0]) if asked and isinstance(asked[0], list) else 0
