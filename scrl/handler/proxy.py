"""The proxy before several search servers, with the same API as theirs, so that proxies stack.

A request's calls are shared out so that each server has about as many outstanding as the others; the pages of one
episode are all read by one server, which remembers what it has told that episode. A server that can't be
reached, or that fails its health checks, is *down*: what it was asked moves to the others, and it is asked again as
soon as it is healthy. A call is answered once, whichever server did it last; a search that a dead server had begun is
done again. A call that was under way when server after server broke is given up, since it may be what breaks them. With
every server down, calls wait for one until their deadline.

    python scrl/handler/handler.py 'server_url_list=[http://127.0.0.1:5005,http://127.0.0.1:5006]' [key=value ...]

Keys: config.yaml beside this file (``--config`` reads another).
"""

import asyncio
import contextlib
import logging
import random
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from fastapi import FastAPI, Response

from scrl.handler.config import HandlerConfig, config_from_arguments
from scrl.handler.http_service import json_response, make_app, prometheus, serve
from scrl.handler.wire import (
    EXECUTION_PATH,
    RELEASE_PATH,
    RELEASE_TIMEOUT_S,
    ExecutionRequest,
    Item,
    ReleaseRequest,
    checked_url,
    encode_json,
    failed,
    hop_budget,
    http_client,
    problem_of,
    read_reply,
)

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
HEALTH_FAILURES = 2  # in a row: one may be a busy moment
MAX_MOVES = 3  # of a call, from servers that broke while they had it


@dataclass(eq=False)
class _Server:
    url: str
    down: asyncio.Event = field(default_factory=asyncio.Event)
    suspect: asyncio.Event = field(default_factory=asyncio.Event)  # set: check its health now
    health_failures: int = 0  # in a row
    error: str = ""  # what went wrong last, above all why it is down
    outstanding: int = 0  # calls it was asked and hasn't answered
    answered: int = 0
    moved: int = 0  # calls taken from it to the others


@dataclass
class _Batch:
    """A request under way. ``answers[i]`` belongs to ``items[i]``."""

    items: Sequence[Item]
    started: float
    deadline: float
    answers: list[Item | None]

    def give_up(self, places: Sequence[int], kind: str, sentence: str) -> None:
        for place in places:
            self.answers[place] = failed(self.items[place], kind, sentence, time.monotonic() - self.started)


class _Unreachable(Exception):
    """The server didn't answer; another may. ``asked``: it had the calls, so they may be why."""

    def __init__(self, asked: bool) -> None:
        super().__init__()
        self.asked = asked


class _Refused(Exception):
    """The server answered, but not as it should; so it would again."""


