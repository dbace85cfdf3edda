"""The proxy: shares, order, servers that die, hang, lie and come back; proved by what each server was asked."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from scrl.handler import proxy
from scrl.handler.config import HandlerConfig
from scrl.handler.proxy import Balancer, create_proxy_app, main
from scrl.handler.wire import answered, read_call
from scrl.types import ToolResult

Answer = Callable[[list[dict]], Awaitable[bytes | None]]


SEARCH = {"name": "web_search", "arguments": {"query": ["q"]}}
BROWSE = {"name": "browse_webpage", "arguments": {"url_list": ["u"]}}


def items(*names: int, call: dict | str = SEARCH) -> list[dict]:
    return [{"idx": name, "question": f"question {name}", "think": "", "tool_call": call} for name in names]


async def proper(asked: list[dict]) -> bytes:
    rows = [[{"title": str(one["idx"]), "url": "u", "text": "t"}] for one in asked]
    back = [answered(one, read_call(one), ToolResult(items=[row])) for one, row in zip(asked, rows, strict=True)]
    return http_reply(200, json.dumps({"query_contents": back}))


def http_reply(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode()


class Server:
    """A search server at the level of the socket. ``answer`` gives the bytes to send back, None to reset instead."""

    def __init__(self, answer: Answer = proper) -> None:
        self.answer, self.port = answer, 0
        self.healthy = True
        self.slow_checks = self.checks = 0  # so many of the next ones get no answer
        self.asked: list[int] = []  # idx of each call, as it arrives
        self.granted: list[float] = []
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """As SIGKILL: nobody listens any more, and every connection is reset."""
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line.split()[1]) for line in head.splitlines() if "ength:" in line), 0)
                body = await reader.readexactly(length)
                if head.startswith("GET /health"):
                    self.checks, slow = self.checks + 1, self.slow_checks > 0
                    self.slow_checks -= slow
                    if slow or not self.healthy:
                        await asyncio.sleep(60)
                    writer.write(http_reply(200, "{}"))
                    continue
                request = json.loads(body)
                self.asked += [one["idx"] for one in request["query_contents"]]
                self.granted.append(request["timeout_s"])
                reply = await self.answer(request["query_contents"])
                if reply is None:
                    writer.transport.abort()
                    return
                writer.write(reply)
        self._connections.discard(writer)


@asynccontextmanager
async def balanced(*servers: Server) -> AsyncIterator[Balancer]:
    for server in servers:
        await server.start()
    try:
        async with Balancer([server.url for server in servers]) as balancer:
            yield balancer
    finally:
        for server in servers:
            server.kill()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def titles(answers: list[dict]) -> list[str]:
    return [one["result"]["items"][0][0]["title"] for one in answers]


@pytest.fixture(autouse=True)
def quick_health(monkeypatch) -> None:
    monkeypatch.setattr(proxy, "HEALTH_INTERVAL_S", 0.02)


async def test_calls_are_shared_out_evenly_and_come_back_in_order():
    first, second = Server(), Server()
    async with balanced(first, second) as balancer:
        answers = await balancer.run(items(*range(20, 0, -1)), 30.0)
    assert titles(answers) == [str(i) for i in range(20, 0, -1)] == [str(one["idx"]) for one in answers]
    assert len(first.asked) == len(second.asked) == 10
    assert sorted(first.asked + second.asked) == list(range(1, 21))
    assert all(25 < granted < 30 for granted in first.granted), "a server must answer before we are due"


async def test_the_server_with_the_fewest_outstanding_calls_is_asked():
    gate = asyncio.Event()

    async def slow(asked: list[dict]) -> bytes:
        await gate.wait()
        return await proper(asked)

    first, second = Server(slow), Server()
    async with balanced(first, second) as balancer:
        long = asyncio.create_task(balancer.run(items(1, 2), 30.0))  # one each; the first server is busy from here on
        await until(lambda: len(first.asked) == balancer.status()[second.url]["answered"] == 1)
        for index in range(3, 9):
            assert titles(await balancer.run(items(index), 30.0)) == [str(index)]
        assert len(first.asked) == 1 and len(second.asked) == 7
        gate.set()
        assert titles(await long) == ["1", "2"]
        assert [server["outstanding"] for server in balancer.status().values()] == [0, 0]


@pytest.mark.parametrize("call", [BROWSE, json.dumps(BROWSE)])
async def test_one_server_reads_all_pages_of_an_episode(call):
    servers = [Server(), Server(), Server()]
    numbered = {index: [one | {"episode_id": f"e{index}"} for one in items(index, call=call)] for index in range(12)}
    async with balanced(*servers) as balancer:
        for asked in numbered.values():
            await balancer.run(asked * 2, 30.0)
        homes = {index: [index in server.asked for server in servers].index(True) for index in numbered}
        assert all(server.asked.count(index) in (0, 2) for server in servers for index in numbered)
        assert len(set(homes.values())) == 3
        servers[0].kill()
        await until(lambda: not balancer.status()[servers[0].url]["up"])
        for asked in numbered.values():
            await balancer.run(asked, 30.0)
        for index, home in homes.items():
            stayed = servers[home].asked.count(index) == 3
            assert stayed == (home != 0), "only the dead server's episodes move"


async def test_a_call_that_breaks_every_server_is_given_up_before_it_has_had_them_all():
    async def breaks(asked: list[dict]) -> bytes | None:
        return None if any(one["idx"] == 666 for one in asked) else await proper(asked)

    servers = [Server(breaks) for _ in range(6)]
    async with balanced(*servers) as balancer:
        (poisoned,) = await balancer.run(items(666), 60.0)
        assert poisoned["result"]["error_kind"] == "connection"
        assert poisoned["result"]["error"].startswith("4 search servers in a row broke under this call")
        assert sum(len(server.asked) for server in servers) == 4
        assert titles(await balancer.run(items(1), 30.0)) == ["1"]


async def test_what_cannot_be_sent_leaves_nothing_outstanding():
    async with balanced(Server()) as balancer:
        with pytest.raises(TypeError):
            await balancer.run([{"idx": object()}], 30.0)
        assert [server["outstanding"] for server in balancer.status().values()] == [0]


async def test_a_killed_servers_calls_move_and_each_is_answered_once():
    async def never(asked: list[dict]) -> bytes:
        await asyncio.sleep(60)
        return b""

    dying, living = Server(never), Server()
    async with balanced(dying, living) as balancer:
        running = [asyncio.create_task(balancer.run(items(3 * i, 3 * i + 1, 3 * i + 2), 60.0)) for i in range(8)]
        await until(lambda: len(dying.asked) + len(living.asked) == 24)
        assert dying.asked
        dying.kill()
        answers = [one for task in running for one in await task]
        assert titles(answers) == [str(i) for i in range(24)]
        assert sorted(living.asked) == list(range(24)), "asked more than once, or not at all"
        assert balancer.status()[dying.url]["up"] == 0
        assert titles(await balancer.run(items(*range(6)), 30.0)) == [str(i) for i in range(6)]
        assert balancer.status()[dying.url]["moved"] >= len(dying.asked)

        dying.answer = proper  # it comes back where it was, and gets its share again
        await dying.start()
        await until(lambda: balancer.status()[dying.url]["up"] == 1)
        before = len(dying.asked)
        await balancer.run(items(*range(10)), 30.0)
        assert len(dying.asked) == before + 5


async def test_a_server_that_hangs_is_left(monkeypatch):
    monkeypatch.setattr(proxy, "HEALTH_TIMEOUT_S", 0.5)

    async def never(asked: list[dict]) -> bytes:
        hanging.healthy = False
        await asyncio.sleep(60)
        return b""

    hanging, living = Server(never), Server()
    async with balanced(hanging, living) as balancer:
        answers = await balancer.run(items(*range(4)), 60.0)
        assert titles(answers) == ["0", "1", "2", "3"]
        assert balancer.status()[hanging.url]["up"] == 0 and hanging.asked
        assert sorted(living.asked) == [0, 1, 2, 3]


async def test_one_slow_health_check_is_no_death(monkeypatch):
    monkeypatch.setattr(proxy, "HEALTH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(proxy, "HEALTH_INTERVAL_S", 0.01)
    server = Server()
    server.slow_checks = 1
    async with balanced(server) as balancer:
        watched = balancer._servers[0]
        async with asyncio.timeout(20):
            while server.checks < 3:  # the slow one, the next, and one after that has been judged
                await asyncio.sleep(0.005)
                assert balancer.is_up
            server.slow_checks = 10**9
            await watched.down.wait()


async def test_a_broken_connection_is_tried_again_on_a_lone_server():
    async def first_breaks(asked: list[dict]) -> bytes | None:
        return None if len(server.asked) == 2 else await proper(asked)

    server = Server(first_breaks)
    async with balanced(server) as balancer:
        assert titles(await balancer.run(items(1, 2), 30.0)) == ["1", "2"]
    assert server.asked == [1, 2, 1, 2]


@pytest.mark.parametrize(
    "reply",
    [
        http_reply(500, "boom\nsecond line"),
        http_reply(200, "<html>"),
        http_reply(200, "[1, 2]"),
        http_reply(200, '{"query_contents": []}'),
        http_reply(200, '{"query_contents": [1, 2, 3]}'),
        http_reply(200, "[" * 200_000),
        http_reply(401, '{"error": "the token is missing"}'),
        http_reply(200, "no gzip").replace(b"Content-", b"Content-Encoding: gzip\r\nContent-", 1),
    ],
)
async def test_a_server_that_lies_is_asked_no_more_for_that_call_but_stays_up(reply):
    async def lies(asked: list[dict]) -> bytes:
        return reply

    liar, honest = Server(lies), Server()
    async with balanced(liar, honest) as balancer:
        assert titles(await balancer.run(items(*range(6)), 30.0)) == [str(i) for i in range(6)]
        assert sorted(honest.asked) == list(range(6)) and len(liar.asked) == 3
        assert balancer.status()[liar.url]["up"] == 1
    async with balanced(Server(lies), Server(lies)) as balancer:
        answers = await balancer.run(items(*range(6)), 30.0)
    assert [one["idx"] for one in answers] == list(range(6))
    assert {one["result"]["error_kind"] for one in answers} == {"bad_reply"}
    assert all("No search server gave an answer: http://127.0.0.1" in one["content"] for one in answers)


async def test_all_down_is_one_clear_error_after_the_deadline_and_not_before():
    server = Server()
    async with balanced(server) as balancer:
        server.kill()
        started = time.monotonic()
        answers = await balancer.run(items(1, 2), 0.5)
        assert time.monotonic() - started >= 0.5
        errors = {one["result"]["error"] for one in answers}
        assert len(errors) == 1 and f"No search server was up within 0.5 s ({server.url}: " in errors.pop()
        assert {one["result"]["error_kind"] for one in answers} == {"connection"}

        waiting = asyncio.create_task(balancer.run(items(3), 30.0))  # a server that comes within the deadline
        await asyncio.sleep(0.1)
        await server.start()
        assert titles(await waiting) == ["3"]


async def test_a_healthy_server_that_is_too_slow_is_a_timeout_at_the_deadline():
    async def never(asked: list[dict]) -> bytes:
        await asyncio.sleep(60)
        return b""

    server = Server(never)
    async with balanced(server) as balancer:
        (answer,) = await balancer.run(items(1), 0.3)
        assert answer["result"]["error_kind"] == "timeout" and answer["result"]["latency_s"] >= 0.3
        assert json.loads(answer["content"])["error"].endswith("gave no answer within 0.3 s.")
        assert balancer.status()[server.url]["outstanding"] == 0


async def test_proxies_stack(serve_app):
    server = Server()
    await server.start()
    inner = serve_app(create_proxy_app(HandlerConfig(server_url_list=(server.url,))))
    outer = serve_app(create_proxy_app(HandlerConfig(server_url_list=(inner + "/", inner))))
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        reply = await client.post(outer + "/handle_execution", json={"query_contents": items(5, 4, 3)})
        assert titles(reply.json()["query_contents"]) == ["5", "4", "3"]
        assert server.asked == [5, 4, 3]
        health = (await client.get(outer + "/health")).json()
        assert health["status"] == "ok" and list(health["servers"]) == [inner]
        assert f'scrl_proxy_answered{{server="{inner}"}} 3\n' in (await client.get(outer + "/metrics")).text
        server.kill()
        async with asyncio.timeout(20):
            while (reply := await client.get(outer + "/health")).status_code == 200:
                await asyncio.sleep(0.02)
        assert reply.json()["servers"][inner]["error"].startswith("answered 503")


def test_a_list_of_servers_that_is_none_is_refused(capsys):
    assert main(["server_url_list=[]"]) == 2
    assert main(["server_url_list=[ftp://x]"]) == 2
    assert main(["server_url_list=[127.0.0.1:5005]"]) == 2
    assert main(["server_url_list=[http://127.0.0.1:5004]", "proxy_port=5004"]) == 2
    empty, ftp, bare, itself = capsys.readouterr().err.splitlines()
    assert "server_url_list is empty" in empty and "ftp://x" in ftp and "write it as http://" in bare
    assert "is the proxy itself" in itself
