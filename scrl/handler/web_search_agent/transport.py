"""HTTP under a deadline that holds: one request, one bounded reply, every failure a ``SearchError``.

Requests run on an event loop of the backend's own, since a coroutine can be cut off at any point: in name resolution,
in a handshake, at a server that sends a byte a second. The timeouts of a blocking client bound single operations only.
"""

import asyncio
import email.utils
import functools
import json
import logging
import ssl
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import httpx

from scrl.handler.web_search_agent.backend import SearchError

MAX_BODY = 4 * 2**20  # bytes, decompressed
PATIENCE_S = 1.0  # a timeout after less says more about the call's deadline than about the server
_BAD_REQUEST = (400, 413, 414, 422)  # these blame the query; other 4xx the key, the quota or the address

# It writes every address to the log at INFO, and some engines take their key in the address.
logging.getLogger("httpx").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Request:
    """At most one of ``json`` and ``form`` is set; without either there is no body."""

    method: str
    url: str
    params: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    json: Any = None
    form: dict[str, str] | None = None


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class Transport(Protocol):
    """An HTTP client. Raises SearchError for what goes wrong below HTTP, and for a body over MAX_BODY."""

    async def fetch(self, request: Request) -> Reply: ...

    async def aclose(self) -> None: ...


@functools.cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes longer than everything else at a start


class HttpxTransport:
    """httpx, which takes the environment's proxies (HTTPS_PROXY, NO_PROXY). Redirects aren't followed: they would take
    the key along."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        headers = {"User-Agent": "MiniResearcher", "Accept-Encoding": "gzip"}
        # Without a timeout of its own: the loop bounds the time.
        self._client = httpx.AsyncClient(timeout=None, limits=limits, headers=headers, verify=_certificates())

    async def fetch(self, request: Request) -> Reply:
        message = self._client.build_request(
            request.method,
            request.url,
            params=request.params or None,
            headers=request.headers,
            json=request.json,
            data=request.form,
        )
        try:
            response = await self._client.send(message, stream=True)
            try:
                headers = {name.lower(): value for name, value in response.headers.items()}
                chunks = _unpacked(headers.get("content-encoding", ""), response.aiter_raw())
                return Reply(response.status_code, headers, await read_bounded(headers, chunks))
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            place = f"{message.url.scheme}://{message.url.netloc.decode()}"
            raise SearchError("connection", f"can't be reached at {place} ({reason})", retryable=True) from error

    async def aclose(self) -> None:
        await self._client.aclose()


async def _unpacked(encoding: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """httpx would unpack a whole chunk, through layer after layer, before anybody could count it."""
    try:
        unpack = unpacker(encoding)
        async for chunk in chunks:
            yield unpack(chunk, MAX_BODY + 1)
    except (ValueError, zlib.error) as error:
        said = str(error) if isinstance(error, ValueError) else f"sent a body that can't be decompressed ({error})"
        raise SearchError("bad_reply", said) from error


async def read_bounded(headers: dict[str, str], chunks: AsyncIterator[bytes]) -> bytes:
    """All of ``chunks``. SearchError ``bad_reply`` once they are more than MAX_BODY, before reading where announced."""
    size = headers.get("content-length", "")
    body = bytearray()
    if not (size.isdecimal() and int(size) > MAX_BODY):
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_BODY:
                break
        else:
            return bytes(body)
    raise SearchError("bad_reply", f"sent more than {MAX_BODY >> 20} MiB")


def unpacker(encoding: str) -> Callable[[bytes, int], bytes]:
    """(piece, most bytes wanted) -> unpacked bytes. What is beyond is never unpacked, so no bomb goes off.

    ``encoding``: a Content-Encoding header. ValueError, one clause, for one that was not offered, layers above all.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return lambda piece, most: piece[:most]
    if encoding in ("gzip", "x-gzip"):
        return zlib.decompressobj(wbits=31).decompress
    if encoding == "deflate":
        return _inflate()
    raise ValueError(f"sent a body packed as {encoding[:80]!r}, which was not offered")


def _inflate() -> Callable[[bytes, int], bytes]:
    """HTTP's deflate is zlib's format; servers that send the bare stream are understood too, as browsers do."""
    unpacker = None

    def unpack(piece: bytes, most: int) -> bytes:
        nonlocal unpacker
        if unpacker is None and piece:
            # A zlib header: method 8 in the low half byte (the rest is a window size of at most 7).
            unpacker = zlib.decompressobj(wbits=15 if piece[0] & 0x0F == 8 and piece[0] >> 4 <= 7 else -15)
        return unpacker.decompress(piece, most) if unpacker else b""

    return unpack


class Fetcher:
    """Lets threads fetch over a ``Transport`` that lives on an event loop of its own."""

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport = transport
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"http-{name}", daemon=True)
        self._thread.start()

    def fetch(self, request: Request, seconds: float) -> Reply:
        """The reply, whatever its status, within ``seconds``. Raises SearchError."""
        started = time.monotonic()
        if self._loop.is_closed():
            raise SearchError("internal", "is closed", fault=False)
        future = asyncio.run_coroutine_threadsafe(self._fetch(request, seconds), self._loop)
        try:
            # The coroutine ends by itself; this bound is for a loop that lags.
            return future.result(seconds + PATIENCE_S)
        except TimeoutError:
            future.cancel()
            waited = time.monotonic() - started
            raise SearchError("timeout", f"gave no answer within {waited:.1f} s", fault=seconds >= PATIENCE_S) from None
        except CancelledError:
            raise SearchError("internal", "was closed while it was asked", fault=False) from None

    async def _fetch(self, request: Request, seconds: float) -> Reply:
        async with asyncio.timeout(seconds):
            return await self._transport.fetch(request)

    def close(self) -> None:
        """Cut off what is under way, close the connections, end the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cut_off(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _cut_off(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._transport.aclose()


def check_status(reply: Reply) -> None:
    """SearchError for a reply that isn't 2xx, with the body's first line."""
    status = reply.status
    if 200 <= status < 300:
        return
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "?"
    message = f"answered {status} {phrase}: {first_line(reply.text)}"
    if status == 429 or status == 503 and "retry-after" in reply.headers:
        wait = retry_after_s(reply.headers.get("retry-after", ""))
        wanted = "" if wait is None else f" (asks to wait {wait:.0f} s)"
        raise SearchError("rate_limited", message + wanted, retryable=True, retry_after_s=wait)
    if status >= 500 or status == 408:
        raise SearchError("bad_reply", message, retryable=True)
    if 300 <= status < 400:
        raise SearchError(
            "no_backend", f"answered {status} {phrase} to {reply.headers.get('location', 'nowhere')!r:.200}"
        )
    raise SearchError("bad_request" if status in _BAD_REQUEST else "no_backend", message)


def read_json(reply: Reply) -> Any:
    """The JSON of a 2xx reply. SearchError ``bad_reply``, with the body's first line, for an HTML page or half JSON."""
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        text = reply.text.lstrip("\ufeff \t\r\n")
        kind = "an HTML page" if text.startswith("<") else "no valid JSON" if text else "an empty body"
        raise SearchError("bad_reply", f"sent {kind}" + (f": {first_line(text)}" if text else "")) from None


def first_line(text: str) -> str:
    """The first line that isn't blank, 200 characters at most, without control characters."""
    line = next((line.strip() for line in text[:4096].splitlines() if line.strip()), "(no text)")
    line = "".join(character for character in line if character.isprintable())
    return line if len(line) <= 200 else line[:199] + "…"


def retry_after_s(value: str) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3); None for anything else."""
    value = value.strip()
    if value.isascii() and value.isdecimal():
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None