class Balancer:
    """Shares calls out over servers. It lives in one event loop: ``async with`` it."""

    def __init__(self, urls: Sequence[str]) -> None:
        """ValueError for an empty list, or an entry that is no http(s) URL."""
        if not urls:
            raise ValueError("server_url_list is empty; give search servers, such as [http://127.0.0.1:5005]")
        self._servers = [_Server(url) for url in dict.fromkeys(checked_url("server_url_list", url) for url in urls)]

    async def __aenter__(self) -> "Balancer":
        self._client = http_client()
        self._recovery = asyncio.Condition()
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self._servers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._client.aclose()

    async def run(self, items: Sequence[Item], timeout_s: float) -> list[Item]:
        """The answered items, in order, within ``timeout_s``. What can't be answered says so in its own place."""
        started = time.monotonic()
        batch = _Batch(items, started, started + timeout_s, [None] * len(items))
        if items:
            await self._share_out(batch, range(len(items)), {})
        answers = [answer for answer in batch.answers if answer is not None]
        assert len(answers) == len(items)
        return answers

    async def release(self, episode_ids: list[str]) -> int:
        """Tell every server that is up; how many of them heard. One that didn't forgets its oldest episodes itself."""
        body = encode_json({"episode_ids": episode_ids})

        async def tell(server: _Server) -> bool:
            try:
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    return not problem_of(await self._client.post(server.url + RELEASE_PATH, content=body))
            except (httpx.HTTPError, TimeoutError):
                return False

        return sum(await asyncio.gather(*(tell(server) for server in self._servers if not server.down.is_set())))

    @property
    def is_up(self) -> bool:
        return any(not server.down.is_set() for server in self._servers)

    def status(self) -> dict[str, dict[str, str | int]]:
        """By URL: ``up`` (0 or 1), ``outstanding``, ``answered``, ``moved``, ``error``."""
        return {
            server.url: {
                "up": int(not server.down.is_set()),
                "outstanding": server.outstanding,
                "answered": server.answered,
                "moved": server.moved,
                "error": server.error,
            }
            for server in self._servers
        }

    async def _share_out(
        self, batch: _Batch, places: Sequence[int], refused: dict[_Server, str], moves: int = 0
    ) -> None:
        """Answer ``places`` of ``batch``. ``refused``: servers not to be asked again, and what they replied.

        ``moves``: servers that broke while they had these calls.
        """
        candidates = [server for server in self._servers if server not in refused]
        if not candidates:
            batch.give_up(places, "bad_reply", f"No search server gave an answer: {'; '.join(refused.values())}.")
            return
        up = await self._wait_for_some(candidates, batch.deadline)
        if not up:
            reasons = "; ".join(f"{server.url}: {server.error}" for server in candidates)
            waited = batch.deadline - batch.started
            batch.give_up(places, "connection", f"No search server was up within {waited:g} s ({reasons}).")
            return
        shares: dict[_Server, list[int]] = {}
        for place in places:
            chosen = self._home(batch.items[place], up)
            chosen = chosen or min(up, key=lambda server: (server.outstanding, server.answered))
            chosen.outstanding += 1
            shares.setdefault(chosen, []).append(place)
        await asyncio.gather(*(self._serve(server, batch, share, refused, moves) for server, share in shares.items()))

    def _home(self, item: Item, up: Sequence[_Server]) -> _Server | None:
        """The one server that reads pages for the item's episode; None for a search, which any may do."""
        episode_id, call = item.get("episode_id"), item.get("tool_call")
        name = call.get("name") if isinstance(call, dict) else call
        if not episode_id or "browse_webpage" not in str(name):
            return None
        number = zlib.crc32(encode_json(episode_id))  # the same in every process, as hash() is not
        home = self._servers[number % len(self._servers)]
        return home if home in up else up[number % len(up)]  # only a lost server's episodes move

    async def _wait_for_some(self, candidates: Sequence[_Server], deadline: float) -> list[_Server]:
        """Those of ``candidates`` that are up, as soon as there is one; none after ``deadline``."""

        def up() -> list[_Server]:
            return [server for server in candidates if not server.down.is_set()]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()), self._recovery:
                await self._recovery.wait_for(up)
        return up() if time.monotonic() < deadline else []

    async def _serve(
        self, server: _Server, batch: _Batch, share: list[int], refused: dict[_Server, str], moves: int
    ) -> None:
        """Have ``server`` answer ``share``; where it can't, let the others."""
        try:
            replies = await self._ask(server, [batch.items[place] for place in share], batch.deadline)
        except TimeoutError:
            waited = batch.deadline - batch.started
            batch.give_up(share, "timeout", f"The search server {server.url} gave no answer within {waited:g} s.")
        except _Unreachable as error:
            moves += error.asked
            if moves > MAX_MOVES:
                sentence = f"{moves} search servers in a row broke under this call, the last one {server.url}."
                batch.give_up(share, "connection", sentence)
                return
            server.moved += len(share)
            await asyncio.sleep(random.uniform(0.0, 0.1))
            await self._share_out(batch, share, refused, moves)
        except _Refused as error:
            logger.warning("%s", error)
            server.moved += len(share)
            await self._share_out(batch, share, {**refused, server: str(error)}, moves)
        else:
            server.answered += len(share)
            for place, reply in zip(share, replies, strict=True):
                batch.answers[place] = reply

    async def _ask(self, server: _Server, items: list[Item], deadline: float) -> list[Item]:
        """Raises _Unreachable, _Refused, and TimeoutError at ``deadline``. Gives up as soon as the server is down."""
        try:
            reply = await self._post(server, items, deadline)
        finally:
            server.outstanding -= len(items)
        if problem := problem_of(reply):
            raise _Refused(f"{server.url} {problem}")
        try:
            return read_reply(reply.content, len(items))
        except ValueError as error:
            raise _Refused(f"{server.url} {error}") from None

    async def _post(self, server: _Server, items: list[Item], deadline: float) -> httpx.Response:
        remaining = deadline - time.monotonic()
        body = encode_json({"query_contents": items, "timeout_s": hop_budget(remaining)})
        post = asyncio.create_task(self._client.post(server.url + EXECUTION_PATH, content=body))
        down = asyncio.create_task(server.down.wait())
        try:
            await asyncio.wait({post, down}, timeout=max(remaining, 0), return_when=asyncio.FIRST_COMPLETED)
            if not post.done():
                raise _Unreachable(asked=True) if down.done() else TimeoutError
            return post.result()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._mark_down(server, error)
            raise _Unreachable(asked=False) from error
        except httpx.TransportError as error:  # a connection that broke; whether it is dead its health will tell
            server.error = str(error) or type(error).__name__
            server.suspect.set()
            raise _Unreachable(asked=True) from error
        except httpx.HTTPError as error:  # a body that can't be decoded
            raise _Refused(f"{server.url} sent {type(error).__name__}: {error}") from error
        finally:
            post.cancel()
            down.cancel()

    async def _watch(self, server: _Server) -> None:
        """Check the server's health over and over, for as long as the balancer lives."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.suspect.wait(), HEALTH_INTERVAL_S)
            server.suspect.clear()
            try:
                reply = await self._client.get(server.url + "/health", timeout=HEALTH_TIMEOUT_S)
            except httpx.HTTPError as error:
                server.health_failures += 1
                if isinstance(error, httpx.ConnectError) or server.health_failures >= HEALTH_FAILURES:
                    self._mark_down(server, error)
                continue
            if problem := problem_of(reply):
                self._mark_down(server, problem)
                continue
            server.health_failures = 0
            if server.down.is_set():
                logger.warning("search server %s is back", server.url)
                server.error = ""
                server.down.clear()
                async with self._recovery:
                    self._recovery.notify_all()

    def _mark_down(self, server: _Server, why: object) -> None:
        server.error = str(why) or type(why).__name__
        if not server.down.is_set():
            logger.warning("search server %s is down: %s", server.url, server.error)
            server.down.set()


def create_proxy_app(config: HandlerConfig) -> FastAPI:
    """The proxy before ``config.server_url_list``. Raises ValueError as Balancer does."""
    balancer = Balancer(config.server_url_list)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with balancer:
            yield

    app = make_app("search proxy", lifespan)

    @app.post(EXECUTION_PATH)
    async def handle_execution(request: ExecutionRequest) -> Response:
        timeout_s = min(request.timeout_s or config.timeout_s, config.timeout_s)
        return json_response({"query_contents": await balancer.run(request.query_contents, timeout_s)})

    @app.post(RELEASE_PATH)
    async def release(request: ReleaseRequest) -> Response:
        return json_response({"servers": await balancer.release(request.episode_ids)})

    @app.get("/health")
    async def health() -> Response:
        status = {"status": "ok" if balancer.is_up else "no server is up", "servers": balancer.status()}
        return json_response(status, 200 if balancer.is_up else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return prometheus(
            {
                f'proxy/{name}{{server="{url}"}}': value
                for url, server in balancer.status().items()
                for name, value in server.items()
                if name != "error"
            }
        )

    return app


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        config = config_from_arguments(__doc__, arguments)
        if (own := f"http://{config.host}:{config.proxy_port}") in config.server_url_list:
            raise ValueError(f"server_url_list holds {own}, which is the proxy itself; give the servers behind it")
        app = create_proxy_app(config)
        return serve(app, config.host, config.proxy_port, f"search proxy before {len(config.server_url_list)} servers")
    except ValueError as error:
        print(f"handler: {error}", file=sys.stderr)
        return 2
