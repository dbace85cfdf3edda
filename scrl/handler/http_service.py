"""What the project's HTTP servers share: who may ask and how much, how errors look, how one is started.

Whoever can reach a server may search at its owner's cost, so it listens on 127.0.0.1 unless told otherwise, and on any
other address only with a token: ``SCRL_TOKEN`` in the environment of servers and clients.
"""

import asyncio
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scrl.handler.wire import TOKEN_VARIABLE, client_headers, encode_json, service_token

MAX_BODY_BYTES = 16 * 2**20
KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that they never send into one just closed


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


def json_error(status: int, sentence: str) -> Response:
    return json_response({"error": sentence}, status)


def closing(handler: Any) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """The lifespan of a server that closes ``handler`` when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(handler.close)

    return lifespan


def make_app(
    title: str,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    tell: Callable[[int, str], Response] = json_error,
) -> FastAPI:
    """An app that asks for the token (where one is set), limits requests, and tells every error by ``tell``."""
    app = FastAPI(title=title, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=service_token(), max_body_bytes=max_body_bytes, tell=tell)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return tell(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:])) or "body"
        return tell(400, f"{where}: {first['msg']}")

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:  # the server logs its traceback
        return tell(500, f"internal error: {type(error).__name__}")

    return app


class Guard:
    """ASGI middleware: 401 without the token, 413 for a body that is too large, before any of it is parsed."""

    def __init__(self, app: ASGIApp, token: str, max_body_bytes: int, tell: Callable[[int, str], Response]) -> None:
        self._app, self._token, self._limit, self._tell = app, token.encode(), max_body_bytes, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._knows(headers.get(b"authorization", b"")):
            sentence = f"the token is missing or wrong; send the server's {TOKEN_VARIABLE} as a bearer token"
            await self._tell(401, sentence)(scope, receive, send)
            return
        too_large = f"the request is larger than {self._limit} bytes; send fewer items at once"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limit:
            await self._tell(413, too_large)(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:  # sent in chunks, without a length
                raise HTTPException(413, too_large)
            return message

        await self._app(scope, limited, send)

    def _knows(self, header: bytes) -> bool:
        scheme, _, token = header.partition(b" ")
        return not self._token or (scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token))


def serve(app: FastAPI, host: str, port: int, what: str, prepare: Callable[[], Awaitable[object]] | None = None) -> int:
    """Listen until SIGINT or SIGTERM; the exit code. Port 0 takes a free one; the address is printed.

    ``prepare`` is awaited first, in the loop that serves; a lifespan's error would be a traceback in the log instead.
    Raises its ValueError, and ValueError for an address that can't be listened on or that others can reach without a
    token.
    """
    if not _is_loopback(host) and not service_token():
        raise ValueError(
            f"host={host} can be reached from other machines, and nothing would ask who they are; export "
            f"{TOKEN_VARIABLE} here and for the clients (openssl rand -hex 32 makes one), or use host=127.0.0.1"
        )
    client_headers()  # a token that no client could send is refused here
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(f"can't listen on {host}:{port} ({error}); choose another port or host") from error
    shown = f"[{host}]" if ":" in host else host
    print(f"{what}: http://{shown}:{listener.getsockname()[1]}", flush=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line a request otherwise
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=5
    )

    async def run() -> None:
        if prepare is not None:
            await prepare()
        await uvicorn.Server(settings).serve(sockets=[listener])

    try:
        with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
            runner.run(run())
    except KeyboardInterrupt:
        return 130
    return 0


def prometheus(metrics: dict[str, float], prefix: str = "scrl_") -> Response:
    """``metrics`` in Prometheus' text format. Every name becomes one of letters, digits and underscores."""
    lines = []
    for name, value in metrics.items():
        plain, _, labels = name.partition("{")
        plain = prefix + re.sub(r"\W+", "_", plain, flags=re.ASCII)
        lines.append(f"{plain}{'{' + labels if labels else ''} {value:.10g}\n")
    return Response("".join(lines), media_type="text/plain; version=0.0.4")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
